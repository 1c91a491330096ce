"""The output of `moecache replay`: its runs as JSON, a Markdown table.

Below: one replay as a timeline.
"""

from __future__ import annotations

import math
import shutil
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.policy import Policy, load_policy, policy_names, unmangle
from lm_eval_moecache.algorithms.registry import AXES, parameters_of
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.records.errors import MoECacheError
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.sizes import Capacity
from lm_eval_moecache.report.metrics import MEGABYTE
from lm_eval_moecache.report.tables.text import padded

LRU, FEWEST = "lru", "bound"
PHASES_SHOWN = ("", "decode_")


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
    """Settings that had no effect on this trace."""
    regime: dict[str, Any]
    """Only its `capacity_cycles` is meaningful where the trace gives no sizes."""
    cache_reset: str
    """Whether each request started anew (`request`), or found what others left (`never`)."""
    emulates: str = ""
    """The model whose sizes the layers were charged with; empty for the trace's own."""
    warmed_by: str = ""
    """The use profile that filled the cache at the start; empty for a cold cache."""
    bounds: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Phase ("" for all, `decode_`) -> miss rate of on-demand LRU (`lru`), and the lowest that any
    on-demand eviction can reach in that phase (`bound`; absent where a rule changes the routing).
    Empty unless requested."""
    gap_closed: float | None = None
    regret: float | None = None
    """Misses above the fewest possible / requests; negative where prefetching hides misses."""
    victim_share: float | None = None
    """Share of the misses above the optimum with bypassing (a cache that need not admit) that
    better victims would save; only better admission could save the rest."""

    @property
    def open_loop(self) -> bool:
        """Whether the policy changes routing: hidden states in the trace do not follow."""
        return not self.policy.is_lossless

    def as_dict(self) -> dict[str, Any]:
        """Return the replay as one of the `runs` that `moecache replay --json` prints."""
        return {
            "trace": self.trace,
            "policy": self.policy.name,
            "eviction": self.policy.eviction.name,
            "composition": self.policy.as_dict(),
            "open_loop": self.open_loop,
            "capacity": self.capacity.text,
            "capacity_bytes": self.capacity.total_bytes,
            "hardware": self.hardware.name,
            "link_bytes_per_s": self.hardware.link_bytes_per_s,
            # Where the trace gives no sizes, each expert counts one byte.
            "has_sizes": self.has_sizes,
            "emulate": self.emulates or None,
            "warm": self.warmed_by or None,
            "cache_reset": self.cache_reset,
            "regime": self.regime if self.has_sizes else None,
            "metrics": self.metrics,
            **{
                f"{name}_{phase}miss_rate": self.bounds.get(phase, {}).get(name)
                for phase in PHASES_SHOWN
                for name in (LRU, FEWEST)
            },
            "gap_closed": self.gap_closed,
            "regret": self.regret,
            "victim_share": self.victim_share,
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The rows of a replay, in the order given: one per trace and combination of the settings."""

    rows: Sequence[Row]
    in_full: bool = False
    """Whether its table has all columns."""

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the only row; MoECacheError where there are several."""
        if len(self.rows) != 1:
            raise MoECacheError(
                f"metrics: there are {len(self.rows)} replays. Allowed: `rows[i].metrics`, or "
                "`to_dataframe()`."
            )
        return self.rows[0].metrics

    def as_dict(self) -> dict[str, Any]:
        """Return what `moecache replay --json` prints."""
        return {"runs": [row.as_dict() for row in self.rows]}

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame of a line per row; nested metrics as `tpot_ms.p99`."""
        import pandas

        runs = [{**run, **run.pop("metrics")} for run in self.as_dict()["runs"]]
        return pandas.json_normalize(runs)

    def __str__(self) -> str:
        """Return the table that `moecache replay` prints."""
        return as_table(self.rows, in_full=self.in_full)


def _names(rows: Sequence[Row]) -> list[str]:
    """Return each row's policy, with the parameters that distinguish rows of one name.

    And those that are neither the shipped composition's own nor, of an algorithm that replaces one
    of its, the defaults.
    """
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        for key, value, _ in _parameters(row.policy):
            values[row.policy.name, key].add(str(value))
    names = []
    for row in rows:
        name = row.policy.name
        shown = [
            f"{key}={value}"
            for key, value, is_usual in _parameters(row.policy)
            if len(values[name, key]) > 1 or not is_usual
        ]
        names.append(f"{name} ({', '.join(shown)})" if shown else name)
    return names


