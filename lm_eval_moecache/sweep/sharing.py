"""Which cells share one run of the model, and the files they share it through.

Under lossless policies, outputs do not depend on the cache: one cell of a group runs the model and
records what replays of the others need. A replay's figures equal a live run's.

<experiment>/traces/<name>.parquet    the routing, and the proposals of the cells' prefetchers
<experiment>/traces/<name>.common     JSON: the results that all cells of the group have in common
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.model.checkpoint import model_path
from lm_eval_moecache.records.files import replace, write_whole
from lm_eval_moecache.records.schemas.keys import KEYS, REPLAYED, roles_of
from lm_eval_moecache.sweep.files import FAILED, TRACES
from lm_eval_moecache.sweep.identity import (
    ResolvedCell,
    content_digest,
    default_config,
    digest_of,
    plan,
)
from lm_eval_moecache.sweep.spec import REPLAY
from lm_eval_moecache.trace.recorder import Detail, identity, needs_shadow

_FORMAT = 3


class ExecutionPlan(NamedTuple):
    """Cells that run the model (some of them recording), then cells that are replayed."""

    runs: tuple[ResolvedCell, ...]
    replays: tuple[ResolvedCell, ...]


def divide(
    waiting: Sequence[ResolvedCell], folder: Path, finished: Sequence[ResolvedCell] = ()
) -> ExecutionPlan:
    """Choose for each group of cells the one that runs the model, if any must.

    Where only bounds of a group remain and its trace is gone, a finished cell records it again.
    """
    runs: list[ResolvedCell] = []
    replays: list[ResolvedCell] = []
    groups: dict[str, list[ResolvedCell]] = {}
    for planned in waiting:
        name = share_name(planned)
        if planned.cell.model == REPLAY:
            replays.append(planned)
        elif name is None:
            runs.append(planned)
        else:
            groups.setdefault(name, []).append(planned)
    for name, group in groups.items():
        detail, files, recorder = detail_of(group), SharedRun(folder, name), None
        if not files.serves(detail):
            if len(group) == 1 and not is_offline(group[0]):
                runs += group
                continue
            recorders = [planned for planned in group if not is_offline(planned)]
            recorders = recorders or [
                planned for planned in finished if share_name(planned) == name
            ]
            # A cell that failed before may fail again: prefer another.
            recorder = min(
                recorders, key=lambda planned: (folder / FAILED / f"{planned.run_id}.txt").exists()
            )
            config = recorder.config.with_changes(trace=str(files.partial), detail=detail)
            runs.append(dataclasses.replace(recorder, config=config, shared=name))
        others = (planned for planned in group if planned is not recorder)
        replays += [dataclasses.replace(planned, shared=name, replayed=True) for planned in others]
    return ExecutionPlan(tuple(runs), tuple(replays))


def is_offline(planned: ResolvedCell) -> bool:
    """Whether an algorithm of this cell knows the future, so that only a replay can run it."""
    policy = planned.config.policy
    return bool(policy.eviction.algorithm.is_offline or policy.prefetch.algorithm.is_offline)


def share_name(planned: ResolvedCell) -> str | None:
    """Return the name of a cell's group, or None where the cell must run the model itself.

    It must where its policy is lossy (outputs change), its clock is `wall` (times are measured), it
    records a trace, or its draft prefetcher needs more than the order of predictions, which is all
    that a trace keeps.
    """
    config, cell = planned.config, planned.cell
    prefetch = config.policy.prefetch.algorithm
    runs_alone = config.clock != "virtual" or config.trace is not None
    runs_alone |= prefetch.needs_draft and not prefetch.by_order
    if cell.model == REPLAY or runs_alone or not config.policy.is_lossless:
        return None
    default = default_config()
    shared_settings = {
        "format": _FORMAT,
        "model": cell.model,
        "pretrained": cell.pretrained,
        # A kept trace must not outlive its weights.
        "files": [
            content_digest(str(model_path(place)))
            for place in (cell.pretrained, config.draft)
            if place is not None
        ],
        "hflm_arguments": dict(planned.hflm_arguments),
        "tasks": list(cell.tasks),
        "options": dict(cell.options),
        "include_path": list(cell.include_path),
        "moecache": {
            key: getattr(config, key)
            for key in KEYS
            if not roles_of(key) & REPLAYED and getattr(config, key) != getattr(default, key)
        },
    }
    return digest_of(shared_settings)


def detail_of(group: Iterable[ResolvedCell]) -> Detail:
    """Return the detail a trace must keep so that all these cells can be replayed."""
    prefetchers: dict[str, tuple[Any, int, str]] = {}
    criticals: dict[int | None, None] = {}
    weights = logits = False
    for planned in group:
        policy, seed = planned.config.policy, planned.config.seed
        deciding = (policy.routing, policy.eviction, policy.miss)
        weights |= any(axis.algorithm.uses_weights for axis in deciding)
        logits |= any(axis.algorithm.uses_logits for axis in deciding)
        if policy.prefetch.algorithm.needs_draft:
            criticals[policy.prefetch.parameters.get("critical")] = None
        if needs_shadow(policy.prefetch):
            shadow = policy.prefetch, seed, planned.config.cache_reset
            prefetchers[identity(policy.prefetch, seed, "", shadow[-1])] = shadow
    return Detail(
        weights=weights or logits,
        logits=logits,
        predictions=False,
        shadows=tuple(prefetchers.values()),
        criticals=tuple(criticals),
    )


def _holds(detail: Detail) -> set[str]:
    """Return what a trace of this detail holds, each as a text."""
    kinds = {kind for kind in ("weights", "logits") if getattr(detail, kind)}
    prefetchers = {identity(choice, seed, "", reset) for choice, seed, reset in detail.shadows}
    return kinds | prefetchers | {f"critical {number}" for number in detail.criticals or ()}


class SharedRun:
    """The files of one group. Results are written last: if they exist, the trace is whole."""

    def __init__(self, folder: Path, name: str) -> None:
        self.trace = folder / TRACES / f"{name}.parquet"
        self.results = folder / TRACES / f"{name}.common"
        self.partial = folder / TRACES / f".{name}.part"

    def serves(self, wanted: Detail) -> bool:
        """Whether the trace exists and holds all of this detail."""
        try:
            contents = json.loads(self.results.read_text())
            is_whole = contents["format"] == _FORMAT and self.trace.is_file()
            return is_whole and _holds(wanted) <= {*contents["holds"]}
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def keep(self, run_id: str, detail: Detail, results: Mapping[str, Any]) -> None:
        """Move the recorded trace to its final name and write the results next to it."""
        [recording] = self.partial.glob("*.parquet")
        self.results.unlink(missing_ok=True)
        replace(recording, self.trace)
        shutil.rmtree(self.partial, ignore_errors=True)
        common = {"moecache": {"device": results["config"]["moecache"]["device"]}}
        content = {"format": _FORMAT, "run_id": run_id, "holds": sorted(_holds(detail))}
        content["kept"] = {**results, "config": {**results["config"], **common}}
        write_whole(self.results, json.dumps(content, ensure_ascii=False, default=str))


# --- bounds: eviction and prefetch that know the future, replayed on the shared runs ---


BOUNDS: Mapping[str, Mapping[str, str]] = {
    "belady": {"eviction": "belady"},
    "oracle": {"prefetch": "oracle"},
}
"""Bound -> its changes to `on_demand`: an eviction, or a prefetcher, that knows the future.

