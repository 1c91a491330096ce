"""Replays traces at several capacities, with the bounds that say how good a policy is.

Below: how `moecache replay` prints its runs, as JSON and as a Markdown table, draws them, and
writes one as a timeline.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from lm_eval_moecache.algorithms.policy import Policy, check_cache_form, load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.engine.bound import fewest_misses
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.host import HostStage
from lm_eval_moecache.engine.regime import decode_waits, regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import FLAT, PRIORITY, TOGETHER, Setting
from lm_eval_moecache.engine.virtual.executor import VirtualExecutor
from lm_eval_moecache.engine.virtual.link import VirtualClock, VirtualLink
from lm_eval_moecache.records.artifact import UseProfile
from lm_eval_moecache.records.emulation import RealModel
from lm_eval_moecache.records.event import Event, Fetch
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.sizes import (
    Capacity,
    check_capacity,
    check_sized,
    is_per_layer,
    parse_capacity,
)
from lm_eval_moecache.report.metrics import MEGABYTE, task_metrics
from lm_eval_moecache.report.plots import new_figure, plain, save
from lm_eval_moecache.report.tables import padded
from lm_eval_moecache.trace.file import StreamedTrace
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace, open_any
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.use import placement

LRU, FEWEST = "lru", "bound"
PHASES_SHOWN = ("", "decode_")
_PICTURES = (".svg", ".png", ".pdf")
_ON_DEMAND = {"routing": "standard", "prefetch": "none", "miss": "fetch"}
_FORESEEING = ("prefetch", "eviction")
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
    regime: dict[str, Any]
    """Of it only `capacity_cycles` means something where the trace says no sizes."""
    emulates: str = ""
    """The model whose sizes the layers were charged as."""
    uncompiled: str = ""
    """Why the replay went event by event, and so is slower; empty where a compiled loop did it."""
    warmed_by: str = ""
    """The profile of use that the caches began with."""
    bounds: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Phase ("" for all, `decode_`) -> on-demand LRU's miss rate, and the one that no eviction on
    demand goes below in that phase; empty where not asked for."""
    closeness: float | None = None
    regret: float | None = None
    """Misses above the fewest, of all requests; below 0 where a prefetch hides them."""
    victim_share: float | None = None
    """Of the misses above the fewest of a cache that may turn experts away, too, what better
    victims would save; the rest is what only a choice of whom to admit could."""

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
    for text in setting.capacities:
        check_capacity(text)
        for policy in setting.policies:
            check_cache_form(policy, is_per_layer(text))
    if setting.seed is not None and setting.seed < 0:
        raise ValueError(f"seed={setting.seed} must be a whole number of 0 or more.")
    return [*product(setting.policies, setting.hardwares, setting.capacities)]


def run_cells(
    file: str, setting: SweepSetting, cells: Sequence[Cell], show_progress: bool = False
) -> list[Row]:
    """Replay a trace as these cells, in one reading of it."""
    replays = _Replays(file, setting)
    bounds = len({capacity for *_, capacity in cells}) if setting.bound else 0
    with tqdm(
        total=replays.trace.num_passes * (len(cells) + bounds),
        desc=replays.trace.name,
        unit="pass",
        delay=_PATIENCE_S,
        disable=not show_progress,
    ) as bar:
        rows = [replays.row(cell, bar.update) for cell in cells]
        bar.refresh()
    return rows


def one_replay(
    files: Sequence[str], setting: SweepSetting
) -> tuple[Trace | StreamedTrace, Setting, Future | None]:
    """Return what is replayed where it is a single replay; ValueError where it is more."""
    cells = cells_of(setting)
    if len(files) != 1 or len(cells) != 1:
        raise ValueError(
            "timeline: a timeline is of one replay. Give one trace, policy, capacity and hardware."
        )
    replays = _Replays(files[0], replace(setting, bound=False))
    policy, hardware, text = cells[0]
    found = replays.setting_of(policy, replays.capacity(policy, text), hardware)
    return replays.trace, found, replays.future


def closeness(lru: float, policy: float, fewest: float) -> float | None:
    """How much of the way from LRU to the bound a policy goes; None where there is no way."""
    return None if lru == fewest else (lru - policy) / (lru - fewest)


