"""Harness requests of every kind, made without a task."""

from __future__ import annotations

from typing import Any

from lm_eval.api.instance import Instance

STOP = {"until": ["\n\n"], "max_gen_toks": 6}


def make_instance(kind: str, task: str, index: int, *arguments: Any, choice: int = 0) -> Instance:
    return Instance(kind, {"id": index}, arguments, choice, (task, index, 1))


def generations(count: int = 4) -> list[Instance]:
    """Contexts of different lengths, so that batches are padded on the left."""
    texts = [f"Hello number {i} " + "x" * (3 * i) for i in range(count)]
    return [make_instance("generate_until", "gen", i, t, dict(STOP)) for i, t in enumerate(texts)]


def choices() -> list[Instance]:
    """Choices of one token, which HFLM serves by one forward, and of several."""
    return [
        make_instance("loglikelihood", "choice", i, f"Question {i * 111}:", text, choice=j)
        for i in range(2)
        for j, text in enumerate(("A", "B", " a long one"))
    ]


def texts() -> list[Instance]:
    """Texts of several windows where `max_length` is 48."""
    return [
        make_instance("loglikelihood_rolling", "text", i, "some text " * (9 + 2 * i))
        for i in range(2)
    ]


def answers(lm: Any) -> tuple[list[str], list[tuple[float, bool]], list[float]]:
    """Ask everything of one model."""
    return (
        lm.generate_until(generations(), disable_tqdm=True),
        lm.loglikelihood(choices(), disable_tqdm=True),
        lm.loglikelihood_rolling(texts(), disable_tqdm=True),
    )
