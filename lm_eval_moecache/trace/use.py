"""Counts expert use in routing traces, to warm caches and to forecast prompts."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm_eval_moecache.records.artifact import ARTIFACT_DIR, UseProfile, bare_name, read_use
from lm_eval_moecache.records.files import check_file, is_file
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.importers import MOST_BYTES, find_format, load_trace
from lm_eval_moecache.trace.trace import Trace

if TYPE_CHECKING:
    from lm_eval_moecache.algorithms.policy import Policy


def load_use(file: str, key: str = "warm") -> UseProfile:
    """Return the use profile of a JSON file, a routing trace, or a model that ships one.

    ValueError begins with `key` and the value.
    """
    if not file.strip():
        raise ValueError(
            f"{key}={file!r} names no file. Allowed: a routing trace, the JSON of "
            "`moecache profile use`, or the name of a model whose profile ships (tiny)."
        )
    path = Path(file)
    if file == bare_name(file) and not is_file(path) and is_file(_shipped(file)):
        return read_use(_shipped(file))
    if path.suffix == ".json" and not _is_trace(file):
        return read_use(file)
    check_file(path, f"{key}={file!r}", MOST_BYTES)
    try:
        return _counted(file, path.stat().st_mtime_ns)
    except ValueError as error:
        raise ValueError(f"{key}={file!r}: {error}") from None


def _is_trace(file: str) -> bool:
    try:
        return bool(find_format(file))
    except (OSError, ValueError):
        return False


def _shipped(model: str) -> Path:
    return ARTIFACT_DIR / bare_name(model) / "use.json"


def placement(policy: Policy, warm: UseProfile | None, geometry: Geometry) -> UseProfile | None:
    """Return the profile that warms the caches: `warm`, or the shipped one if `policy.placed`.

    Raises ValueError if the policy places experts and neither profile exists.
    """
    if warm is not None or not policy.placed:
        return warm
    shipped = _shipped(geometry.model)
    if not is_file(shipped):
        raise ValueError(
            f"policy={policy.name!r} starts from experts placed by their use, and for the model "
            f"{geometry.model!r} no profile ships. Give warm=PROFILE: a routing trace of the "
            "model, or the JSON of `moecache profile use TRACE`."
        )
    return read_use(shipped)


@lru_cache(maxsize=4)
def _counted(file: str, changed_ns: int) -> UseProfile:
    """Return a trace's use profile, cached because all cells of a sweep name one file."""
    return use_of(load_trace(file))


def use_of(trace: Trace, first: int = 0, last: int | None = None) -> UseProfile:
    """Count each expert's tokens in a trace, over all its passes or those from `first` to `last`.

    A trace without sizes does not name its model either: its profile fits any model with the same
    layers and experts.
    """
    geometry, columns = trace.geometry, trace.columns
    shape = geometry.num_layers, geometry.num_experts
    begin, end = trace.row_bounds[np.array([first, last or trace.num_passes]) * shape[0]]
    experts, layers = columns.experts[begin:end], columns.layer[begin:end]
    keys = experts.astype(np.int64) + layers.astype(np.int64)[:, None] * shape[1]
    counts = np.bincount(keys[experts >= 0], minlength=shape[0] * shape[1])
    return UseProfile(
        model=bare_name(geometry.model) if trace.has_sizes else "",
        counts=tuple(tuple(layer.tolist()) for layer in counts.reshape(shape)),
        name=trace.name,
    )


def touched(trace: Trace, window: int) -> float:
    """Return the mean share of a layer's experts that `window` consecutive tokens take."""
    columns, shares = trace.columns, []
    for layer in range(trace.geometry.num_layers):
        rows = columns.experts[columns.layer == layer]
        for start in range(0, max(len(rows) - window, 0) + 1, window):
            taken = np.unique(rows[start : start + window])
            shares.append(len(taken) / trace.geometry.num_experts)
    return float(np.mean(shares))
