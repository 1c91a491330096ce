"""Decode steps of a batch are watched once, and then computed row by row without being asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lm_eval_moecache.model.by_row import ByRow

CAPTURED = functional.linear
INPUT, WEIGHT = torch.randn(4, 1, 96), torch.randn(96, 96)
KEYS = torch.randn(4, 2, 9, 48)


def by_name() -> Tensor:
    query = functional.linear(INPUT, WEIGHT).view(4, 1, 2, 48).transpose(1, 2)
    return functional.scaled_dot_product_attention(query, KEYS, KEYS).sigmoid()


def captured() -> Tensor:
    return by_name() + CAPTURED(INPUT, WEIGHT).view(4, 2, 1, 48)


def uneven() -> Tensor:
    return functional.linear(INPUT, WEIGHT)[..., :7].sigmoid()


class Counting(ByRow):
    """Counts how often it is asked."""

    asked = 0

    def __torch_function__(self, *given: Any, **more: Any) -> Any:
        self.asked += 1
        return super().__torch_function__(*given, **more)


def step(by_row: ByRow, work: Callable[[], Tensor]) -> Tensor:
    by_row.begin_pass(np.ones((4, 1), bool), [0] * 4, 8)
    found = work()
    by_row.end_pass()
    return found


@pytest.mark.parametrize(("work", "is_asked"), [(by_name, False), (captured, True), (uneven, True)])
def test_each_step_has_the_bits_of_the_first(work: Any, is_asked: bool) -> None:
    by_row, names = Counting(), vars(functional).copy()
    with by_row:
        first = step(by_row, work)
        by_row.asked = 0
        others = [step(by_row, work) for _ in range(3)]
        assert bool(by_row.asked) == is_asked
        work()
        assert by_row.asked, "what follows is asked about"
    assert all(torch.equal(first, other) for other in others)
    assert {name: vars(functional)[name] for name in names} == names


def test_a_step_that_breaks_off_leaves_nothing_replaced() -> None:
    by_row = Counting()
    with by_row:
        step(by_row, by_name)
    with pytest.raises(ZeroDivisionError), by_row:
        step(by_row, lambda: by_name() / (1 // 0))
    assert functional.linear is CAPTURED
    with by_row:
        by_row.asked = 0
        by_name()
    assert by_row.asked


def test_a_row_alone_is_not_asked_about() -> None:
    by_row = Counting()
    with by_row:
        by_row.pass_alone()
        alone = by_name()
        by_row.end_pass()
        assert not by_row.asked
    assert torch.equal(alone, by_name())


def test_names_that_others_have_replaced_stay_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    by_row, calls = ByRow(), []

    def own(*given: Any) -> Tensor:
        calls.append(given)
        return CAPTURED(*given)

    monkeypatch.setattr(functional, "linear", own)
    with by_row:
        found = [step(by_row, by_name) for _ in range(3)]
    assert functional.linear is own and len(calls) == 3
    assert torch.equal(found[0], found[2])
