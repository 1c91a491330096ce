"""Replays traces at several capacities, with the bounds that say how good a policy is.

Below: how `moecache replay` prints its runs, as JSON and as a Markdown table, and draws them.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lm_eval_moecache.algorithms.policy import Policy, check_cache_form, load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.engine.bound import fewest_misses
from lm_eval_moecache.engine.regime import decode_waits, regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import FLAT, PRIORITY, TOGETHER, Setting
from lm_eval_moecache.records.emulation import RealModel
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.sizes import (
    Capacity,
    check_capacity,
    check_sized,
    is_per_layer,
    parse_capacity,
)
from lm_eval_moecache.records.use import UseProfile
from lm_eval_moecache.report.metrics import MEGABYTE, task_metrics
from lm_eval_moecache.report.mpl_style import new_figure, plain, save
from lm_eval_moecache.report.render import padded
from lm_eval_moecache.trace.file import StreamedTrace
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace, open_any
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.use import placement

LRU, FEWEST = "lru", "bound"
PHASES_SHOWN = ("", "decode_")
_PICTURES = (".svg", ".png", ".pdf")
_ON_DEMAND = {"routing": "standard", "prefetch": "none", "miss": "fetch"}
_PATIENCE_S = 2.0
"""Shorter replays show no progress bar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSetting:
    """What `moecache replay` was asked for, checked. `seed` None takes each trace's own."""

    policies: Sequence[Policy]
    capacities: Sequence[str]
    hardwares: Sequence[Hardware]
    cache_reset: str = "never"
    seed: int | None = None
    expert_bytes: int | None = None
    bound: bool = True
    link: str = PRIORITY
    execute: str = TOGETHER
    reads_per_expert: int = 1
    attention: str = FLAT
    emulate: RealModel | None = None
    """The model whose sizes the traced layers are charged as; None for the trace's own."""
    warm: UseProfile | None = None
    """What the caches hold before the first request, those of the bounds, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One replay: a trace under one policy, at one capacity, on one machine."""

    trace: str
    has_sizes: bool
    policy: Policy
    capacity: Capacity
    hardware: Hardware
    metrics: dict[str, Any]
    warnings: tuple[str, ...]
    """Settings that did nothing on this trace."""
    cycles: float
    """Tokens' worth of experts that the capacity holds."""
    bounds: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Phase ("" for all, `decode_`) -> on-demand LRU's miss rate, and the one that no eviction on
    demand goes below in that phase; empty where not asked for."""
    closeness: float | None = None
    regret: float | None = None
    """Misses above the fewest, of all requests; below 0 where a prefetch hides them."""
    victim_share: float | None = None
    """Of the misses above the fewest of a cache that may turn experts away, too, what better
    victims would save; the rest is what only a choice of whom to admit could."""
    emulates: str = ""
    """The model whose sizes the layers were charged as."""
    uncompiled: str = ""
    """Why the replay went event by event, and so is slower; empty where a compiled loop did it."""
    warmed_by: str = ""
    """The profile of use that the caches began with."""
    regime: dict[str, Any] | None = None
    """None where the trace says no sizes, and none are emulated."""

    @property
    def open_loop(self) -> bool:
        """Whether the policy changes routing, whose consequences a trace cannot show."""
        return not self.policy.is_lossless


Cell = tuple[Policy, Hardware, str]
"""What of a setting differs between the replays of a trace; the last is a capacity."""


def cells_of(setting: SweepSetting) -> list[Cell]:
    """Return what each trace is replayed as, in the order of the rows.

    Raises ValueError for a setting that a live run refuses, too.
    """
    _check(setting)
    return [*product(setting.policies, setting.hardwares, setting.capacities)]


def run_sweep(
    files: Sequence[str], setting: SweepSetting, *, show_progress: bool = False
) -> list[Row]:
    """Replay each trace under each policy, on each machine, at each capacity, in the order given.

    Raises ValueError for a setting that a live run refuses, too, before any trace is read.
    """
    cells = cells_of(setting)
    return [row for file in files for row in run_cells(file, setting, cells, show_progress)]


def run_cells(
    file: str, setting: SweepSetting, cells: Sequence[Cell], show_progress: bool = False
) -> list[Row]:
    """Replay a trace as these cells, in one reading of it."""
    foresees = setting.bound or any(map(_is_offline, setting.policies))
    trace = _trace(file, setting, foresees)
    bounds = len({capacity for *_, capacity in cells}) if setting.bound else 0
    with tqdm(
        total=trace.num_passes * (len(cells) + bounds),
        desc=trace.name,
        unit="pass",
        delay=_PATIENCE_S,
        disable=not show_progress,
    ) as bar:
        replays = _Replays(trace, setting, foresees, bar)
        rows = []
        for policy, hardware, text in cells:
            capacity = _capacity(text, trace, setting.emulate, policy)
            rows.append(_row(file, replays, policy, hardware, capacity))
        bar.refresh()
    return rows


def one_replay(
    files: Sequence[str], setting: SweepSetting
) -> tuple[Trace | StreamedTrace, Setting, Future | None]:
    """Return what `run_sweep` replays where it is a single replay; ValueError where it is more."""
    parts = (files, setting.policies, setting.capacities, setting.hardwares)
    if any(len(part) != 1 for part in parts):
        raise ValueError(
            "timeline: a timeline is of one replay. Give one trace, policy, capacity and hardware."
        )
    _check(setting)
    (policy,), foresees = setting.policies, any(map(_is_offline, setting.policies))
    trace = _trace(files[0], setting, foresees)
    replays = _Replays(trace, setting, foresees, None)
    capacity = _capacity(setting.capacities[0], trace, setting.emulate, policy)
    found = replays.setting_of(policy, capacity, setting.hardwares[0])
    return trace, found, replays.future


def _trace(file: str, setting: SweepSetting, foresees: bool) -> Trace | StreamedTrace:
    """Read a trace; a large one of our own is streamed, unless something has to know its future."""
    return (load_trace if foresees else open_any)(
        file,
        logits=any(map(_uses_logits, setting.policies)),
        predicted=any(map(_uses_predictions, setting.policies)),
        expert_bytes=setting.expert_bytes,
    )


def closeness(lru: float, policy: float, fewest: float) -> float | None:
    """How much of the way from LRU to the bound a policy goes; None where there is no way."""
    return None if lru == fewest else (lru - policy) / (lru - fewest)


def victim_share(policy: int, fewest: int, turning_away: int) -> float | None:
    """Return what better victims would save, of what better victims and admission would.

    None where a policy has no more misses than the bound of its own kind, as with prefetch.
    """
    return (policy - fewest) / (policy - turning_away) if policy > fewest else None


@dataclass(frozen=True, slots=True)
class _Found:
    """What a replay came to: `misses` are late and absent requests."""

    metrics: dict[str, Any]
    regime: dict[str, Any]
    misses: int
    proposed: int
    uncompiled: str


class _Replays:
    """The replays of one trace, each setting once: a bound may be what was asked for."""

    def __init__(
        self, trace: Trace | StreamedTrace, setting: SweepSetting, foresees: bool, bar: Any
    ) -> None:
        self.trace, self.setting, self._bar = trace, setting, bar
        self.future = Future(trace) if foresees and isinstance(trace, Trace) else None
        self._done: dict[str, _Found] = {}
        self._fewest: dict[tuple[Capacity, bool, bool], tuple[int, int]] = {}

    def run(self, policy: Policy, capacity: Capacity, hardware: Hardware) -> _Found:
        axes = [getattr(policy, axis).as_dict() for axis in AXES]
        key = repr((axes, policy.phases, capacity, hardware))
        if key in self._done:
            self._bar.update(self.trace.num_passes)
            return self._done[key]
        engine = replay(
            self.trace,
            self.setting_of(policy, capacity, hardware),
            future=self.future,
            cache_reset=self.setting.cache_reset,
            on_progress=self._bar.update,
        )
        engine.check_integrity()
        misses = sum(p.late + p.misses for p in engine.ledger.passes)
        requests, geometry = engine.ledger.requests, engine.geometry
        regime = regime_of(geometry, capacity.total_bytes, hardware)
        found = _Found(
            metrics=task_metrics(requests, engine.peak_cache_bytes),
            regime=regime.as_dict(decode_waits(requests, geometry.num_layers)),
            misses=misses,
            proposed=sum(p.predicted for p in engine.ledger.passes),
            uncompiled=engine.uncompiled,
        )
        return self._done.setdefault(key, found)

    def fewest(
        self, capacity: Capacity, *, decode: bool = False, turns_away: bool = False
    ) -> tuple[int, int]:
        """Return the bound on misses, and the requests it is of: all, or those after prefills."""
        key = capacity, decode, turns_away
        if key not in self._fewest:
            assert isinstance(self.trace, Trace), "a bound of a trace that is streamed"
            lru = load_policy("on_demand", _ON_DEMAND | {"eviction": LRU})
            self._fewest[key] = fewest_misses(
                self.trace,
                self.setting_of(lru, capacity, self.setting.hardwares[0]),
                cache_reset=self.setting.cache_reset,
                free_prefill=decode,
                turns_away=turns_away,
            )
        return self._fewest[key]

    def setting_of(self, policy: Policy, capacity: Capacity, hardware: Hardware) -> Setting:
        seed = self.trace.seed if self.setting.seed is None else self.setting.seed
        return Setting(
            policy=policy,
            capacity=capacity,
            hardware=hardware,
            seed=seed,
            emulate=self.setting.emulate,
            link=self.setting.link,
            execute=self.setting.execute,
            reads_per_expert=self.setting.reads_per_expert,
            attention=self.setting.attention,
            warm=placement(policy, self.setting.warm, self.trace.geometry),
        )


def _row(
    file: str, replays: _Replays, policy: Policy, hardware: Hardware, capacity: Capacity
) -> Row:
    own = replays.run(policy, capacity, hardware)
    emulate = replays.setting.emulate
    warm = placement(policy, replays.setting.warm, replays.trace.geometry)
    has_sizes = replays.trace.has_sizes or emulate is not None
    return Row(
        trace=file,
        has_sizes=has_sizes,
        policy=policy,
        capacity=capacity,
        hardware=hardware,
        metrics=own.metrics,
        warnings=_idle(policy, own, len(replays.trace.requests)),
        cycles=own.regime["capacity_cycles"],
        emulates="" if emulate is None else emulate.name,
        uncompiled=own.uncompiled,
        warmed_by="" if warm is None else warm.name,
        regime=own.regime if has_sizes else None,
        **(_bounds(replays, own, capacity) if replays.setting.bound else {}),
    )


def _bounds(replays: _Replays, own: _Found, capacity: Capacity) -> dict[str, Any]:
    """Return a row's bounds by phase, how close to them it comes, and what it regrets."""
    # Nothing is prefetched, so the machine says when and not what.
    machine = replays.setting.hardwares[0]
    policy = load_policy("on_demand", _ON_DEMAND | {"eviction": LRU})
    lru = replays.run(policy, capacity, machine)
    bounds: dict[str, dict[str, float | None]] = {}
    for phase in PHASES_SHOWN:
        misses, requests = replays.fewest(capacity, decode=bool(phase))
        rate = misses / requests if requests else None
        bounds[phase] = {LRU: lru.metrics[f"{phase}miss_rate"], FEWEST: rate}
    fewest, requests = replays.fewest(capacity)
    least, _ = replays.fewest(capacity, turns_away=True)
    return {
        "bounds": bounds,
        "closeness": closeness(lru.misses, own.misses, fewest),
        "regret": (own.misses - fewest) / requests if requests else None,
        "victim_share": victim_share(own.misses, fewest, least),
    }


