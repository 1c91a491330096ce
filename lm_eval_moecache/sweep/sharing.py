"""Which cells share one run of the model, and the files they share it by.

Outputs do not depend on the cache where nothing is lost: one cell of a group runs the model and
records what the others have to see, and these are replayed. A replay's figures are a live run's.

<experiment>/traces/<name>.parquet    the routing, and what the cells' prefetchers proposed
<experiment>/traces/<name>.common     JSON: the results that all cells of the group have in common
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.files import TINY, TINY_DRAFT, write_whole
from lm_eval_moecache.sweep.files import FAILED, TRACES
from lm_eval_moecache.sweep.identity import ResolvedCell, default_config, digest_of, plan
from lm_eval_moecache.sweep.spec import REPLAY
from lm_eval_moecache.tiny import DRAFT_DIR, MODEL_DIR
from lm_eval_moecache.trace.recorder import Detail, identity, looks_on

_FORMAT = 1
# What of a setting changes no output of a lossless policy, and nothing that the model computes.
# A setting that is not listed keeps cells apart.
OUTPUT_INVARIANT_KEYS = (
    *("policy", "capacity", "hardware", "emulate", "link", "warm"),
    *("execute", "reads_per_expert", "attention", "cache_reset", "seed", "trace", "detail"),
)


class ExecutionPlan(NamedTuple):
    """Cells that run the model (those that record among them), and cells that are replayed."""

    runs: tuple[ResolvedCell, ...]
    replays: tuple[ResolvedCell, ...]


def divide(
    waiting: Sequence[ResolvedCell], folder: Path, finished: Sequence[ResolvedCell] = ()
) -> ExecutionPlan:
    """Choose for each group of cells which one runs the model, if any has to.

    Where only bounds are left of a group and its trace is gone, a finished cell records it anew.
    """
    runs: list[ResolvedCell] = []
    replays: list[ResolvedCell] = []
    groups: dict[str, list[ResolvedCell]] = {}
    for each in waiting:
        name = share_name(each)
        if each.cell.model == REPLAY:
            replays.append(each)
        elif name is None:
            runs.append(each)
        else:
            groups.setdefault(name, []).append(each)
    for name, group in groups.items():
        wanted, files, first = detail_of(group), SharedRun(folder, name), None
        if not files.serves(wanted):
            if len(group) == 1 and not is_offline(group[0]):
                runs += group
                continue
            able = [each for each in group if not is_offline(each)]
            able = able or [each for each in finished if share_name(each) == name]
            # A cell that has failed before may fail again: another one is tried first.
            first = min(able, key=lambda each: (folder / FAILED / f"{each.run_id}.txt").exists())
            config = first.config.with_changes(trace=str(files.partial), detail=wanted)
            runs.append(dataclasses.replace(first, config=config, shared=name))
        others = (each for each in group if each is not first)
        replays += [dataclasses.replace(each, shared=name, replayed=True) for each in others]
    return ExecutionPlan(tuple(runs), tuple(replays))


def is_offline(planned: ResolvedCell) -> bool:
    """Whether only a replay can make this cell."""
    policy = planned.config.policy
    return bool(policy.eviction.algorithm.is_offline or policy.prefetch.algorithm.is_offline)


def share_name(planned: ResolvedCell) -> str | None:
    """Name the group of a cell, or return None where it has to run the model by itself.

    A lossy policy changes the outputs, a wall clock is measured, who asks for a trace wants a run,
    and of what a draft foretells a trace keeps the order alone.
    """
    config, cell = planned.config, planned.cell
    prefetch = config.policy.prefetch.algorithm
    runs_alone = config.clock != "virtual" or config.trace is not None
    runs_alone |= prefetch.needs_draft and not prefetch.by_order
    if cell.model == REPLAY or runs_alone or not config.policy.is_lossless:
        return None
    default = default_config()
    same = {
        "format": _FORMAT,
        "model": cell.model,
        "pretrained": cell.pretrained,
        "files": _fingerprint(cell.pretrained),
        **({} if config.draft is None else {"draft_files": _fingerprint(config.draft)}),
        "host_arguments": dict(planned.host_arguments),
        "tasks": list(cell.tasks),
        "options": dict(cell.options),
        "include_path": list(cell.include_path),
        "moecache": {
            name: value
            for name, value in config
            if name not in OUTPUT_INVARIANT_KEYS and value != getattr(default, name)
        },
    }
    return digest_of(same)


def _fingerprint(pretrained: str) -> list[tuple[str, int, int]]:
    """Tell a folder's state: a trace that is kept must not outlive the weights it was made of."""
    folder = Path({TINY: MODEL_DIR, TINY_DRAFT: DRAFT_DIR}.get(pretrained, pretrained))
    if not folder.is_dir():
        return []
    found = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def detail_of(group: Iterable[ResolvedCell]) -> Detail:
    """Return what a trace has to keep for all these cells to be replayed."""
    onlookers: dict[str, tuple[Any, int]] = {}
    criticals: dict[int | None, None] = {}
    weights = logits = False
    for each in group:
        policy, seed = each.config.policy, each.config.seed
        deciding = (policy.routing, policy.eviction, policy.miss)
        weights |= any(axis.algorithm.uses_weights for axis in deciding)
        logits |= any(axis.algorithm.uses_logits for axis in deciding)
        if policy.prefetch.algorithm.needs_draft:
            criticals[policy.prefetch.parameters.get("critical")] = None
        if looks_on(policy.prefetch):
            onlookers[identity(policy.prefetch, seed, "")] = (policy.prefetch, seed)
    return Detail(
        weights=weights or logits,
        logits=logits,
        predictions=False,
        onlookers=tuple(onlookers.values()),
        criticals=tuple(criticals),
    )


