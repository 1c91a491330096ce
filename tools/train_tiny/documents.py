"""Draws the shipped rows of the offline tasks and the shipped training prompts.

`python -m tools.train_tiny.documents --out lm_eval_moecache/tiny/rows` writes the shipped ones.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from random import Random

from lm_eval_moecache.tiny.documents import PAGES, PROMPTS, SPLITS, file_of
from tools.train_tiny.skills.generator import ASKED, MOST_DRAWS, distinct, problems

NUM_DOCUMENTS, NUM_PROMPTS = 500, 1000
PROMPTS_SEED = 42
"""Seed of the prompts on which the shipped predictors were trained."""
KINDS = tuple(dict.fromkeys(name for names in ASKED.values() for name in names))


def training_prompts(count: int, seed: int) -> list[dict[str, str]]:
    """Return up to `count` distinct prompts of each kind; some kinds have fewer."""
    prompts = []
    for kind in KINDS:
        unique = dict[str, None]()
        stream = problems(kind, "train", Random(f"prompts/{kind}/{seed}"))
        for problem in islice(stream, MOST_DRAWS * count):
            unique.setdefault(problem.prompt)
            if len(unique) == count:
                break
        prompts += [{"kind": kind, "prompt": prompt} for prompt in unique]
    return prompts


def _lines(rows: Iterable[Mapping[str, object]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write(out: Path, seed: int, count: int, num_prompts: int = NUM_PROMPTS) -> None:
    """Write one file for each task and split, and the prompts."""
    out.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        for task, names in ASKED.items():
            rows = (problem.row for problem in distinct(names, count, seed, split))
            file_of(out, task, split).write_bytes(_lines(rows))
    num_pages = len(PAGES.read_text(encoding="utf-8").splitlines())
    pages = distinct(("pages",), num_pages, 0, "train")
    file_of(out, "wikitext", "train").write_bytes(_lines(problem.row for problem in pages))
    prompts = _lines(training_prompts(num_prompts, PROMPTS_SEED))
    (out / PROMPTS.name).write_bytes(gzip.compress(prompts, mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=NUM_DOCUMENTS, help="documents of each split")
    arguments = parser.parse_args()
    write(arguments.out, arguments.seed, arguments.count)


if __name__ == "__main__":
    main()
