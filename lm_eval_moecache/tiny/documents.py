"""The rows of the offline tasks, train and test, for `custom_dataset` in their YAML files.

lm-eval calls each function with the task's metadata as keywords; `seed` and `num_documents` there
choose another draw. Two loads of one seed give the same rows on every machine. `wikitext` alone has
no draw: its test rows are the pages in held_out/.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import get_args

from datasets import Dataset

from lm_eval_moecache.tiny.generator import ASKED, distinct
from lm_eval_moecache.tiny.problem import Split

SPLITS: tuple[Split, ...] = get_args(Split)
NUM_DOCUMENTS = 500
PAGES: Path = Path(__file__).parent / "held_out" / "pages.jsonl"


def _rows(task: str, seed: int, num_documents: int) -> dict[str, Dataset]:
    return {split: _split(task, seed, num_documents, split) for split in SPLITS}


@lru_cache(maxsize=32)
def _split(task: str, seed: int, num_documents: int, split: Split) -> Dataset:
    """Drawn once in a process, which a sweep asks for them with every run; nobody changes them."""
    drawn = distinct(ASKED[task], num_documents, seed, split)
    return Dataset.from_list([dict(problem.row) for problem in drawn])


def gsm8k(*, seed: int = 0, num_documents: int = NUM_DOCUMENTS, **_: object) -> dict[str, Dataset]:
    return _rows("gsm8k", seed, num_documents)


def mmlu(*, seed: int = 0, num_documents: int = NUM_DOCUMENTS, **_: object) -> dict[str, Dataset]:
    return _rows("mmlu", seed, num_documents)


def arc(*, seed: int = 0, num_documents: int = NUM_DOCUMENTS, **_: object) -> dict[str, Dataset]:
    return _rows("arc", seed, num_documents)


def truthfulqa(
    *, seed: int = 0, num_documents: int = NUM_DOCUMENTS, **_: object
) -> dict[str, Dataset]:
    return _rows("truthfulqa", seed, num_documents)


def bbh(*, seed: int = 0, num_documents: int = NUM_DOCUMENTS, **_: object) -> dict[str, Dataset]:
    """The kinds in turn, so `--limit 40` has ten of each of the four."""
    return _rows("bbh", seed, num_documents)


def wikitext(**_: object) -> dict[str, Dataset]:
    """Real text in the public domain that the model was not trained on; generated pages to train.

    The sources take turns, so a limit has some of each.
    """
    by_source = dict[str, list[str]]()
    for line in PAGES.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_source.setdefault(row["source"], []).append(row["page"])
    longest = max(map(len, by_source.values()))
    pages = [
        {"page": pages[place]}
        for place in range(longest)
        for pages in by_source.values()
        if place < len(pages)
    ]
    drawn = distinct(("pages",), len(pages), 0, "train")
    return {
        "train": Dataset.from_list([{"page": str(problem.row["page"])} for problem in drawn]),
        "test": Dataset.from_list(pages),
    }
