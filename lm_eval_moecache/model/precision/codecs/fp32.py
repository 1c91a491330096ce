"""fp32: torch.float32."""

from __future__ import annotations

from typing import ClassVar

import torch

from lm_eval_moecache.model.precision.cast import Cast


class FP32(Cast):
    """Weights at float32."""

    source: ClassVar[str] = "torch.float32"
    dtype: ClassVar[torch.dtype] = torch.float32