def victim_share(policy: int, fewest: int, turning_away: int) -> float | None:
    """Return what better victims would save, of what better victims and admission would.

    None where a policy has no more misses than the bound of its own kind, as with prefetch.
    """
    return (policy - fewest) / (policy - turning_away) if policy > fewest else None


class _Found(NamedTuple):
    """What a replay came to: `misses` are late and absent requests."""

    metrics: dict[str, Any]
    regime: dict[str, Any]
    misses: int
    proposed: int
    uncompiled: str


class _Replays:
    """The replays of one trace, each setting once: a bound may be what was asked for."""

    def __init__(self, file: str, setting: SweepSetting) -> None:
        policies = setting.policies
        offline = any(getattr(p, a).algorithm.is_offline for p in policies for a in _FORESEEING)
        foresees = setting.bound or offline
        # A large trace of our own is streamed, unless something has to know its future.
        self.trace: Trace | StreamedTrace = (load_trace if foresees else open_any)(
            file,
            logits=any(
                (p.eviction.algorithm.uses_weights and not p.is_lossless)
                or any(getattr(p, axis).algorithm.uses_logits for axis in AXES)
                for p in policies
            ),
            # Only then are a trace's predictions worth the memory.
            predicted=any(
                p.routing.algorithm.depth or p.prefetch.algorithm.is_active for p in policies
            ),
            expert_bytes=setting.expert_bytes,
        )
        self.file, self.setting = file, setting
        self.future = Future(self.trace) if foresees and isinstance(self.trace, Trace) else None
        self.lru = load_policy("on_demand", _ON_DEMAND | {"eviction": LRU})
        self._done: dict[str, _Found] = {}
        self._fewest: dict[tuple[Capacity, bool, bool], tuple[int, int]] = {}

    def capacity(self, policy: Policy, text: str) -> Capacity:
        own, emulate = self.trace.geometry, self.setting.emulate
        if not self.trace.has_sizes and emulate is None:
            check_sized(text, self.trace.name, "--expert_bytes")
        charged = own if emulate is None else emulate.emulated_by(own)
        return parse_capacity(text, charged, per_layer=policy.per_layer)

    def setting_of(self, policy: Policy, capacity: Capacity, hardware: Hardware) -> Setting:
        asked = self.setting
        return Setting(
            policy=policy,
            capacity=capacity,
            hardware=hardware,
            seed=self.trace.seed if asked.seed is None else asked.seed,
            emulate=asked.emulate,
            link=asked.link,
            execute=asked.execute,
            reads_per_expert=asked.reads_per_expert,
            attention=asked.attention,
            warm=placement(policy, asked.warm, self.trace.geometry),
        )

    def row(self, cell: Cell, on_progress: Callable[[int], object]) -> Row:
        policy, hardware, text = cell
        capacity = self.capacity(policy, text)
        own = self._run(policy, capacity, hardware, on_progress)
        emulate = self.setting.emulate
        warm = placement(policy, self.setting.warm, self.trace.geometry)
        idle = ""
        if policy.prefetch.algorithm.is_active and not own.proposed:
            idle = "nothing of this trace made it propose an expert"
            if policy.prefetch.name == "history":
                requests = len(self.trace.requests)
                idle = f"it learns from earlier requests, and the trace has {requests}"
        row = Row(
            trace=self.file,
            has_sizes=self.trace.has_sizes or emulate is not None,
            policy=policy,
            capacity=capacity,
            hardware=hardware,
            metrics=own.metrics,
            warnings=(f"prefetch={policy.prefetch.name} did nothing: {idle}.",) if idle else (),
            regime=own.regime,
            emulates="" if emulate is None else emulate.name,
            uncompiled=own.uncompiled,
            warmed_by="" if warm is None else warm.name,
        )
        if not self.setting.bound:
            return row
        # Nothing is prefetched, so the machine says when and not what.
        lru = self._run(self.lru, capacity, self.setting.hardwares[0], on_progress)
        bounds: dict[str, dict[str, float | None]] = {}
        for phase in PHASES_SHOWN:
            misses, requests = self._bound(capacity, decode=bool(phase))
            rate = misses / requests if requests else None
            bounds[phase] = {LRU: lru.metrics[f"{phase}miss_rate"], FEWEST: rate}
        fewest, requests = self._bound(capacity)
        least, _ = self._bound(capacity, turns_away=True)
        return replace(
            row,
            bounds=bounds,
            closeness=closeness(lru.misses, own.misses, fewest),
            regret=(own.misses - fewest) / requests if requests else None,
            victim_share=victim_share(own.misses, fewest, least),
        )

    def _run(
        self,
        policy: Policy,
        capacity: Capacity,
        hardware: Hardware,
        on_progress: Callable[[int], object],
    ) -> _Found:
        axes = [getattr(policy, axis).as_dict() for axis in AXES]
        key = repr((axes, policy.phases, capacity, hardware))
        if key in self._done:
            on_progress(self.trace.num_passes)
            return self._done[key]
        engine = replay(
            self.trace,
            self.setting_of(policy, capacity, hardware),
            future=self.future,
            cache_reset=self.setting.cache_reset,
            on_progress=on_progress,
        )
        engine.check_integrity()
        passes, requests, geometry = engine.ledger.passes, engine.ledger.requests, engine.geometry
        regime = regime_of(geometry, capacity.total_bytes, hardware)
        found = _Found(
            metrics=task_metrics(requests, engine.peak_cache_bytes),
            regime=regime.as_dict(decode_waits(requests, geometry.num_layers)),
            misses=sum(p.late + p.misses for p in passes),
            proposed=sum(p.predicted for p in passes),
            uncompiled=engine.uncompiled,
        )
        return self._done.setdefault(key, found)

    def _bound(
        self, capacity: Capacity, *, decode: bool = False, turns_away: bool = False
    ) -> tuple[int, int]:
        """Return the bound on misses, and the requests it is of: all, or those after prefills."""
        key = capacity, decode, turns_away
        if key not in self._fewest:
            assert isinstance(self.trace, Trace), "a bound of a trace that is streamed"
            self._fewest[key] = fewest_misses(
                self.trace,
                self.setting_of(self.lru, capacity, self.setting.hardwares[0]),
                cache_reset=self.setting.cache_reset,
                free_prefill=decode,
                turns_away=turns_away,
            )
        return self._fewest[key]


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
                "regime": row.regime if row.has_sizes else None,
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


