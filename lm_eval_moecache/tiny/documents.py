"""The rows of the offline tasks, for `custom_dataset` in their YAML files, and training prompts.

They lie in `rows/`, as the repository's tools/train_tiny/documents.py has drawn them. lm-eval calls
a task's function with the task's metadata as keywords: `num_documents` takes the first of them, and
`rows` names a folder with another draw. Among them are all of `--model_args`, which lm-eval merges
into the metadata: a `seed` there is the policy's, and draws no rows.
"""

from __future__ import annotations

import gzip
import json
import re
from functools import lru_cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from datasets import Dataset

ROWS: Path = Path(__file__).parent / "rows"
PAGES: Path = ROWS / "pages.jsonl"
PROMPTS: Path = ROWS / "training_prompts.jsonl.gz"
SPLITS = ("train", "test")


def file_of(rows: Path, task: str, split: str) -> Path:
    """Return where the rows of one split lie in a folder."""
    return rows / f"{task}_{split}.jsonl"


@lru_cache(maxsize=32)
def _read(path: Path) -> list[dict[str, Any]]:
    """Read once in a process: a sweep asks with every run, and nobody changes rows."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _splits(
    task: str,
    *,
    num_documents: int | None = None,
    rows: str | None = None,
    **_: object,
) -> dict[str, Dataset]:
    folder = ROWS if rows is None else Path(rows)
    found = {split: _read(file_of(folder, task, split)) for split in SPLITS}
    most = min(map(len, found.values()))
    wanted = most if num_documents is None else num_documents
    if not 0 < wanted <= most:
        raise ValueError(
            f"metadata: num_documents={wanted}: {folder} has one draw of {most} documents of "
            f"tiny_{task}. Allowed: num_documents from 1 to {most}, or rows=FOLDER "
            "with what `python -m tools.train_tiny.documents --seed SEED --out FOLDER` draws in a "
            "clone of the repository."
        )
    return {split: Dataset.from_list(each[:wanted]) for split, each in found.items()}


def gsm8k(**metadata: Any) -> dict[str, Dataset]:
    """Word problems."""
    return _splits("gsm8k", **metadata)


def mmlu(**metadata: Any) -> dict[str, Dataset]:
    """Facts, answered by a letter."""
    return _splits("mmlu", **metadata)


def arc(**metadata: Any) -> dict[str, Dataset]:
    """Facts, answered by a text."""
    return _splits("arc", **metadata)


def truthfulqa(**metadata: Any) -> dict[str, Dataset]:
    """Claims beside common myths."""
    return _splits("truthfulqa", **metadata)


def bbh(**metadata: Any) -> dict[str, Dataset]:
    """The kinds in turn, so `--limit 40` has ten of each of the four."""
    return _splits("bbh", **metadata)


def wikitext(**_: object) -> dict[str, Dataset]:
    """Real text in the public domain that the model was not trained on; generated pages to train.

    The sources take turns, so a limit has some of each.
    """
    by_source = dict[str, list[dict[str, str]]]()
    for row in _read(PAGES):
        by_source.setdefault(row["source"], []).append({"page": row["page"]})
    in_turn = filter(None, chain.from_iterable(zip_longest(*by_source.values())))
    return {
        "train": Dataset.from_list(_read(file_of(ROWS, "wikitext", "train"))),
        "test": Dataset.from_list(list(in_turn)),
    }


def count_page(doc: dict[str, str], results: list[float]) -> dict[str, tuple[float, int]]:
    """Return (log-likelihood, count) for each of wikitext's metrics: words, and UTF-8 bytes."""
    (loglikelihood,) = results
    words = len(re.split(r"\s+", doc["page"]))
    size = len(doc["page"].encode("utf-8"))
    return {
        "word_perplexity": (loglikelihood, words),
        "byte_perplexity": (loglikelihood, size),
        "bits_per_byte": (loglikelihood, size),
    }


def training_prompts(count: int) -> list[str]:
    """Return up to `count` different prompts of each kind that the tasks ask; some have fewer."""
    by_kind = dict[str, list[str]]()
    with gzip.open(PROMPTS, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            by_kind.setdefault(row["kind"], []).append(row["prompt"])
    return [prompt for prompts in by_kind.values() for prompt in prompts[:count]]
