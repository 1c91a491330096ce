"""A draft that drafts nothing: it reads each token first, for what it says of the experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.speculative.draft_model import DraftModel
from lm_eval_moecache.model.speculative.hooks import DraftHooks


class ReadAlong:
    """Runs the draft before each decode pass, on the tokens that it has not read yet.

    Its time and its predictions go the way of speculative drafting, and what it would write next is
    not asked. As there, the prompt's own pass is without it: it reads the prompt before the first
    decoded token. Changes: the hooks of `DraftHooks`, until `remove`.
    """

    def __init__(self, draft: DraftModel, targets: Sequence[MoELayer], engine: Engine) -> None:
        assert engine.draft_stage is not None, "a draft model without a draft stage"
        self._hooks = DraftHooks(draft, targets, engine.draft_stage)
        self._model, self._engine = draft.model, engine
        self._ids: Tensor | None = None
        self._past: Any = None
        self._num_read = 0

    def remove(self) -> None:
        """Take the hooks off. Safe to call twice."""
        self._hooks.remove()

    @torch.no_grad()
    def begin_pass(self, input_ids: Tensor, past_length: int) -> None:
        """Follow the text [1, tokens], and read on where the pass decodes."""
        if past_length == 0 or self._ids is None:
            self._ids, self._past, self._num_read = input_ids, None, 0
            return
        if len(input_ids) > 1:
            raise ValueError(
                f"num_beams: prefetch='draft' reads one text at a time, and this pass decodes "
                f"{len(input_ids)}. Allowed: num_beams=1."
            )
        assert self._ids.shape[1] == past_length, "a text that the draft has not followed"
        self._ids = torch.cat([self._ids, input_ids], dim=1)
        self._engine.begin_draft()
        output = self._model(
            self._ids[:, self._num_read :], past_key_values=self._past, use_cache=True
        )
        self._past, self._num_read = output.past_key_values, self._ids.shape[1]
