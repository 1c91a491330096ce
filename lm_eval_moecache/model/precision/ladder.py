"""The ladder of precisions of one run, `precision=int8:int4:int2`, best first, and its names.

torch is imported only when a codec is built.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lm_eval_moecache.records.numbers import unknown_name_error

if TYPE_CHECKING:
    from lm_eval_moecache.model.precision.codecs import Codec

NAMES = ("bf16", "fp16", "fp32", "int8", "nf4", "fp4", "hqq8", "hqq4", "hqq3", "hqq2")
"""The keys of `codecs.CODECS`."""
# SpecMD section 5.1: "int8 and int4 using bitsandbytes ... and optionally int2 using HQQ".
ALIASES = {"int4": "nf4", "int3": "hqq3", "int2": "hqq2"}
_NAME = re.compile(r"([^/]*)(?:/g(\d+))?")
Ladder = tuple[str, ...]


def parse_ladder(text: object) -> Ladder:
    """Read `int4` or `int8:int4:int2`. Raises ValueError for unknown and for repeated names."""
    levels = tuple(level.strip() for level in str(text).split(":"))
    names = [split_name(level) for level in levels]
    for level, name in zip(levels, names, strict=True):
        if names.count(name) > 1:
            raise ValueError(
                f"precision={text!r} names {level!r} twice. Allowed: each precision once, best "
                "first, as int8:int4:int2."
            )
    bits = [int("".join(filter(str.isdigit, name))) for name, _ in names]
    if bits != sorted(bits, reverse=True):
        raise ValueError(
            f"precision={text!r} is not in order. Allowed: the best precision first, as "
            "int8:int4:int2."
        )
    return levels


def codecs_of(ladder: Ladder, device_type: str | None = None) -> list[Codec]:
    """Return the codecs of a ladder; with a device, ValueError where one cannot work there."""
    codecs = [codec(level) for level in ladder]
    if device_type is not None:
        for level_codec in codecs:
            level_codec.check(device_type)
    return codecs


def codec_names() -> list[str]:
    """Return every name that a level may have, without group sizes."""
    return sorted([*NAMES, *ALIASES])


def split_name(level: str) -> tuple[str, int | None]:
    """Read `int2` or `int2/g16`; ValueError where that is no codec's name."""
    match = _NAME.fullmatch(level)
    name = match[1] if match else level
    if match is None or name not in codec_names():
        raise unknown_name_error("precision", level, codec_names())
    return ALIASES.get(name, name), None if match[2] is None else int(match[2])


def codec(level: str) -> Codec:
    """Return the codec that a level names: `bf16`, `int4`, or with a group size, `int2/g16`."""
    from lm_eval_moecache.model.precision.codecs import CODECS

    name, group_size = split_name(level)
    return CODECS[name](level, group_size)
