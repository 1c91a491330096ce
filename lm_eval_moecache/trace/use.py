"""Counts the use of experts in routing traces, to warm caches with."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from lm_eval_moecache.records.files import is_file
from lm_eval_moecache.records.use import UseProfile, bare_name, read_use
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace


def load_use(file: str, key: str = "warm") -> UseProfile:
    """Return the profile in a JSON, or that of a routing trace of any known format.

    ValueError begins with `key` and the value.
    """
    if not file.strip():
        raise ValueError(
            f"{key}={file!r} names no file. Allowed: a routing trace, or the JSON of "
            "`moecache profile use`."
        )
    path = Path(file)
    if path.suffix == ".json":
        return read_use(file)
    if not is_file(path):
        raise ValueError(f"{key}={file!r}: there is no such file.")
    try:
        return _counted(file, path.stat().st_mtime_ns)
    except ValueError as error:
        raise ValueError(f"{key}={file!r}: {error}") from None


@lru_cache(maxsize=4)
def _counted(file: str, changed_ns: int) -> UseProfile:
    """Keep the last ones: the cells of a sweep name one file."""
    return use_of(load_trace(file))


def use_of(trace: Trace) -> UseProfile:
    """Count each expert's tokens in a trace, over all its passes.

    A trace that says no sizes does not say its model either: its profile fits by its layers and
    experts alone.
    """
    geometry, columns = trace.geometry, trace.columns
    shape = geometry.num_layers, geometry.num_experts
    keys = columns.experts.astype(np.int64) + columns.layer.astype(np.int64)[:, None] * shape[1]
    counts = np.bincount(keys[columns.experts >= 0], minlength=shape[0] * shape[1])
    return UseProfile(
        model=bare_name(geometry.model) if trace.has_sizes else "",
        counts=tuple(tuple(layer.tolist()) for layer in counts.reshape(shape)),
        name=trace.name,
    )