def _hardware(row: Row) -> str:
    return f"{row.hardware.name} at {row.hardware.link_bytes_per_s / 1e9:g} GB/s"


# What heads a column, a row's figure, its form; `~` marks what has to know an expert's size.
_COLUMNS: tuple[tuple[str, Callable[[Row], Any], str], ...] = (
    ("Capacity", lambda row: row.capacity.text, "{}"),
    ("Cycles", lambda row: row.regime["capacity_cycles"], "{:.2f}"),
    ("MB", lambda row: row.capacity.total_bytes / MEGABYTE, "~{:.1f}"),
    ("Hit", lambda row: row.metrics["hit_rate"], "{:.4f}"),
    ("Miss", lambda row: row.metrics["miss_rate"], "{:.4f}"),
    ("LRU miss", lambda row: row.bounds.get("", {}).get(LRU), "{:.4f}"),
    ("Fewest", lambda row: row.bounds.get("", {}).get(FEWEST), "{:.4f}"),
    ("Closeness", lambda row: row.closeness, "{:.3f}"),
    ("Regret", lambda row: row.regret, "{:.4f}"),
    ("Victims", lambda row: row.victim_share, "{:.3f}"),
    ("Decode miss", lambda row: row.metrics["decode_miss_rate"], "{:.4f}"),
    ("LRU decode", lambda row: row.bounds.get("decode_", {}).get(LRU), "{:.4f}"),
    ("Fewest decode", lambda row: row.bounds.get("decode_", {}).get(FEWEST), "{:.4f}"),
    ("MB read", lambda row: row.metrics["bytes_moved"] / MEGABYTE, "~{:.1f}"),
    ("TPOT ms", lambda row: (row.metrics.get("tpot_ms") or {}).get("mean"), "~{:.3f}"),
    ("tok/s", lambda row: row.metrics["tok_per_s"], "~{:.1f}"),
    ("Stall ms/tok", lambda row: row.metrics["stall_ms_per_token"], "~{:.3f}"),
    ("Transfer/layer", lambda row: row.regime.get("transfer_per_layer"), "~{:.3g}"),
    ("Bound", lambda row: row.regime.get("bound"), "~{}"),
)
_SHORT = ("Capacity", "Miss", "Fewest", "Decode miss", "TPOT ms", "tok/s")


