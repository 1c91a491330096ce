"""Use counts of experts, from files and from routing traces: caches are warmed by them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm_eval_moecache.records.artifact import ARTIFACT_DIR
from lm_eval_moecache.records.files import check_file, is_file, read_json, write_whole
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.trace.importers import MOST_BYTES, find_format, load_trace
from lm_eval_moecache.trace.trace import Trace

if TYPE_CHECKING:
    from lm_eval_moecache.algorithms.policy import Policy


@dataclass(frozen=True, kw_only=True)
class UseProfile:
    """Use counts, `counts[layer][expert]`: the tokens that the router sent to each expert.

    `model` is the last part of the name of the model they were counted on, empty where unknown.
    `name` says where they came from, and does not count for equality.
    """

    model: str
    counts: tuple[tuple[int, ...], ...]
    name: str = field(default="", compare=False)

    @property
    def num_layers(self) -> int:
        """MoE layers counted."""
        return len(self.counts)

    @property
    def num_experts(self) -> int:
        """Experts of each layer."""
        return len(self.counts[0])

    @cached_property
    def digest(self) -> str:
        """Digest of the counts and their model, 16 hex digits."""
        text = json.dumps([self.model.lower(), self.counts])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def hottest(self) -> tuple[int, ...]:
        """The keys of all used experts, most used first, ties by key."""
        flat = [count for layer in self.counts for count in layer]
        used_keys = [key for key, count in enumerate(flat) if count]
        return tuple(sorted(used_keys, key=lambda key: -flat[key]))

    def check(self, geometry: Geometry) -> None:
        """Raise ValueError if the profile is of another model than this one."""
        sizes = (geometry.num_layers, geometry.num_experts)
        counted = (self.num_layers, self.num_experts)
        if counted != sizes:
            raise ValueError(
                f"warm={self.name!r} counts {counted[0]} layers of {counted[1]} experts, and the "
                f"model {geometry.model!r} has {sizes[0]} of {sizes[1]}. Allowed: a profile of it."
            )
        if self.model and self.model.lower() != bare_name(geometry.model).lower():
            raise ValueError(
                f"warm={self.name!r} is of the model {self.model!r}, and this is "
                f"{geometry.model!r}. Allowed: a profile of it; where both are one model, name it "
                "so: `moecache profile use TRACE --model NAME --out use.json`."
            )


def bare_name(model: str) -> str:
    """Return a model's name without its organisation or folders."""
    return model.rstrip("/").rpartition("/")[2]


def read_use(path: str | Path) -> UseProfile:
    """Read the JSON of `moecache profile use`. Raises ValueError naming the field."""
    # Imported late: pydantic is slow to import, and most runs read no profile.
    from lm_eval_moecache.records.schemas import check
    from lm_eval_moecache.trace.schema import UseFile

    what = f"warm={str(path)!r}"
    file = check(UseFile, read_json(path, what), what)
    counts = tuple(tuple(layer) for layer in file.counts)
    widths = sorted({len(layer) for layer in counts})
    if len(counts) != file.num_layers or widths != [file.num_experts]:
        raise ValueError(
            f"{what}: counts has {len(counts)} layers of {shown(widths)} experts, must have "
            f"num_layers={file.num_layers} of num_experts={file.num_experts}."
        )
    return UseProfile(model=file.model, counts=counts, name=Path(path).name)


def write_use(path: Path, profile: UseProfile) -> None:
    """Write a profile atomically, as JSON with one line per layer."""
    head = {
        "format": 1,
        "kind": "use",
        "model": profile.model,
        "num_layers": profile.num_layers,
        "num_experts": profile.num_experts,
        "made_from": profile.name,
    }
    lines = ",\n".join(f"  {json.dumps(layer)}" for layer in profile.counts)
    text = f'{json.dumps(head, indent=1)[:-2]},\n "counts": [\n{lines}\n ]\n}}\n'
    write_whole(path, text)


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