Where an event is larger than its cache, Belady's rule is no lower bound on misses, so rows do not
call it one: `engine.bound.fewest_misses` is, and `moecache replay` prints it.
"""


def bound_cells(planned: Sequence[ResolvedCell], names: Sequence[str]) -> list[ResolvedCell]:
    """Return one cell per bound and place (capacity, hardware, ...) of the cells that share runs.

    Lossy cells have no bound: their routing is not the one whose future is known.
    """
    bounds: dict[str, ResolvedCell] = {}
    for source in planned:
        if share_name(source) is None and source.cell.model != REPLAY:
            continue
        place = {
            key: value
            for key, value in source.cell.model_args.items()
            if key not in ("policy", "phases") and key.partition(".")[0] not in AXES
        }
        for name in names:
            # The oracle prefetches across layers, but a scan runs one layer at a time.
            if name == "oracle" and source.config.scoring == "scan":
                continue
            changes = BOUNDS[name]
            args = {**place, "policy": "on_demand", **changes}
            label = f"knows the future: {name}"
            cell = dataclasses.replace(source.cell, model_args=args, label=label)
            config = source.config.with_changes(policy=load_policy("on_demand", changes))
            bound = plan(cell, config, source.hflm_arguments)
            bounds.setdefault(bound.configuration_hash, bound)
    return list(bounds.values())
