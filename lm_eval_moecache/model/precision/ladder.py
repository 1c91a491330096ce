"""The ladder of precisions of one run: `precision=int8:int4:int2`, best first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_eval_moecache.model.precision.registry import codec, split_name

if TYPE_CHECKING:
    from lm_eval_moecache.model.precision.base import Codec

Ladder = tuple[str, ...]


def parse_ladder(text: object) -> Ladder:
    """Read `int4` or `int8:int4:int2`. Raises ValueError for unknown and for repeated names."""
    levels = tuple(level.strip() for level in str(text).split(":"))
    found = [split_name(level) for level in levels]
    for level, name in zip(levels, found, strict=True):
        if found.count(name) > 1:
            raise ValueError(
                f"precision={text!r} names {level!r} twice. Allowed: each precision once, best "
                "first, as int8:int4:int2."
            )
    bits = [int("".join(filter(str.isdigit, name))) for name, _ in found]
    if bits != sorted(bits, reverse=True):
        raise ValueError(
            f"precision={text!r} is not in order. Allowed: the best precision first, as "
            "int8:int4:int2."
        )
    return levels


def codecs_of(ladder: Ladder, device_type: str | None = None) -> list[Codec]:
    """Return the codecs of a ladder; with a device, ValueError where one cannot work there."""
    found = [codec(level) for level in ladder]
    if device_type is not None:
        for each in found:
            each.check(device_type)
    return found
