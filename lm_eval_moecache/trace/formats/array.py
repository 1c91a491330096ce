"""`.npy` and `.npz`: `routed_experts` [tokens, layers, top_k], with the prompt's length or not."""

from __future__ import annotations

import logging
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.trace.formats.base import MOST_EXPERT, Options, TraceFormat, build, generation
from lm_eval_moecache.trace.trace import Trace

logger = logging.getLogger(__name__)
ROUTED, COUNT, PROMPT, WEIGHTS = "routed_experts", "num_experts", "num_prompt_tokens", "weights"
ARRAYS = (ROUTED, COUNT, PROMPT, WEIGHTS)
_MOST_BYTES = 1 << 32
"""Of one array once unpacked: a small file may say that it holds any number of zeros."""


class Array(TraceFormat):
    """One request. The first `num_prompt_tokens` tokens are one prefill pass, others steps."""

    suffixes = (".npz", ".npy")
    holds = "num_prompt_tokens, weights [tokens, layers, top_k] and num_experts where it has them"

    @classmethod
    def sniff(cls, head: bytes, path: Path) -> bool:
        return head.startswith((b"PK\x03\x04", b"\x93NUMPY"))

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        name, arrays = path.name, _arrays(path)
        if ROUTED not in arrays:
            raise ValueError(
                f"trace {name} has no array {ROUTED!r} [tokens, layers, top_k]; it holds "
                f"{', '.join(map(repr, arrays)) or 'none'}."
            )
        unknown = sorted(set(arrays) - set(ARRAYS))
        if unknown:
            logger.warning("trace %s: left out its arrays %s.", name, ", ".join(unknown))
        routed = arrays[ROUTED]
        check_routed(f"trace {name}: {ROUTED}", routed)
        count = _whole(name, arrays, COUNT, MOST_EXPERT + 1, least=1)
        prompt = _whole(name, arrays, PROMPT, len(routed)) or 0
        low, high = int(routed.min()), int(routed.max())
        last = MOST_EXPERT if count is None else count - 1
        if low < 0 or high > last:
            raise ValueError(
                f"trace {name}: {ROUTED} of shape {list(routed.shape)} has ids from {low} to "
                f"{high}, must be in 0..{last}."
            )
        passes = list(generation(routed[:prompt], routed[prompt:], 0))
        if WEIGHTS in arrays:
            weights = arrays[WEIGHTS]
            if weights.shape != routed.shape:
                raise ValueError(
                    f"trace {name}: {WEIGHTS} has the shape {list(weights.shape)}, {ROUTED} has "
                    f"{list(routed.shape)}."
                )
            own = list(generation(weights[:prompt], weights[prompt:], 0))
            passes = [replace(p, weights=w.experts) for p, w in zip(passes, own, strict=True)]
        layers = routed.shape[1]

        def where(row: int) -> str:
            if row < prompt * layers:
                return f"{ROUTED}[{row % prompt}, {row // prompt}]"
            return f"{ROUTED}[{row // layers}, {row % layers}]"

        return build(name, path.stem, passes, options, num_experts=count, where=where)


def check_routed(what: str, routed: Any) -> None:
    """Refuse an array that is not [tokens, layers, top_k] of whole numbers."""
    is_whole = np.issubdtype(routed.dtype, np.integer)
    if routed.ndim != 3 or not routed.size or not is_whole:
        raise ValueError(
            f"{what} is {routed.dtype} of shape {list(routed.shape)}, must be whole numbers of "
            "shape [tokens, layers, top_k] with none of them 0."
        )


def _whole(name: str, arrays: Any, key: str, most: int, least: int = 0) -> int | None:
    array = arrays.get(key)
    if array is None:
        return None
    if array.size != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"trace {name}: {key} is {array.dtype} of shape {list(array.shape)}, must be one "
            "whole number."
        )
    value = int(array.reshape(-1)[0])
    if not least <= value <= most:
        raise ValueError(f"trace {name}: {key}={value} must be in {least}..{most}.")
    return value


def _arrays(path: Path) -> dict[str, Any]:
    """Return the arrays that are ours to read; the others by name, and empty."""
    try:
        if path.suffix == ".npy":
            return {ROUTED: np.load(path, allow_pickle=False, mmap_mode="r")}
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.file_size > _MOST_BYTES:
                    raise ValueError(f"{info.filename} has {info.file_size} bytes unpacked")
        with np.load(path, allow_pickle=False) as found:
            nothing = np.zeros(0, dtype=np.int32)
            return {n: found[n] if n in ARRAYS else nothing for n in found.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"trace {path.name} is no readable {path.suffix}: {error}.") from None
