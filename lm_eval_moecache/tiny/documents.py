"""The rows of the offline tasks, train and test, for `custom_dataset` in their YAML files.

lm-eval calls each function with the task's metadata as keywords; `seed` and `num_documents` there
choose another draw. Two loads of one seed give the same rows on every machine.
"""

from __future__ import annotations

from typing import get_args

from datasets import Dataset

from lm_eval_moecache.tiny.generator import BBH_ASKED, MMLU_ASKED, distinct
from lm_eval_moecache.tiny.problem import Split

SPLITS: tuple[Split, ...] = get_args(Split)
NUM_DOCUMENTS = 200
NUM_PAGES = 20


def _rows(names: tuple[str, ...], seed: int, num_documents: int) -> dict[str, Dataset]:
    return {
        split: Dataset.from_list([dict(p.row) for p in distinct(names, num_documents, seed, split)])
        for split in SPLITS
    }


def gsm8k(*, seed: int = 0, num_documents: int = NUM_DOCUMENTS, **_: object) -> dict[str, Dataset]:
    return _rows(("gsm8k",), seed, num_documents)


def mmlu(*, seed: int = 0, num_documents: int = NUM_DOCUMENTS, **_: object) -> dict[str, Dataset]:
    return _rows(MMLU_ASKED, seed, num_documents)


def arc(*, seed: int = 0, num_documents: int = NUM_DOCUMENTS, **_: object) -> dict[str, Dataset]:
    return _rows(("arc",), seed, num_documents)


def truthfulqa(
    *, seed: int = 0, num_documents: int = NUM_DOCUMENTS, **_: object
) -> dict[str, Dataset]:
    return _rows(("truthfulqa",), seed, num_documents)


def bbh(*, seed: int = 0, num_documents: int = NUM_DOCUMENTS, **_: object) -> dict[str, Dataset]:
    """The kinds in turn, so `--limit 40` has ten of each of the four."""
    return _rows(BBH_ASKED, seed, num_documents)


def wikitext(*, seed: int = 0, num_documents: int = NUM_PAGES, **_: object) -> dict[str, Dataset]:
    return _rows(("wikitext",), seed, num_documents)
