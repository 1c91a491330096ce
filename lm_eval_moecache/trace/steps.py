"""Traces of decode steps and nothing else: ids by token and layer, as engines return them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lm_eval_moecache.records.event import DECODE, PHASES
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.columns import Columns, Ints
from lm_eval_moecache.trace.trace import Trace, build_trace

ROUTED, COUNT = "routed_experts", "num_experts"
MOST_EXPERT = 2**15 - 1
_MOST_BYTES = 1 << 32
"""Of one array once unpacked: a small file may say that it holds any number of zeros."""


def decode_steps(
    path: Path,
    experts: Ints,
    tokens: Ints,
    expert_bytes: int | None,
    where: Callable[[int], str],
    num_experts: int | None = None,
) -> Trace:
    """Build a trace of one request from `experts` [tokens, layers, top_k], a decode step each.

    All experts are equally large: one byte, where `expert_bytes` does not say it. Without
    `num_experts` the largest id seen is the last expert.
    """
    num_steps, num_layers, top_k = experts.shape
    geometry = Geometry(
        model=path.stem,
        num_layers=num_layers,
        num_experts=max(int(experts.max()) + 1, top_k) if num_experts is None else num_experts,
        top_k=top_k,
        expert_bytes=((1 if expert_bytes is None else expert_bytes,),) * num_layers,
        dense_bytes=(0,) * num_layers,
        precision=("unknown",),
    )
    passes = np.repeat(np.arange(num_steps, dtype=np.int32), num_layers)
    columns = Columns(
        request=np.zeros_like(passes),
        pass_index=passes,
        phase=np.full_like(passes, PHASES.index(DECODE)),
        token=tokens[passes],
        layer=np.tile(np.arange(num_layers, dtype=np.int32), num_steps),
        experts=experts.reshape(-1, top_k),
    )
    has_sizes = expert_bytes is not None
    return build_trace(path.name, geometry, columns, where=where, has_sizes=has_sizes)


def read_npz(path: Path, expert_bytes: int | None = None) -> Trace:
    """Read `routed_experts` [tokens, layers, top_k] as vLLM returns it, a decode step each token.

    An array `num_experts` (one whole number) says how many there are. Nothing is unpickled. Raises
    ValueError naming the array and its shape.
    """
    arrays = _arrays(path)
    if ROUTED not in arrays:
        raise ValueError(
            f"trace {path.name} has no array {ROUTED!r} [tokens, layers, top_k]; it holds "
            f"{', '.join(map(repr, arrays)) or 'none'}."
        )
    routed = arrays[ROUTED]
    is_whole = np.issubdtype(routed.dtype, np.integer)
    if routed.ndim != 3 or not routed.size or not is_whole:
        raise ValueError(
            f"trace {path.name}: {ROUTED} is {routed.dtype} of shape {list(routed.shape)}, must be "
            "whole numbers of shape [tokens, layers, top_k] with none of them 0."
        )
    count = _count(path.name, arrays.get(COUNT))
    low, high = int(routed.min()), int(routed.max())
    last = MOST_EXPERT if count is None else count - 1
    if low < 0 or high > last:
        raise ValueError(
            f"trace {path.name}: {ROUTED} of shape {list(routed.shape)} has ids from {low} to "
            f"{high}, must be in 0..{last}."
        )
    layers = routed.shape[1]
    return decode_steps(
        path,
        routed.astype(np.int32),
        np.arange(len(routed), dtype=np.int32),
        expert_bytes,
        lambda row: f"{ROUTED}[{row // layers}, {row % layers}]",
        count,
    )


def _count(name: str, array: Ints | None) -> int | None:
    if array is None:
        return None
    if array.size != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"trace {name}: {COUNT} is {array.dtype} of shape {list(array.shape)}, must be one "
            "whole number."
        )
    count = int(array.reshape(-1)[0])
    if not 1 <= count <= MOST_EXPERT + 1:
        raise ValueError(f"trace {name}: {COUNT}={count} must be in 1..{MOST_EXPERT + 1}.")
    return count


def _arrays(path: Path) -> dict[str, Ints]:
    """Return the arrays that are ours to read; the others by name, and empty."""
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.file_size > _MOST_BYTES:
                    raise ValueError(f"{info.filename} has {info.file_size} bytes unpacked")
        with np.load(path, allow_pickle=False) as found:
            nothing = np.zeros(0, dtype=np.int32)
            return {n: found[n] if n in (ROUTED, COUNT) else nothing for n in found.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"trace {path.name} is no readable .npz: {error}.") from None