def as_table(rows: Sequence[Row], in_full: bool = False) -> str:
    """Return a Markdown table, one row per replay; what all rows share stands above it.

    Short, it fits a terminal; in full, it has every column.
    """
    has_bounds, first = any(row.bounds for row in rows), rows[0]
    names: dict[str, list[str]] = {
        "Trace": [Path(row.trace).name for row in rows],
        "Policy": [row.policy.name for row in rows],
        "Hardware": [_hardware(row) for row in rows],
    }
    columns = {head: cells for head, cells in names.items() if in_full or len(set(cells)) > 1}
    axes = " + ".join(getattr(first.policy, axis).name for axis in AXES)
    shared = {
        "Trace": Path(first.trace).name,
        "Policy": f"{first.policy.name}: {axes}",
        "": f"layers charged as: {first.emulates}" if first.emulates else "",
        "warm": f"warmed by: {first.warmed_by}" if first.warmed_by else "",
        "Hardware": f"hardware: {_hardware(first)}",
    }
    parts = [text for head, text in shared.items() if text and head not in columns]
    title = f"moecache replay ({', '.join(parts)})" if parts else "moecache replay"
    for head, of, form in _COLUMNS:
        if in_full or (head in _SHORT and (head != "Fewest" or has_bounds)):
            values = [of(row) if row.has_sizes or form[0] != "~" else None for row in rows]
            shown = form.removeprefix("~")
            columns[head] = ["" if value is None else shown.format(value) for value in values]

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
    if has_bounds:
        notes.append("Fewest: no eviction on demand misses less (Belady, where all events fit).")
    table = padded(list(columns), [*zip(*columns.values(), strict=True)])
    width = max(shutil.get_terminal_size((80, 24)).columns, 40)
    return "\n".join([*textwrap.wrap(title, width), table, *notes])


def plot_miss_rates(rows: Sequence[Row], file: str) -> None:
    """Write one line per trace for the policy, and one for each bound."""
    path = Path(file)
    if path.suffix not in _PICTURES:
        raise ValueError(
            f"plot={file!r}: the suffix {path.suffix!r} is not known. Allowed: "
            f"{', '.join(_PICTURES)}."
        )
    series: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.capacity.total_bytes):
        series.setdefault((row.trace, row.policy.name, _hardware(row)), []).append(row)
    many = len({machine for *_, machine in series}) > 1
    figure, (axes,) = new_figure()
    drawn: set[str] = set()
    for place in dict.fromkeys((row.trace, row.policy.name, _hardware(row)) for row in rows):
        (trace, named, machine), own = place, series[place]
        # Where a trace says no sizes, a byte stands for one expert.
        unit = MEGABYTE if own[0].has_sizes else 1
        sizes = [row.capacity.total_bytes / unit for row in own]
        name, eviction = Path(trace).name, own[0].policy.eviction.name
        label = f"{name}: {named} ({eviction}){f', {machine}' if many else ''}"
        axes.plot(sizes, [row.metrics["miss_rate"] for row in own], marker="o", label=plain(label))
        for bound, style in ((LRU, ":"), (FEWEST, "--")):
            if trace not in drawn and own[0].bounds and not bound == eviction == LRU:
                rates = [row.bounds[""][bound] for row in own]
                label = plain(f"{name}: {bound}, on demand")
                axes.plot(sizes, rates, style, color="black", label=label)
        drawn.add(trace)
    axes.set_xlabel("capacity of the cache [MB]" if rows[0].has_sizes else "capacity [experts]")
    axes.set_ylabel("miss rate [of requests]")
    axes.set_ylim(0, 1)
    axes.legend(fontsize="small")
    save(figure, path)


# --- a replay as a timeline: what compute, link and host did, in the Trace Event format ---

PASSES, COMPUTE, LINK, HOST = TRACKS = ("passes", "compute", "link", "host")


