"""Arrays of expert ids in numpy files."""

from __future__ import annotations

import logging
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.trace.formats.base import (
    MOST_BYTES,
    MOST_EXPERT,
    ROUTED,
    UNREADABLE,
    Options,
    TraceFormat,
    build,
    check_routed,
    generation,
    whole,
)
from lm_eval_moecache.trace.trace import Trace

logger = logging.getLogger(__name__)


class Array(TraceFormat):
    """`.npy` and `.npz`: `routed_experts` [tokens, layers, top_k], with the prompt's length or not.

    One request. The first `num_prompt_tokens` tokens are one prefill pass, the others decode steps.
    """

    suffixes = (".npz", ".npy")
    holds = "num_prompt_tokens, weights [tokens, layers, top_k] and num_experts where it has them"
    ARRAYS = (ROUTED, "num_experts", "num_prompt_tokens", "weights")

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        return head.startswith((b"PK\x03\x04", b"\x93NUMPY"))

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        what, arrays = f"trace {path.name}", cls._arrays(path)
        if ROUTED not in arrays:
            raise ValueError(
                f"{what} has no array {ROUTED!r} [tokens, layers, top_k]; it holds "
                f"{', '.join(map(repr, arrays)) or 'none'}."
            )
        unknown = sorted(set(arrays) - set(cls.ARRAYS))
        if unknown:
            logger.warning("%s: left out its arrays %s.", what, ", ".join(unknown))
        routed = arrays[ROUTED]
        check_routed(f"{what}: {ROUTED}", routed)

        def optional_count(key: str, **bounds: int) -> int | None:
            array = arrays.get(key)
            value = None if array is None else array.item() if array.size == 1 else array.tolist()
            return whole(what, value, key, **bounds)

        count = optional_count("num_experts", least=1, most=MOST_EXPERT + 1)
        prompt = optional_count("num_prompt_tokens", most=len(routed)) or 0
        passes = list(generation(routed[:prompt], routed[prompt:], 0))
        if "weights" in arrays:
            weights = arrays["weights"]
            if weights.shape != routed.shape:
                raise ValueError(
                    f"{what}: weights has the shape {list(weights.shape)}, {ROUTED} has "
                    f"{list(routed.shape)}."
                )
            weighted = generation(weights[:prompt], weights[prompt:], 0)
            passes = [replace(p, weights=w.experts) for p, w in zip(passes, weighted, strict=True)]
        return build(path.name, path.stem, passes, options, num_experts=count)

    @classmethod
    def _arrays(cls, path: Path) -> dict[str, Any]:
        """Return the arrays in ARRAYS by name; any others are empty placeholders."""
        try:
            if path.suffix == ".npy":
                return {ROUTED: np.load(path, allow_pickle=False, mmap_mode="r")}
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    if info.file_size > MOST_BYTES:
                        raise ValueError(f"{info.filename} has {info.file_size} bytes unpacked")
            with np.load(path, allow_pickle=False) as stored:
                return {n: stored[n] if n in cls.ARRAYS else np.zeros(0) for n in stored.files}
        except UNREADABLE as error:
            raise ValueError(
                f"trace {path.name} is not a readable {path.suffix}: {error}."
            ) from None