def _told(detail: Detail) -> dict[str, Any]:
    """Return what a trace of this detail holds, as JSON can say it."""
    return {
        "weights": detail.weights,
        "logits": detail.logits,
        "prefetchers": [identity(choice, seed, "") for choice, seed in detail.onlookers],
        "criticals": list(detail.criticals or ()),
    }


class SharedRun:
    """The files of one group. The results are written last: where they are, the trace is whole."""

    def __init__(self, folder: Path, name: str) -> None:
        self.trace = folder / TRACES / f"{name}.parquet"
        self.results = folder / TRACES / f"{name}.common"
        self.partial = folder / TRACES / f".{name}.part"

    def serves(self, wanted: Detail) -> bool:
        """Whether the trace is there and holds all that is wanted."""
        try:
            found = json.loads(self.results.read_text())
            return bool(found["format"] == _FORMAT and self.trace.is_file()) and all(
                set(value) <= set(found[key]) if isinstance(value, list) else value <= found[key]
                for key, value in _told(wanted).items()
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def keep(self, run_id: str, detail: Detail, kept: Mapping[str, Any]) -> None:
        """Give the recorded trace its name and write the results beside it."""
        [recorded] = self.partial.glob("*.parquet")
        self.results.unlink(missing_ok=True)
        os.replace(recorded, self.trace)
        shutil.rmtree(self.partial, ignore_errors=True)
        config = {**kept["config"], "moecache": {"device": kept["config"]["moecache"]["device"]}}
        content = {"format": _FORMAT, "run_id": run_id, **_told(detail)}
        content["kept"] = {**kept, "config": config}
        write_whole(self.results, json.dumps(content, ensure_ascii=False, default=str))


# --- bounds: what eviction and prefetch could do if they knew the future, on the shared runs ---


BOUNDS: Mapping[str, Mapping[str, str]] = {
    "belady": {"eviction": "belady"},
    "oracle": {"prefetch": "oracle"},
}
"""What each changes in `on_demand`: evictions that know the future, or prefetches that do.

Where an event is larger than its cache, Belady's rule is no bound on misses, so rows do not say so:
`engine.bound.fewest_misses` is one, and `moecache replay` prints it.
"""


def bound_cells(planned: Sequence[ResolvedCell], names: Sequence[str]) -> list[ResolvedCell]:
    """Return one cell per bound and place (capacity, hardware, ...) of the cells that share runs.

    A cell that loses something has no bound: its routing is not the one whose future is known.
    """
    found: dict[str, ResolvedCell] = {}
    for each in planned:
        if share_name(each) is None and each.cell.model != REPLAY:
            continue
        place = {
            key: value
            for key, value in each.cell.model_args.items()
            if key not in ("policy", "phases") and key.partition(".")[0] not in AXES
        }
        for name in names:
            # Prefetches cross layers, and a scan goes through one layer at a time.
            if name == "oracle" and each.config.scoring == "scan":
                continue
            changes = BOUNDS[name]
            args = {**place, "policy": "on_demand", **changes}
            label = f"knows the future: {name}"
            cell = dataclasses.replace(each.cell, model_args=args, label=label)
            config = each.config.with_changes(policy=load_policy("on_demand", changes))
            bound = plan(cell, config, each.host_arguments)
            found.setdefault(bound.configuration_hash, bound)
    return list(found.values())
