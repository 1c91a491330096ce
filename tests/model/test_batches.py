"""Bit for bit by construction: few rows, much padding, rows that end, in every part and wave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lm_eval_moecache.model.hook import FinishedSequences, Row, WrappedModel
from tests.model.wrapped import WRAP
from tests.models import FAMILY_CASES, random_model

PAD, END = 0, 1


@dataclass
class Batch:
    """Prompts of these lengths, padded on the left, and the tokens that follow, row by row.

    A row ends at END: from then on it is fed padding, and its outputs are ignored.
    """

    lengths: Sequence[int]
    steps: Sequence[Sequence[int]] = ()
    seed: int = 0
    ended: list[bool] = field(init=False)

    def logits(self, model: Any, wrapped: WrappedModel | None = None) -> list[Tensor]:
        """Return a model's logits at every position that is not padding."""
        rows, width = len(self.lengths), max(self.lengths)
        generator = torch.Generator().manual_seed(self.seed)
        tokens = torch.randint(2, 300, (rows, width), generator=generator)
        mask = torch.ones_like(tokens)
        for row, length in enumerate(self.lengths):
            mask[row, : width - length] = 0
            tokens[row, : width - length] = PAD
        if wrapped is not None:
            wrapped.ended = FinishedSequences([END])
        with torch.no_grad():
            output = model(tokens, attention_mask=mask, use_cache=True)
            logits = [output.logits[i, width - n :] for i, n in enumerate(self.lengths)]
            self.ended = [False] * rows
            for step in self.steps:
                inputs = [PAD if self.ended[i] else step[i] for i in range(rows)]
                self.ended = [self.ended[i] or step[i] == END for i in range(rows)]
                if all(self.ended):
                    break
                mask = torch.cat([mask, torch.ones(rows, 1, dtype=mask.dtype)], -1)
                output = model(
                    torch.tensor(inputs)[:, None],
                    attention_mask=mask,
                    past_key_values=output.past_key_values,
                    use_cache=True,
                )
                logits += [output.logits[i] for i in range(rows) if not self.ended[i]]
        return logits

    def count(self) -> list[int]:
        """Return each pass's number of tokens, those of padding and of ended rows left out."""
        counts, ended = [sum(self.lengths)], [False] * len(self.lengths)
        for step in self.steps:
            ended = [finished or token == END for finished, token in zip(ended, step, strict=True)]
            if all(ended):
                break
            counts.append(ended.count(False))
        return counts


def assert_exact(model: Any, batch: Batch, clock: str, capacity: str) -> None:
    """Check a wrapped model's logits bit for bit, and the tokens that it counts."""
    expected = batch.logits(model)
    wrapped = WRAP[clock](model, "on_demand", capacity)
    try:
        logits = batch.logits(model, wrapped)
        wrapped.engine.check_integrity()
    finally:
        wrapped.unwrap()
    same = [torch.equal(a, b) for a, b in zip(expected, logits, strict=True)]
    assert all(same), f"{clock}, {capacity}, {batch}: {same}"
    assert [p.num_tokens for p in wrapped.engine.ledger.passes] == batch.count()


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


def test_a_row_of_nobody_is_left_out_wherever_it_stands() -> None:
    model, tokens = model_of("mixtral", torch.float32), torch.arange(2, 12).reshape(2, 5)
    wrapped, seen = WRAP["virtual"](model, "on_demand", "25%"), []
    for place in (0, 1):
        wrapped.rows = [None, None]
        wrapped.rows[place] = row = Row()
        model(tokens.flip(0) if place else tokens)
        seen.append([batch.row(own).experts.tolist() for batch, own in row.kept])
    wrapped.unwrap()
    assert seen[0] == seen[1]
