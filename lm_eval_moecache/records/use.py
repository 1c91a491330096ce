"""How often each expert was used: the JSON of `moecache profile use`, and its order of heat."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lm_eval_moecache.records.files import read_json, write_whole
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.numbers import shown


@dataclass(frozen=True, kw_only=True)
class UseProfile:
    """Counts of use, `counts[layer][expert]`: one for each token that the router gave an expert.

    `model` is the last part of the name of the model they were counted on, empty where that is not
    known. `name` says where they came from, and makes no other profile of the same counts.
    """

    model: str
    counts: tuple[tuple[int, ...], ...]
    name: str = field(default="", compare=False)

    @property
    def num_layers(self) -> int:
        return len(self.counts)

    @property
    def num_experts(self) -> int:
        return len(self.counts[0])

    @cached_property
    def digest(self) -> str:
        """Identify the counts and their model."""
        text = json.dumps([self.model.lower(), self.counts])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def hottest(self) -> tuple[int, ...]:
        """The keys of all experts that were used, the most used first, ties by key."""
        flat = [count for layer in self.counts for count in layer]
        used = [key for key, count in enumerate(flat) if count]
        return tuple(sorted(used, key=lambda key: -flat[key]))

    def check(self, geometry: Geometry) -> None:
        """Raise ValueError where the profile is of another model than this one."""
        ours = (geometry.num_layers, geometry.num_experts)
        theirs = (self.num_layers, self.num_experts)
        if theirs != ours:
            raise ValueError(
                f"warm={self.name!r} counts {theirs[0]} layers of {theirs[1]} experts, and the "
                f"model {geometry.model!r} has {ours[0]} of {ours[1]}. Allowed: a profile of it."
            )
        if self.model and self.model.lower() != bare_name(geometry.model).lower():
            raise ValueError(
                f"warm={self.name!r} is of the model {self.model!r}, and this is "
                f"{geometry.model!r}. Allowed: a profile of it; where both are one model, name it "
                "so: `moecache profile use TRACE --model NAME --out use.json`."
            )


def bare_name(model: str) -> str:
    """Return a model's name without organisation or folders."""
    return model.rstrip("/").rpartition("/")[2]


def read_use(path: str | Path) -> UseProfile:
    """Read the JSON of `moecache profile use`. Raises ValueError naming the field."""
    # Imported late: pydantic takes its time, and most runs read no profile.
    from lm_eval_moecache.records.schemas.artifacts import UseFile
    from lm_eval_moecache.records.schemas.base import check

    what = f"warm={str(path)!r}"
    found = check(UseFile, read_json(path, what), what)
    counts = tuple(tuple(layer) for layer in found.counts)
    widths = sorted({len(layer) for layer in counts})
    if len(counts) != found.num_layers or widths != [found.num_experts]:
        raise ValueError(
            f"{what}: counts has {len(counts)} layers of {shown(widths)} experts, must have "
            f"num_layers={found.num_layers} of num_experts={found.num_experts}."
        )
    return UseProfile(model=found.model, counts=counts, name=Path(path).name)


def write_use(path: Path, profile: UseProfile) -> None:
    """Write a profile as JSON, one line a layer, whole or not at all."""
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