def _parameters(policy: Policy) -> Iterator[tuple[str, Any, bool]]:
    """Yield each parameter's key, its value, and whether that goes without saying."""
    is_shipped = policy.composition in policy_names()
    composed = load_policy(policy.composition) if is_shipped else policy
    for axis in AXES:
        choice, own = getattr(policy, axis), getattr(composed, axis)
        usual = own.parameters
        if choice.name != own.name:
            usual = {n: p.default for n, p in parameters_of(choice.algorithm).items()}
        for name, value in choice.parameters.items():
            yield f"{axis}.{unmangle(name)}", value, bool(value == usual[name])


def _hardware(row: Row) -> str:
    return f"{row.hardware.name} at {row.hardware.link_bytes_per_s / 1e9:g} GB/s"


# Heading, a row's value, format; `~` marks values that depend on the expert size.
_COLUMNS: tuple[tuple[str, Callable[[Row], Any], str], ...] = (
    ("Capacity", lambda row: row.capacity.text, "{}"),
    ("Cycles", lambda row: row.regime["capacity_cycles"], "{:.2f}"),
    ("MB", lambda row: row.capacity.total_bytes / MEGABYTE, "~{:.1f}"),
    ("Hit", lambda row: row.metrics["hit_rate"], "{:.4f}"),
    ("Miss", lambda row: row.metrics["miss_rate"], "{:.4f}"),
    ("LRU miss", lambda row: row.bounds.get("", {}).get(LRU), "{:.4f}"),
    ("Fewest", lambda row: row.bounds.get("", {}).get(FEWEST), "{:.4f}"),
    ("Gap closed", lambda row: row.gap_closed, "{:.3f}"),
    ("Regret", lambda row: row.regret, "{:.4f}"),
    ("Victims", lambda row: row.victim_share, "{:.3f}"),
    ("Decode miss", lambda row: row.metrics["decode_miss_rate"], "{:.4f}"),
    ("LRU decode", lambda row: row.bounds.get("decode_", {}).get(LRU), "{:.4f}"),
    ("Fewest decode", lambda row: row.bounds.get("decode_", {}).get(FEWEST), "{:.4f}"),
    ("Fidelity", lambda row: row.metrics["routing_fidelity"], "{:.4f}"),
    ("MB read", lambda row: row.metrics["bytes_moved"] / MEGABYTE, "~{:.1f}"),
    ("TPOT ms", lambda row: (row.metrics.get("tpot_ms") or {}).get("mean"), "~{:.3f}"),
    ("tok/s", lambda row: row.metrics["tok_per_s"], "~{:.1f}"),
    ("Stall ms/tok", lambda row: row.metrics["stall_ms_per_token"], "~{:.3f}"),
    ("Transfer/layer", lambda row: row.regime.get("transfer_per_layer"), "~{:.3g}"),
    ("Bound", lambda row: row.regime.get("bound"), "~{}"),
)
_SHORT = ("Capacity", "Miss", "Fewest", "Decode miss", "Fidelity", "TPOT ms", "tok/s")