class Timeline:
    """Collects what happens, as events of the Trace Event format."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        for index, name in enumerate(TRACKS):
            self._add("thread_name", "M", index, args={"name": name})
            self._add("thread_sort_index", "M", index, args={"sort_index": index})

    def _add(self, name: str, kind: str, track: int, **rest: Any) -> None:
        self.events.append({"name": name, "ph": kind, "pid": 1, "tid": track, **rest})

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Add something that took time; what took none is left out."""
        if end_s > start_s:
            times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
            self._add(name, "X", TRACKS.index(track), cat=track, **times, args=args)

    def watch(self, engine: Engine) -> None:
        """Let the engine's clock, link and host tell what they do, from now on.

        They stay the objects that everybody holds: only their class changes, to one that tells.
        """
        executor = engine.executor
        assert isinstance(executor, VirtualExecutor), "only virtual time has a timeline"
        parts: list[tuple[Any, type]] = [(executor.clock, _TellingClock)]
        parts += [(executor.link, _TellingLink), (executor._host, _TellingHost)]
        for part, telling in parts:
            if part is not None:
                part.__class__ = telling
                part.timeline = self

    def as_dict(self, engine: Engine) -> dict[str, Any]:
        """Return the file's content, the passes of the engine's ledger among it."""
        for record in engine.ledger.passes:
            args = {"tokens": record.num_tokens, "misses": record.misses, "late": record.late}
            self.span(PASSES, record.phase, record.start_s, record.end_s, **args)
        return {"traceEvents": self.events, "displayTimeUnit": "ms"}


class _TellingClock(VirtualClock):
    timeline: Timeline

    def wait_until(self, time_s: float) -> float:
        start_s = self.now
        waited_s = super().wait_until(time_s)
        self.timeline.span(COMPUTE, "wait", start_s, self.now)
        return waited_s

    def await_link(self, time_s: float) -> float:
        start_s = self.now
        # Not by `wait_until` of this class: it is one span, and another kind.
        stall_s = max(time_s - start_s, 0.0)
        if stall_s:
            self.now = time_s
            self.timeline.span(COMPUTE, "stall", start_s, time_s)
            self.now += self.wait_overhead_s
            self.timeline.span(COMPUTE, "wake", time_s, self.now)
        return stall_s

    def dense(self, layer: int, num_tokens: int) -> None:
        start_s = self.now
        super().dense(layer, num_tokens)
        self.timeline.span(COMPUTE, "dense", start_s, self.now, layer=layer, tokens=num_tokens)

    def experts(self, layer: int, num_experts: int, *how: Any, **more: Any) -> None:
        start_s = self.now
        super().experts(layer, num_experts, *how, **more)
        self.timeline.span(COMPUTE, "experts", start_s, self.now, layer=layer, experts=num_experts)


class _TellingLink(VirtualLink):
    timeline: Timeline
    _starting: int | None = None

    def start(self, key: int, nbytes: int, now: float) -> None:
        self._starting = key
        super().start(key, nbytes, now)
        self._starting = None

    def transfer(self, nbytes: int, now: float, joins: bool = False) -> float:
        start_s, key = max(now, self.busy_until), self._starting
        end_s = super().transfer(nbytes, now, joins)
        name, args = ("load", {}) if key is None else ("prefetch", {"key": key})
        self.timeline.span(LINK, name, start_s, end_s, bytes=nbytes, **args)
        return end_s

    def batch(self, sizes: Sequence[int], now: float) -> list[list[float]]:
        start_s = max(now, self.busy_until)
        landed = super().batch(sizes, now)
        self.timeline.span(LINK, "loads", start_s, self.busy_until, bytes=sum(sizes))
        return landed


class _TellingHost(HostStage):
    timeline: Timeline

    def begin(
        self, event: Event, fetches: Sequence[Fetch], record: PassRecord
    ) -> tuple[Event, Sequence[Fetch]]:
        before_s = record.host_s
        found = super().begin(event, fetches, record)
        worked_s = record.host_s - before_s
        begun_s = self.busy_until - worked_s
        self.timeline.span(HOST, "experts", begun_s, self.busy_until, layer=event.layer)
        return found


def write_timeline(files: Sequence[str], setting: SweepSetting, path: str) -> None:
    """Replay the one trace under the one setting, and write its timeline.

    Raises ValueError where there are several.
    """
    trace, replayed, future = one_replay(files, setting)
    timeline, reset = Timeline(), setting.cache_reset
    engine = replay(trace, replayed, future=future, cache_reset=reset, on_engine=timeline.watch)
    write_whole(Path(path), json.dumps(timeline.as_dict(engine)))
