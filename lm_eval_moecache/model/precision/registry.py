"""Finds codecs by the names that users type. No torch until a codec is asked for."""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import TYPE_CHECKING

from lm_eval_moecache.model.precision import codecs
from lm_eval_moecache.records.errors import unknown

if TYPE_CHECKING:
    from lm_eval_moecache.model.precision.base import Codec

# SpecMD section 5.1: "int8 and int4 using bitsandbytes ... and optionally int2 using HQQ".
ALIASES = {"int4": "nf4", "int3": "hqq3", "int2": "hqq2"}
_NAME = re.compile(r"([^/]*)(?:/g(\d+))?")


def codec_names() -> list[str]:
    """Return every name that a level may have, without group sizes."""
    return sorted([*(m.name for m in pkgutil.iter_modules(codecs.__path__)), *ALIASES])


def split_name(level: str) -> tuple[str, int | None]:
    """Read `int2` or `int2/g16`; ValueError where that is no codec's name."""
    match = _NAME.fullmatch(level)
    name = match[1] if match else level
    if match is None or name not in codec_names():
        raise unknown("precision", level, codec_names())
    return ALIASES.get(name, name), None if match[2] is None else int(match[2])


def codec(level: str) -> Codec:
    """Return the codec that a level names: `bf16`, `int4`, or with a group size, `int2/g16`."""
    from lm_eval_moecache.model.precision.base import Codec

    name, group_size = split_name(level)
    module = importlib.import_module(f"{codecs.__name__}.{name}")
    found: list[type[Codec]] = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Codec)
        and value.__module__ == module.__name__
    ]
    assert len(found) == 1, f"{module.__name__} must define one codec, found {len(found)}"
    sizes = found[0].group_sizes
    if group_size is not None and group_size not in sizes:
        allowed = ", ".join(f"g{size}" for size in sizes) or "none: it has no groups"
        raise ValueError(f"precision={level!r}: the group size must be one of {allowed}.")
    return found[0](level, group_size)
