"""Bit for bit by construction: few rows, much padding, rows that end, in every part and wave."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.store import GroupedCall, Matrices
from tests.model.batches import END, PAD, Batch, assert_exact
from tests.models import FAMILY_CASES, random_model


@cache
def model_of(family: str, dtype: torch.dtype) -> Any:
    return random_model(family).to(dtype)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """One to six rows, most of them much shorter than the longest; some end early."""
    lengths = draw(st.lists(st.sampled_from([1, 1, 1, 2, 3, 9]), min_size=1, max_size=6))
    token = st.sampled_from([PAD, END, *range(2, 12)])
    step = st.lists(token, min_size=len(lengths), max_size=len(lengths))
    return Batch(lengths, draw(st.lists(step, max_size=4)), draw(st.integers(0, 3)))


@settings(max_examples=25)
@given(
    batch=batches(),
    # GPT-OSS's gate rounds by position, mixtral's products of few rows by the number of rows.
    family=st.sampled_from(["gpt_oss", "mixtral"]),
    clock=st.sampled_from(["wall", "wall", "virtual"]),
    capacity=st.sampled_from(["1experts", "25%", "100%"]),
)
def test_any_batch_is_answered_bit_for_bit(
    batch: Batch, family: str, clock: str, capacity: str
) -> None:
    assert_exact(model_of(family, torch.float32), batch, clock, capacity)


@pytest.mark.parametrize("clock", ["virtual", "wall"])
@pytest.mark.parametrize("family", FAMILY_CASES)
def test_a_row_that_chose_the_padding_token_keeps_its_experts(family: str, clock: str) -> None:
    """Only a row that got an end token has ended; its inputs from then on are padding."""
    steps = [[PAD, 7, END], [9, PAD, 5], [PAD, PAD, 5], [8, END, 5]]
    batch = Batch([5, 3, 4], steps)
    assert_exact(model_of(family, torch.bfloat16), batch, clock, "25%")
    assert batch.count() == [12, 2, 2, 2, 1]


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "olmoe"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
def test_parts_of_a_call_add_up_to_the_kernels_own_result(family: str, rows: int) -> None:
    """In parts of any size, down to one expert: float32 rounds by position and number of rows."""
    module: Any = find_moe_layers(model_of(family, torch.float32))[0].experts
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 32, generator=generator)
    index = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(rows)])
    weights = torch.rand(rows, 3, generator=generator)
    with torch.no_grad():
        expected = module(hidden, index, weights)
        matrices = Matrices(module, dict(module.named_parameters()))
        for size in (1, 2, 3, 8):
            call = GroupedCall(module, hidden, index, weights, 8)
            for start in range(0, 8, size):
                call.run([(e, e) for e in range(start, min(start + size, 8))], matrices)
            assert torch.equal(call.result(), expected), size