def _idle(policy: Policy, found: _Found, requests: int) -> tuple[str, ...]:
    """Say where a prefetcher was asked for that never proposed anything."""
    if not policy.prefetch.algorithm.is_active or found.proposed:
        return ()
    why = "nothing of this trace made it propose an expert"
    if policy.prefetch.name == "history":
        why = f"it learns from earlier requests, and the trace has {requests}"
    return (f"prefetch={policy.prefetch.name} did nothing: {why}.",)


def _check(setting: SweepSetting) -> None:
    for text in setting.capacities:
        check_capacity(text)
        for policy in setting.policies:
            check_cache_form(policy, is_per_layer(text))
    if setting.seed is not None and setting.seed < 0:
        raise ValueError(f"seed={setting.seed} must be a whole number of 0 or more.")


def _capacity(
    text: str, trace: Trace | StreamedTrace, emulate: RealModel | None, policy: Policy
) -> Capacity:
    if not trace.has_sizes and emulate is None:
        check_sized(text, trace.name, "--expert_bytes")
    own = trace.geometry
    charged = own if emulate is None else emulate.emulated_by(own)
    return parse_capacity(text, charged, per_layer=policy.per_layer)


def _is_offline(policy: Policy) -> bool:
    axes = (policy.prefetch, policy.eviction)
    return any(axis.algorithm.is_offline for axis in axes)


