"""The identity of a run: the hash of its resolved configuration, and the id made from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES, source_digest
from lm_eval_moecache.harness.arguments import Config, read_config
from lm_eval_moecache.model.checkpoint import folder_of
from lm_eval_moecache.records.files import TINY, task_configs_dir
from lm_eval_moecache.records.hardware import OF_THE_MACHINE, RENAMED
from lm_eval_moecache.records.schemas.keys import LOADING, keys_with
from lm_eval_moecache.report.runs.run import ONLY_HOW
from lm_eval_moecache.sweep.spec import Cell
from lm_eval_moecache.tiny import MODEL_DIR

_SLUG_LENGTH = 60
_UNNAMED = ("pretrained", "hardware", "device", "dtype", *ONLY_HOW)
# Always part of the hash. Other settings count only where they differ from the default, so that a
# setting added by a later release does not make every finished run look unfinished.
_ESSENTIAL = ("policy", "capacity", "hardware")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedCell:
    """A checked cell with its identity."""

    cell: Cell
    config: Config
    hflm_arguments: Mapping[str, Any]
    configuration_hash: str
    run_id: str
    shared: str | None = None
    """Name of the model run that its group shares; None where it shares none."""
    replayed: bool = False
    """Whether it is replayed from that run, which another cell of the group makes."""

    @property
    def settings(self) -> dict[str, Any]:
        """The cell as it is written, whatever the files that it names hold."""
        cell = self.cell
        arguments, tasks = dict(cell.model_args), list(cell.tasks)
        return {"model": cell.model, "model_args": arguments, "tasks": tasks, **cell.options}

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
    def inputs(self) -> str | None:
        """Digest of what the run reads besides the package: weights, drafts, artefacts, tasks, a
        trace.

        None where it reads nothing of the kind. Like `sources`, it is not part of the hash: the run
        on retrained weights replaces the one before.
        """
        names = [*_files_in(self.cell.include_path)]
        for place in (self.cell.pretrained, self.config.draft):
            if isinstance(place, str) and place != TINY:
                names.append(str(folder_of(place, self.hflm_arguments) or place))
        for axis in AXES:
            values = getattr(self.config.policy, axis).parameters.values()
            names += [value for value in values if isinstance(value, str)]
        # By content alone: a folder may have been moved.
        contents = sorted(filter(None, map(content_digest, {*names})))
        return digest_of({"contents": contents}) if contents else None

    @property
    def load_key(self) -> tuple[str, ...]:
        """Key of the loaded model: cells with equal keys can share one."""
        hflm_arguments = json.dumps(self.hflm_arguments, sort_keys=True, default=str)
        config = self.config
        return (
            self.cell.model,
            self.cell.pretrained,
            hflm_arguments,
            *(str(getattr(config, key)) for key in keys_with(LOADING)),
        )


_SAMPLED_BYTES, _SAMPLES, _BLOCK = 1 << 28, 256, 1 << 20


def content_digest(place: str) -> str | None:
    """Return a digest of a file's content, or of a folder's files; None where there is neither.

    Of a file above 256 MiB its size and 256 evenly spaced blocks of 1 MiB count.
    """
    path = Path(place)
    try:
        if path.is_file():
            status = path.stat()
            return _digest_of_file(str(path), status.st_size, status.st_mtime_ns)
        if not path.is_dir():
            return None
        files = sorted(file for file in path.iterdir() if file.suffix in _READ_FROM_FOLDERS)
        parts = {file.name: content_digest(str(file)) for file in files}
    except OSError:
        return None
    return digest_of(parts) if parts else None


_READ_FROM_FOLDERS = (".safetensors", ".bin", ".json", ".model", ".txt", ".jinja", ".py")


@lru_cache(maxsize=1024)
def _digest_of_file(name: str, size: int, modified_ns: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    step = _BLOCK if size <= _SAMPLED_BYTES else max(_BLOCK, size // _SAMPLES)
    with open(name, "rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:16]


def _files_in(folders: Iterable[str]) -> list[str]:
    """Return the task files of these folders: YAMLs, their code and their rows."""
    suffixes = (".yaml", ".yml", ".py", ".json", ".jsonl", ".txt")
    own = task_configs_dir().resolve()
    return [
        str(file)
        for folder in folders
        if Path(folder).resolve() != own
        for file in sorted(Path(folder).rglob("*"))
        if file.suffix in suffixes and file.is_file()
    ]


@cache
def _shipped_weights() -> str:
    return hashlib.sha256((MODEL_DIR / "model.safetensors").read_bytes()).hexdigest()


def digest_of(settings: Mapping[str, Any]) -> str:
    """Return 16 hex digits that identify settings, whatever their order."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan(cell: Cell, config: Config, hflm_arguments: Mapping[str, Any]) -> ResolvedCell:
    """Return a checked cell with its configuration hash and run id."""
    resolved = {
        "model": cell.model,
        "pretrained": cell.pretrained,
        # The key is part of every hash: under another name no finished run would be found again.
        # A device counts only if it was given: another machine's default is the same configuration.
        "host_arguments": {
            key: cell.arguments.get(key, value) if key == "device" else value
            for key, value in hflm_arguments.items()
            if (key != "device" or key in cell.arguments) and key not in ONLY_HOW
        },
        "moecache": resolve(config),
        "tasks": list(cell.tasks),
        "options": dict(cell.options),
    }
    digest = digest_of(resolved)
    return ResolvedCell(
        cell=cell,
        config=config,
        hflm_arguments=hflm_arguments,
        configuration_hash=digest,
        run_id=f"{slug(cell)}-{digest[:12]}",
    )


@cache
def default_config() -> Config:
    """Return the configuration of a run without any arguments."""
    return read_config({})


def resolve(config: Config) -> dict[str, Any]:
    """Return the configuration with policy and hardware in full, without their sources."""
    # What a run without the key had before `request` became the default: finished runs of a running
    # server stay finished, and pass for no others.
    default = default_config().with_changes(cache_reset="never")
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
        and field.name not in OF_THE_MACHINE
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
    """Return a readable name from a cell's arguments; run ids append a hash to make it unique."""
    arguments = {k: Path(str(v)).stem if k == "trace" else v for k, v in cell.model_args.items()}
    values = [str(value) for key, value in arguments.items() if key not in _UNNAMED]
    text = "_".join([*values, "+".join(cell.tasks)]).replace("%", "pct")
    return re.sub(r"[^A-Za-z0-9.+_]+", "-", text)[:_SLUG_LENGTH].strip("-.")
