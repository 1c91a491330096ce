"""Training prompts of what the offline tasks ask, as many as are wanted."""

from __future__ import annotations

from itertools import islice
from random import Random

from lm_eval_moecache.tiny.generator import ASKED, MOST_DRAWS, problems

KINDS = tuple(dict.fromkeys(name for names in ASKED.values() for name in names))


def training_prompts(count: int, seed: int = 0) -> list[str]:
    """Return up to `count` different prompts of each kind; some kinds have fewer."""
    found: list[str] = []
    for kind in KINDS:
        drawn = islice(
            problems(kind, "train", Random(f"prompts/{kind}/{seed}")), MOST_DRAWS * count
        )
        seen: dict[str, None] = {}
        for problem in drawn:
            seen.setdefault(problem.prompt)
            if len(seen) == count:
                break
        found += seen
    return found