def _uses_logits(policy: Policy) -> bool:
    axes = (policy.routing, policy.prefetch, policy.eviction, policy.miss)
    weighs_changes = policy.eviction.algorithm.uses_weights and not policy.is_lossless
    return weighs_changes or any(axis.algorithm.uses_logits for axis in axes)


def _uses_predictions(policy: Policy) -> bool:
    """Whether the predictions of a trace have to be read: only then is it worth the memory."""
    return bool(policy.routing.algorithm.depth or policy.prefetch.algorithm.is_active)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the form that `--json` prints."""
    return {
        "runs": [
            {
                "trace": row.trace,
                "policy": row.policy.name,
                "eviction": row.policy.eviction.name,
                "composition": row.policy.as_dict(),
                "open_loop": row.open_loop,
                "capacity": row.capacity.text,
                "capacity_bytes": row.capacity.total_bytes,
                "hardware": row.hardware.name,
                "link_bytes_per_s": row.hardware.link_bytes_per_s,
                # Where the trace says no sizes, each expert counts one byte.
                "has_sizes": row.has_sizes,
                "emulate": row.emulates or None,
                "warm": row.warmed_by or None,
                "regime": row.regime,
                "compiled": not row.uncompiled,
                "uncompiled_because": row.uncompiled or None,
                "metrics": row.metrics,
                **{
                    f"{name}_{phase}miss_rate": row.bounds.get(phase, {}).get(name)
                    for phase in PHASES_SHOWN
                    for name in (LRU, FEWEST)
                },
                "closeness": row.closeness,
                "regret": row.regret,
                "victim_share": row.victim_share,
                "warnings": list(row.warnings),
            }
            for row in rows
        ]
    }


def as_table(rows: Sequence[Row], in_full: bool = False) -> str:
    """Return a Markdown table, one row per replay; what all rows share stands above it.

    Short, it fits a terminal; in full, it has every column.
    """
    names: dict[str, Callable[[Row], str]] = {
        "Trace": lambda row: Path(row.trace).name,
        "Policy": lambda row: row.policy.name,
        "Hardware": _hardware,
    }
    varying = {k: of for k, of in names.items() if in_full or len({of(row) for row in rows}) > 1}
    short = [k for k in _SHORT if k != "Fewest" or any(row.bounds for row in rows)]
    columns = {**varying, **(_COLUMNS if in_full else {k: _COLUMNS[k] for k in short})}
    table = padded(list(columns), [[of(row) for of in columns.values()] for row in rows])
    width = max(shutil.get_terminal_size((80, 24)).columns, 40)
    title = textwrap.wrap(_title(rows, varying), width)
    return "\n".join([*title, table, *_notes(rows)])


def _title(rows: Sequence[Row], varying: Collection[str]) -> str:
    """Name what all rows share."""
    first = rows[0]
    axes = " + ".join(getattr(first.policy, axis).name for axis in AXES)
    parts = [
        *([] if "Trace" in varying else [Path(first.trace).name]),
        *([] if "Policy" in varying else [f"{first.policy.name}: {axes}"]),
        *([f"layers charged as: {first.emulates}"] if first.emulates else []),
        *([f"warmed by: {first.warmed_by}"] if first.warmed_by else []),
        *([] if "Hardware" in varying else [f"hardware: {_hardware(first)}"]),
    ]
    return f"moecache replay ({', '.join(parts)})" if parts else "moecache replay"


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = []
    if any(row.open_loop for row in rows):
        notes.append("open loop: the policy changes routing, and hidden states do not follow.")
    if not all(row.has_sizes for row in rows):
        notes.append("No bytes and no times where the trace says no expert size: --expert_bytes.")
    notes += dict.fromkeys(
        f"{row.policy.name}: replayed event by event, not compiled: {row.uncompiled}."
        for row in rows
        if row.uncompiled
    )
    notes += dict.fromkeys(f"Warning: {text}" for row in rows for text in row.warnings)
    if any(row.bounds for row in rows):
        notes.append("Fewest: no eviction on demand misses less (Belady, where all events fit).")
    return notes


def _hardware(row: Row) -> str:
    return f"{row.hardware.name} at {row.hardware.link_bytes_per_s / 1e9:g} GB/s"


def _bound(row: Row, phase: str, name: str) -> str:
    return _number(row.bounds.get(phase, {}).get(name), "{:.4f}")


def _sized(row: Row, value: float | None, form: str) -> str:
    """Bytes and times are known where the trace says how large an expert is."""
    return _number(value if row.has_sizes else None, form)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "Capacity": lambda row: row.capacity.text,
    "Cycles": lambda row: _number(row.cycles, "{:.2f}"),
    "MB": lambda row: _sized(row, row.capacity.total_bytes / MEGABYTE, "{:.1f}"),
    "Hit": lambda row: _number(row.metrics["hit_rate"], "{:.4f}"),
    "Miss": lambda row: _number(row.metrics["miss_rate"], "{:.4f}"),
    "LRU miss": lambda row: _bound(row, "", LRU),
    "Fewest": lambda row: _bound(row, "", FEWEST),
    "Closeness": lambda row: _number(row.closeness, "{:.3f}"),
    "Regret": lambda row: _number(row.regret, "{:.4f}"),
    "Victims": lambda row: _number(row.victim_share, "{:.3f}"),
    "Decode miss": lambda row: _number(row.metrics["decode_miss_rate"], "{:.4f}"),
    "LRU decode": lambda row: _bound(row, "decode_", LRU),
    "Fewest decode": lambda row: _bound(row, "decode_", FEWEST),
    "MB read": lambda row: _sized(row, row.metrics["bytes_moved"] / MEGABYTE, "{:.1f}"),
    "TPOT ms": lambda row: _sized(row, (row.metrics.get("tpot_ms") or {}).get("mean"), "{:.3f}"),
    "tok/s": lambda row: _sized(row, row.metrics["tok_per_s"], "{:.1f}"),
    "Stall ms/tok": lambda row: _sized(row, row.metrics["stall_ms_per_token"], "{:.3f}"),
    "Transfer/layer": lambda row: _number((row.regime or {}).get("transfer_per_layer"), "{:.3g}"),
    "Bound": lambda row: str((row.regime or {}).get("bound", "")),
}
_SHORT = ("Capacity", "Miss", "Fewest", "Decode miss", "TPOT ms", "tok/s")


def plot_miss_rates(rows: Sequence[Row], file: str) -> None:
    """Write one line per trace for the policy, and one for each bound."""
    path = Path(file)
    if path.suffix not in _PICTURES:
        raise ValueError(
            f"plot={file!r}: the suffix {path.suffix!r} is not known. Allowed: "
            f"{', '.join(_PICTURES)}."
        )
    figure, (axes,) = new_figure()
    drawn: set[str] = set()
    for trace, named, machine in dict.fromkeys(map(_series, rows)):
        own = [row for row in rows if _series(row) == (trace, named, machine)]
        own.sort(key=lambda row: row.capacity.total_bytes)
        # Where a trace says no sizes, a byte stands for one expert.
        unit = MEGABYTE if own[0].has_sizes else 1
        sizes = [row.capacity.total_bytes / unit for row in own]
        name = Path(trace).name
        policy = own[0].policy
        label = f"{name}: {named} ({policy.eviction.name})"
        label += f", {machine}" if len({_series(row)[2] for row in rows}) > 1 else ""
        axes.plot(sizes, [row.metrics["miss_rate"] for row in own], marker="o", label=plain(label))
        for bound, style in ((LRU, ":"), (FEWEST, "--")):
            if (
                trace not in drawn
                and own[0].bounds
                and not (bound == LRU and policy.eviction.name == LRU)
            ):
                rates = [row.bounds[""][bound] for row in own]
                label = f"{name}: {bound}, on demand"
                axes.plot(sizes, rates, style, color="black", label=plain(label))
        drawn.add(trace)
    axes.set_xlabel("capacity of the cache [MB]" if rows[0].has_sizes else "capacity [experts]")
    axes.set_ylabel("miss rate [of requests]")
    axes.set_ylim(0, 1)
    axes.legend(fontsize="small")
    save(figure, path)


def _series(row: Row) -> tuple[str, str, str]:
    return row.trace, row.policy.name, _hardware(row)
