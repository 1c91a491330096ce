"""hqq3: 3-bit weights of HQQ."""

from __future__ import annotations

from typing import ClassVar

import torch

from lm_eval_moecache.model.precision.half_quadratic import HalfQuadratic


class HQQ3(HalfQuadratic):
    """3 bits per weight, ten in 32: 3.2 bits stored."""

    bits: ClassVar[int] = 3
    per_word: ClassVar[int] = 10
    word: ClassVar[torch.dtype] = torch.int32
