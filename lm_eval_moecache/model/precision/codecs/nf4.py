"""nf4: bitsandbytes' 4-bit normal-float weights."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.model.precision.four_bit import FourBit


class NF4(FourBit):
    """The 16 levels fit normally distributed weights (QLoRA, Dettmers et al. 2023)."""

    source: ClassVar[str] = "bitsandbytes quantize_4bit, nf4"
    quant_type: ClassVar[str] = "nf4"
