"""Sparse batches: few rows, much padding, rows that end while others go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lm_eval_moecache.model.hook import FinishedSequences, WrappedModel
from tests.model.wrapped import WRAP

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
