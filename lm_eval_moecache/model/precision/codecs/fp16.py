"""fp16: torch.float16."""

from __future__ import annotations

from typing import ClassVar

import torch

from lm_eval_moecache.model.precision.cast import Cast


class FP16(Cast):
    """Weights at float16."""

    source: ClassVar[str] = "torch.float16"
    dtype: ClassVar[torch.dtype] = torch.float16
