"""The test-split rows of the offline tasks, for `custom_dataset` in their YAML files.

lm-eval calls each function with the task's metadata as keywords; `seed` and `num_documents` there
choose another draw. Two loads of one seed give the same rows on every machine.
"""

from __future__ import annotations

from datasets import Dataset

from lm_eval_moecache.tiny.generator import BBH_ASKED, MMLU_ASKED, held_out

NUM_DOCUMENTS = 200
NUM_PAGES = 20


def _rows(names: tuple[str, ...], seed: int, num_documents: int) -> dict[str, Dataset]:
    rows = [dict(problem.row) for problem in held_out(names, num_documents, seed)]
    return {"test": Dataset.from_list(rows)}


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
