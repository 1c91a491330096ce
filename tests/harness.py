"""Harness requests of every kind, made without a task, and refusals before weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
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


@contextmanager
def unloaded() -> Iterator[None]:
    """Let the loading of weights, of the model or of its draft, fail the test."""
    from lm_eval.models.huggingface import HFLM

    from lm_eval_moecache.harness import lm

    def loaded(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("the weights were loaded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFLM, "_create_model", loaded)
        patch.setattr(lm, "make_draft", loaded)
        yield


def refusal(kind: Any = None, **arguments: Any) -> str:
    """Return the message of the ValueError that a model's arguments cause before it is loaded."""
    from lm_eval_moecache.harness.lm import MoECacheLM

    with unloaded(), pytest.raises(ValueError) as caught:
        (kind or MoECacheLM)(device="cpu", **arguments)
    return str(caught.value)


def assert_loads(kind: Any = None, **arguments: Any) -> None:
    """Check that a model's arguments are taken: the loading of its weights begins."""
    with pytest.raises(AssertionError, match="the weights were loaded"):
        refusal(kind, **arguments)


def says(message: str, *parts: str) -> None:
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
