"""fp4: bitsandbytes' 4-bit floating-point weights."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.model.precision.four_bit import FourBit


class FP4(FourBit):
    """The 16 levels are those of a float with sign, exponent and mantissa."""

    source: ClassVar[str] = "bitsandbytes quantize_4bit, fp4"
    quant_type: ClassVar[str] = "fp4"
