"""bf16: torch.bfloat16."""

from __future__ import annotations

from typing import ClassVar

import torch

from lm_eval_moecache.model.precision.cast import Cast


class BF16(Cast):
    """Weights at bfloat16."""

    source: ClassVar[str] = "torch.bfloat16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
