"""The identity of a run: the hash of its resolved configuration, and the id made from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES, source_digest
from lm_eval_moecache.harness.arguments import Config, read_config
from lm_eval_moecache.records.files import TINY
from lm_eval_moecache.records.hardware import RENAMED
from lm_eval_moecache.sweep.spec import Cell
from lm_eval_moecache.tiny import MODEL_DIR

_SLUG_LENGTH = 60
_UNNAMED = ("pretrained", "hardware", "device", "dtype", "batch_size")
# Always part of the hash. Other settings count only where they differ from the default, so that a
# setting added by a later release does not make every finished run look unfinished.
_ESSENTIAL = ("policy", "capacity", "hardware")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedCell:
    """A checked cell with its identity."""

    cell: Cell
    config: Config
    host_arguments: Mapping[str, Any]
    configuration_hash: str
    run_id: str
    shared: str | None = None
    """Name of the model run that its group shares; None where it shares none."""
    replayed: bool = False
    """Whether it is replayed from that run, which another cell of the group makes."""

    @property
    def sources(self) -> str:
        """Digest of the policy's algorithms' code, and of the shipped model where it is used.

        Not part of the hash: the run of an edited algorithm replaces the one before.
        """
        policy = self.config.policy
        parts = [source_digest(getattr(policy, axis).algorithm) for axis in AXES]
        if self.cell.pretrained == TINY:
            parts.append(_shipped_weights())
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    @property
    def load_key(self) -> tuple[str, ...]:
        """Key of the loaded model: cells with equal keys can share one."""
        host = json.dumps(self.host_arguments, sort_keys=True, default=str)
        config = self.config
        return (
            self.cell.model,
            self.cell.pretrained,
            host,
            config.clock,
            config.store,
            str(config.store_dir),
            str(config.precision),
        )


@cache
def _shipped_weights() -> str:
    return hashlib.sha256((MODEL_DIR / "model.safetensors").read_bytes()).hexdigest()


def digest_of(settings: Mapping[str, Any]) -> str:
    """Return 16 hex digits that identify settings, whatever their order."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan(cell: Cell, config: Config, host_arguments: Mapping[str, Any]) -> ResolvedCell:
    """Return a checked cell with its configuration hash and run id."""
    resolved = {
        "model": cell.model,
        "pretrained": cell.pretrained,
        # A device counts only if it was given: another machine's default is the same configuration.
        "host_arguments": {
            key: cell.arguments.get(key, value) if key == "device" else value
            for key, value in host_arguments.items()
            if key != "device" or key in cell.arguments
        },
        "moecache": resolve(config),
        "tasks": list(cell.tasks),
        "options": dict(cell.options),
    }
    digest = digest_of(resolved)
    return ResolvedCell(
        cell=cell,
        config=config,
        host_arguments=host_arguments,
        configuration_hash=digest,
        run_id=f"{slug(cell)}-{digest[:8]}",
    )


@cache
def default_config() -> Config:
    """Return the configuration of a run without any arguments."""
    return read_config({})


def resolve(config: Config) -> dict[str, Any]:
    """Return the configuration with policy and hardware in full, without their sources."""
    default = default_config()
    resolved: dict[str, Any] = {
        name: value
        for name, value in config
        if name in _ESSENTIAL or value != getattr(default, name)
    }
    resolved["policy"] = {**config.policy.as_dict(), "name": config.policy.composition}
    # Redundant: the axes define the composition.
    resolved["policy"].pop("composition", None)
    # Optional fields of a profile count only where set: a default changes nothing.
    resolved["hardware"] = {
        field.name: getattr(config.hardware, field.name)
        for field in dataclasses.fields(config.hardware)
        if getattr(config.hardware, field.name) != field.default
    }
    # A renamed profile keeps its former name, so that its finished runs stay finished.
    former_names = {new: old for old, new in RENAMED.items()}
    resolved["hardware"]["name"] = former_names.get(config.hardware.name, config.hardware.name)
    if config.emulate is not None:
        resolved["emulate"] = config.emulate.record()
    if config.warm is not None:
        resolved["warm"] = config.warm.digest
    for part in {"policy", "hardware", "emulate"} & resolved.keys():
        resolved[part].pop("source", None)
    return resolved


def slug(cell: Cell) -> str:
    """Return a readable name from a cell's arguments; run ids append a hash to tell slugs apart."""
    arguments = {k: Path(str(v)).stem if k == "trace" else v for k, v in cell.model_args.items()}
    values = [str(value) for key, value in arguments.items() if key not in _UNNAMED]
    text = "_".join([*values, "+".join(cell.tasks)]).replace("%", "pct")
    return re.sub(r"[^A-Za-z0-9.+_]+", "-", text)[:_SLUG_LENGTH].strip("-.")
