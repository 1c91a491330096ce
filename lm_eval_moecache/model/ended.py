"""Which rows of a batch have ended, and are fed padding while others go on.

Shapes: B rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lm_eval_moecache.model.store import BoolArray


class EndedRows:
    """Follows which rows of a batch have ended while `generate` goes on with the others.

    A row ends with an end token, which it is still fed; what it is fed from then on is padding.
    """

    def __init__(self, end_tokens: int | Sequence[int] | None) -> None:
        tokens = [end_tokens] if isinstance(end_tokens, int) else end_tokens
        self._end_tokens = torch.tensor(tokens or [], dtype=torch.int64)
        self._ended: BoolArray | None = None

    @classmethod
    def in_generation(cls, model: Any, arguments: Mapping[str, Any]) -> EndedRows:
        """Follow the rows of one `generate` of this model with these arguments."""
        return cls(arguments.get("eos_token_id", model.generation_config.eos_token_id))

    def __call__(self, input_ids: Tensor) -> BoolArray:
        """Return which rows [B] have ended, given the tokens [B, 1] of the next decode step."""
        ending: BoolArray = torch.isin(input_ids[:, 0].cpu(), self._end_tokens).numpy()
        self._ended = ending if self._ended is None else self._ended | ending
        return self._ended
