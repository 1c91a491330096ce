"""Replays of a trace under several configurations, with bounds to judge policies by."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from tqdm import tqdm

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.engine.bound import fewest_misses
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.regime import decode_waits, regime_of, s_mbu
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.harness.arguments import Config, read_config
from lm_eval_moecache.harness.run_report import idle_prefetch
from lm_eval_moecache.records.numbers import MOST_COUNT, read_count
from lm_eval_moecache.records.schemas.keys import MOST_READS, REPLAYED, keys_with
from lm_eval_moecache.records.sizes import Capacity, check_sized
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.report.replay_report import FEWEST, LRU, PHASES_SHOWN, Row
from lm_eval_moecache.sweep.pool import local_pool
from lm_eval_moecache.trace.file import StreamedTrace
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace, open_any
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.use import load_use

_ON_DEMAND = {"routing": "standard", "prefetch": "none", "miss": "fetch", "eviction": LRU}
_FORESEEING = ("prefetch", "eviction")
_PATIENCE_S = 2.0
"""Shorter replays show no progress bar."""
Progress = Callable[[int], object]
SETTINGS = keys_with(REPLAYED)
"""Keys of a live run that a replay accepts as well."""
LISTS = ("policy", *AXES, "hardware", "bandwidth", "capacity")
"""Keys that take lists, of which every combination is run, in the order of the table's rows:
capacities within machines within policies."""


def combinations(settings: Mapping[str, Any]) -> list[Config]:
    """Return every combination of the settings' values, without duplicates.

    Args:
        settings: `SETTINGS`, and parameters as `eviction.NAME`. Keys of `LISTS` may hold lists; an
            algorithm is a name, a class path, or a mapping of its name and parameters.
    """
    given = dict(settings)
    for key, least, most in (("seed", 0, MOST_COUNT), ("reads_per_expert", 1, MOST_READS)):
        if key in given:
            given[key] = read_count(key, given[key], least=least, most=most)
    # Read once for all configurations: a trace may be large.
    changes = {"warm": load_use(given.pop("warm")) if "warm" in given else None}
    changes |= {} if "seed" in given else {"seed": None}
    lists = {key: given.pop(key) for key in LISTS if key in given}
    values = [value if isinstance(value, (list, tuple)) else [value] for value in lists.values()]
    configs: dict[str, Config] = {}
    for each in itertools.product(*values):
        config = read_config({**given, **dict(zip(lists, each, strict=True))}, replayed=True)
        identity = config.policy.as_dict(), config.hardware, config.capacity
        configs.setdefault(repr(identity), config.with_changes(**changes))
    return list(configs.values())


def run_all(
    traces: Sequence[str | Trace],
    configs: Sequence[Config],
    *,
    expert_bytes: int | None = None,
    bound: bool = True,
    jobs: int = 1,
    show_progress: bool = False,
) -> list[Row]:
    """Replay each trace under each configuration, in this order; arguments as for `run_cells`.

    With `jobs` above 1, in processes that read a trace once for each part of its configurations.
    """
    options: dict[str, Any] = {"expert_bytes": expert_bytes, "bound": bound}
    indices = range(len(configs))
    jobs = min(jobs, len(traces) * len(configs))
    if jobs == 1:
        options["show_progress"] = show_progress
        return [row for trace in traces for row in run_cells(trace, configs, **options)]
    # Configurations of one capacity share their bounds: keep them together where jobs allow it.
    sizes = dict.fromkeys(config.capacity for config in configs)
    slices = -(-jobs // (len(traces) * len(sizes)))
    by_capacity = [[i for i in indices if configs[i].capacity == size] for size in sizes]
    config_slices = [part[turn::slices] for part in by_capacity for turn in range(slices)]
    work = [(i, trace, part) for i, trace in enumerate(traces) for part in config_slices if part]
    rows: dict[tuple[int, int], Row] = {}
    with local_pool(jobs) as submit:
        futures = submit(_run_part, work, configs, options)
        progress = tqdm(as_completed(futures), "parts", len(work), disable=not show_progress)
        for future in progress:
            place, _, part = futures[future]
            rows |= {(place, i): row for i, row in zip(part, future.result(), strict=True)}
    return [rows[place, i] for place in range(len(traces)) for i in indices]


def _run_part(
    part: tuple[int, str | Trace, Sequence[int]],
    configs: Sequence[Config],
    options: Mapping[str, Any],
) -> list[Row]:
    _, trace, indices = part
    return run_cells(trace, [configs[i] for i in indices], **options)


def run_cells(
    trace: str | Trace,
    configs: Sequence[Config],
    *,
    expert_bytes: int | None = None,
    bound: bool = True,
    show_progress: bool = False,
) -> list[Row]:
    """Replay a trace under each configuration, reading it once.

    Args:
        trace: Its file, or the trace itself.
        configs: The configurations; a `seed` of None takes the trace's own.
        expert_bytes: Size of one expert, for traces that do not give it.
        bound: Whether to add on-demand LRU's misses and the fewest possible.
        show_progress: Whether to show a progress bar, counting passes.
    """
    replays = Replays(trace, configs, expert_bytes, bound)
    bounds = len({config.capacity for config in configs}) if bound else 0
    with tqdm(
        total=replays.trace.num_passes * (len(configs) + bounds),
        desc=replays.trace.name,
        unit="pass",
        delay=_PATIENCE_S,
        disable=not show_progress,
    ) as bar:
        rows = [replays.row(config, bar.update) for config in configs]
        bar.refresh()
    return rows


def gap_closed(lru: float, policy: float, fewest: float) -> float | None:
    """Return the share of the gap from LRU to the bound that a policy closes; None if no gap."""
    return None if lru == fewest else (lru - policy) / (lru - fewest)


def victim_share(policy: int, fewest: int, fewest_bypassing: int) -> float | None:
    """Return the share of avoidable misses that better victims alone would save.

    The rest takes better admission as well. None where a policy misses no more than the bound for
    its kind, as it may with prefetching.
    """
    return (policy - fewest) / (policy - fewest_bypassing) if policy > fewest else None


class _Found(NamedTuple):
    """The metrics of one replay; `misses` counts late and absent requests."""

    metrics: dict[str, Any]
    regime: dict[str, Any]
    misses: int
    proposed: int


class Replays:
    """The replays of one trace, each setting once: a requested replay may serve as a bound, too."""

    def __init__(
        self,
        trace: str | Trace | StreamedTrace,
        configs: Sequence[Config],
        expert_bytes: int | None = None,
        bound: bool = False,
    ) -> None:
        policies = [config.policy for config in configs]
        self.bound = bound
        self._needs_future = bound or any(
            getattr(p, axis).algorithm.is_offline for p in policies for axis in _FORESEEING
        )
        self.file = trace if isinstance(trace, str) else trace.name
        if isinstance(trace, str):
            # A large trace in our format is streamed, unless a bound or an algorithm needs its
            # future.
            self.trace = (load_trace if self._needs_future else open_any)(
                trace,
                logits=any(
                    (p.eviction.algorithm.uses_weights and not p.is_lossless)
                    or any(getattr(p, axis).algorithm.uses_logits for axis in AXES)
                    for p in policies
                ),
                # Predictions take memory: load them only for algorithms that use them.
                predicted=any(
                    p.routing.algorithm.depth or p.prefetch.algorithm.is_active for p in policies
                ),
                expert_bytes=expert_bytes,
            )
        else:
            self.trace = trace
        # Without prefetching, hardware changes when experts arrive, but not which are missed.
        self._lru = configs[0].with_changes(policy=load_policy("on_demand", _ON_DEMAND))
        self._done: dict[str, _Found] = {}
        self._fewest: dict[tuple[Capacity, bool, bool], tuple[int, int]] = {}

    @cached_property
    def future(self) -> Future | None:
        """What the trace will need; None where nothing asks, which leaves the trace on disk."""
        if not self._needs_future:
            return None
        if isinstance(self.trace, StreamedTrace):
            self.trace = load_trace(str(self.trace.path), logits=True, predicted=True)
        return Future(self.trace)

    def setting(self, config: Config) -> Setting:
        """Return the engine's setting. Raises ValueError where the capacity needs unknown sizes."""
        if not self.trace.has_sizes and config.emulate is None:
            check_sized(config.capacity, self.trace.name)
        setting = config.setting(self.trace.geometry)
        return setting if config.seed is not None else replace(setting, seed=self.trace.seed)

    def replay(self, setting: Setting, **more: Any) -> Engine:
        """Replay the trace under a setting; return the engine, its integrity checked."""
        future, reset = self.future, self._lru.cache_reset
        engine = replay(self.trace, setting, future=future, cache_reset=reset, **more)
        engine.check_integrity()
        return engine

    def row(self, config: Config, on_progress: Progress) -> Row:
        """Replay the trace under this configuration; return its row, with bounds if requested."""
        setting, policy, emulate = self.setting(config), config.policy, config.emulate
        run = self._run(setting, on_progress)
        row = Row(
            trace=self.file,
            has_sizes=self.trace.has_sizes or emulate is not None,
            policy=policy,
            capacity=setting.capacity,
            hardware=config.hardware,
            metrics=run.metrics,
            cache_reset=config.cache_reset,
            warnings=tuple(idle_prefetch(policy, config.cache_reset, run.proposed)),
            regime=run.regime,
            emulates="" if emulate is None else emulate.name,
            warmed_by="" if setting.warm is None else setting.warm.name,
        )
        if not self.bound:
            return row
        on_demand = replace(self.setting(self._lru), capacity=setting.capacity)
        lru = self._run(on_demand, on_progress)
        bounds: dict[str, dict[str, float | None]] = {
            phase: {LRU: lru.metrics[f"{phase}miss_rate"]} for phase in PHASES_SHOWN
        }
        if not policy.routing.algorithm.is_lossless:
            # The fewest misses are those of the router's own choice of experts, not of another.
            return replace(row, bounds=bounds)
        for phase in PHASES_SHOWN:
            misses, requests = self._bound(on_demand, decode=bool(phase))
            bounds[phase][FEWEST] = misses / requests if requests else None
        fewest, requests = self._bound(on_demand)
        fewest_bypassing, _ = self._bound(on_demand, allow_bypass=True)
        return replace(
            row,
            bounds=bounds,
            gap_closed=gap_closed(lru.misses, run.misses, fewest),
            regret=(run.misses - fewest) / requests if requests else None,
            victim_share=victim_share(run.misses, fewest, fewest_bypassing),
        )

    def _run(self, setting: Setting, on_progress: Progress) -> _Found:
        policy, capacity, hardware = setting.policy, setting.capacity, setting.hardware
        axes = [getattr(policy, axis).as_dict() for axis in AXES]
        others = {f.name: getattr(setting, f.name) for f in fields(setting) if f.name != "policy"}
        key = repr((axes, policy.phases, others))
        if key in self._done:
            on_progress(self.trace.num_passes)
            return self._done[key]
        engine = self.replay(setting, on_progress=on_progress)
        passes, requests, geometry = engine.ledger.passes, engine.ledger.requests, engine.geometry
        regime = regime_of(geometry, capacity.total_bytes, hardware)
        figures = _Found(
            metrics=task_metrics(requests, engine.peak_cache_bytes)
            | {"s_mbu": s_mbu(requests, geometry, setting)},
            regime=regime.as_dict(decode_waits(requests, geometry.num_layers)),
            misses=sum(p.late + p.misses for p in passes),
            proposed=sum(p.predicted for p in passes),
        )
        return self._done.setdefault(key, figures)

    def _bound(
        self, setting: Setting, *, decode: bool = False, allow_bypass: bool = False
    ) -> tuple[int, int]:
        """Return the fewest misses, and the requests they count: all, or all but prefills'."""
        key = setting.capacity, decode, allow_bypass
        if key not in self._fewest:
            assert isinstance(self.trace, Trace), "a bound of a trace that is streamed"
            self._fewest[key] = fewest_misses(
                self.trace,
                setting,
                cache_reset=self._lru.cache_reset,
                free_prefill=decode,
                allow_bypass=allow_bypass,
            )
        return self._fewest[key]
