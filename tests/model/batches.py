"""Batches with little in them: few rows, much padding, rows that end while others go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lm_eval_moecache.model.wrap import FinishedSequences, WrappedModel
from tests.model.wall.models import wrap_wall
from tests.test_equality import wrap_virtual

PAD, END = 0, 1


@dataclass
class Batch:
    """Prompts of these lengths, padded on the left, and the tokens that follow, row by row.

    A row ends where it is given END: from then on it is fed padding, and nobody reads it.
    """

    lengths: Sequence[int]
    steps: Sequence[Sequence[int]] = ()
    seed: int = 0
    ended: list[bool] = field(init=False)

    def logits(self, model: Any, wrapped: WrappedModel | None = None) -> list[Tensor]:
        """Return what a model answers at every place that is no padding."""
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
            found = [output.logits[i, width - n :] for i, n in enumerate(self.lengths)]
            self.ended = [False] * rows
            for step in self.steps:
                fed = [PAD if self.ended[i] else step[i] for i in range(rows)]
                self.ended = [self.ended[i] or step[i] == END for i in range(rows)]
                if all(self.ended):
                    break
                mask = torch.cat([mask, torch.ones(rows, 1, dtype=mask.dtype)], -1)
                output = model(
                    torch.tensor(fed)[:, None],
                    attention_mask=mask,
                    past_key_values=output.past_key_values,
                    use_cache=True,
                )
                found += [output.logits[i] for i in range(rows) if not self.ended[i]]
        return found

    def count(self) -> list[int]:
        """Return how many tokens of each pass somebody waits for."""
        counts, ended = [sum(self.lengths)], [False] * len(self.lengths)
        for step in self.steps:
            ended = [was or token == END for was, token in zip(ended, step, strict=True)]
            if all(ended):
                break
            counts.append(ended.count(False))
        return counts


def assert_exact(
    model: Any, batch: Batch, clock: str, capacity: str, policy: str = "on_demand"
) -> None:
    """Check that a wrapped model answers a batch bit for bit, and counts whom it serves."""
    expected = batch.logits(model)
    wrap = wrap_wall if clock == "wall" else wrap_virtual
    wrapped = wrap(model, policy, capacity)
    try:
        found = batch.logits(model, wrapped)
        wrapped.engine.check_integrity()
    finally:
        wrapped.unwrap()
    same = [torch.equal(a, b) for a, b in zip(expected, found, strict=True)]
    assert all(same), f"{clock}, {capacity}, {batch}: {same}"
    assert [p.num_tokens for p in wrapped.engine.ledger.passes] == batch.count()