def as_table(rows: Sequence[Row], in_full: bool = False) -> str:
    """Return a Markdown table, one row per replay, under a title with what all rows share.

    The short form fits a terminal; `in_full` has every column.
    """
    has_bounds, first = any(row.bounds for row in rows), rows[0]
    # Columns of the short form only where they say something.
    useless = {"Fewest": not has_bounds, "Fidelity": not any(row.open_loop for row in rows)}
    names: dict[str, list[str]] = {
        "Trace": [Path(row.trace).name for row in rows],
        "Policy": _names(rows),
        "Hardware": [_hardware(row) for row in rows],
    }
    columns = {head: cells for head, cells in names.items() if in_full or len(set(cells)) > 1}
    axes = {
        row.policy.name: " + ".join(getattr(row.policy, axis).name for axis in AXES) for row in rows
    }
    # What a name stands for, where it is not the names of its parts.
    named = [f"{name}: {parts}" for name, parts in axes.items() if " + " not in name]
    shared = {
        "Hardware": f"hardware: {_hardware(first)}",
        "Trace": Path(first.trace).name,
        "Policy": f"{names['Policy'][0]}: {axes[first.policy.name]}",
        "": f"emulated model: {first.emulates}" if first.emulates else "",
        "warm": f"warmed by: {first.warmed_by}" if first.warmed_by else "",
        # One value for all: it is no list.
        "reset": "" if first.cache_reset == "request" else f"cache_reset: {first.cache_reset}",
    }
    parts = [text for head, text in shared.items() if text and head not in columns]
    parts += named if "Policy" in columns else []
    title = f"moecache replay ({', '.join(parts)})" if parts else "moecache replay"
    for head, read, form in _COLUMNS:
        if in_full or (head in _SHORT and not useless.get(head)):
            values = [read(row) if row.has_sizes or form[0] != "~" else None for row in rows]
            spec = form.removeprefix("~")
            columns[head] = ["" if value is None else spec.format(value) for value in values]

    notes = []
    if any(row.open_loop for row in rows):
        notes.append(
            "open loop: the policy changes the routing, but a replay keeps the recorded hidden "
            "states. For exact figures run the model."
        )
    if any(row.metrics.get(name) for row in rows for name in ("avoided_miss_share", "host_share")):
        notes.append(
            "Miss counts every absent expert, also those that were dropped, replaced or computed "
            "by the host; MB read (--all) shows what was loaded."
        )
    if not all(row.has_sizes for row in rows):
        notes.append(
            "Bytes and times need the size of an expert, which the trace lacks: give "
            "--expert_bytes."
        )
    notes += dict.fromkeys(f"Warning: {text}" for row in rows for text in row.warnings)
    if has_bounds:
        notes.append(
            "Fewest: a lower bound for evictions without prefetching (Belady, if events fit)."
        )
    if any(row.bounds and FEWEST not in row.bounds[""] for row in rows):
        notes.append("Fewest is empty where a rule changes the routing: it has other misses.")
    table = padded(list(columns), [*zip(*columns.values(), strict=True)])
    width = max(shutil.get_terminal_size((80, 24)).columns, 40)
    return "\n".join([*textwrap.wrap(title, width), table, *notes])


# --- a replay as a timeline of compute, link and host, in the Trace Event format ---

PASSES, COMPUTE, LINK, HOST = TRACKS = ("passes", "compute", "link", "host")


class Timeline:
    """Records a replay as events of the Trace Event format.

    Requests that start anew, each at time 0, stand one behind the other.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._starts_s: list[float] = []
        self._end_s = 0.0
        for index, name in enumerate(TRACKS):
            self._add("thread_name", "M", index, args={"name": name})
            self._add("thread_sort_index", "M", index, args={"sort_index": index})

    def _add(self, name: str, kind: str, track: int, **rest: Any) -> None:
        self.events.append({"name": name, "ph": kind, "pid": 1, "tid": track, **rest})

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Add a span of the latest engine's time to a track, unless it has no duration."""
        if end_s > start_s:
            offset_s = self._starts_s[-1]
            self._end_s = max(self._end_s, offset_s + end_s)
            times = {"ts": (offset_s + start_s) * 1e6, "dur": (end_s - start_s) * 1e6}
            self._add(name, "X", TRACKS.index(track), cat=track, **times, args=args)

    def watch(self, engine: Engine) -> None:
        """Record what the engine's clock, link and host do from now on, behind all so far."""
        self._starts_s.append(self._end_s)
        engine.callbacks.record_spans(self._add_span)

    def _add_span(self, kind: str, start_s: float, end_s: float, what: int, number: int) -> None:
        if kind in ("dense", "experts"):
            counted = "tokens" if kind == "dense" else "experts"
            self.span(COMPUTE, kind, start_s, end_s, layer=what, **{counted: number})
        elif kind in ("wait", "stall", "wake"):
            self.span(COMPUTE, kind, start_s, end_s)
        elif kind == "host":
            self.span(HOST, "experts", start_s, end_s, layer=what)
        elif kind == "transfer" and number >= 0:
            self.span(LINK, "prefetch", start_s, end_s, bytes=what, key=number)
        else:
            self.span(LINK, "loads" if kind == "loads" else "load", start_s, end_s, bytes=what)

    def as_dict(self, engine: Engine) -> dict[str, Any]:
        """Return the file's content, including the passes of the engine's ledger."""
        starts_s, last_s = iter(dict.fromkeys(self._starts_s)), math.inf
        for record in engine.ledger.passes:
            if record.start_s <= last_s:  # another engine's first pass
                self._starts_s.append(next(starts_s))
            last_s = record.start_s
            args = {"tokens": record.num_tokens, "misses": record.misses, "late": record.late}
            self.span(PASSES, record.phase, record.start_s, record.end_s, **args)
        return {"traceEvents": self.events, "displayTimeUnit": "ms"}
