"""Replays of a trace under several configurations, with bounds to judge policies by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from tqdm import tqdm

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.engine.bound import fewest_misses
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.regime import decode_waits, regime_of
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.records.sizes import Capacity, check_sized
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.report.replays import FEWEST, LRU, PHASES_SHOWN, Row
from lm_eval_moecache.trace.file import StreamedTrace
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace, open_any
from lm_eval_moecache.trace.trace import Trace

_ON_DEMAND = {"routing": "standard", "prefetch": "none", "miss": "fetch", "eviction": LRU}
_FORESEEING = ("prefetch", "eviction")
_PATIENCE_S = 2.0
"""Shorter replays show no progress bar."""
Progress = Callable[[int], object]


def run_cells(
    file: str,
    configs: Sequence[Config],
    *,
    expert_bytes: int | None = None,
    bound: bool = True,
    show_progress: bool = False,
) -> list[Row]:
    """Replay a trace under each configuration, reading it once.

    Args:
        file: The trace.
        configs: The configurations; a `seed` of None takes the trace's own.
        expert_bytes: Size of one expert, for traces that do not give it.
        bound: Whether to add on-demand LRU's misses and the fewest possible.
        show_progress: Whether to show a progress bar, counting passes.
    """
    replays = Replays(file, configs, expert_bytes, bound)
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


def closeness(lru: float, policy: float, fewest: float) -> float | None:
    """Return the share of the gap from LRU to the bound that a policy closes; None if no gap."""
    return None if lru == fewest else (lru - policy) / (lru - fewest)


def victim_share(policy: int, fewest: int, turning_away: int) -> float | None:
    """Return the share of avoidable misses that better victims alone would save.

    The rest takes better admission as well. None where a policy misses no more than the bound for
    its kind, as it may with prefetching.
    """
    return (policy - fewest) / (policy - turning_away) if policy > fewest else None


class _Found(NamedTuple):
    """The figures of one replay; `misses` counts late and absent requests."""

    metrics: dict[str, Any]
    regime: dict[str, Any]
    misses: int
    proposed: int
    uncompiled: str


class Replays:
    """The replays of one trace, each setting once: a requested replay may serve as a bound, too."""

    def __init__(
        self, file: str, configs: Sequence[Config], expert_bytes: int | None, bound: bool
    ) -> None:
        policies = [config.policy for config in configs]
        is_offline = any(getattr(p, a).algorithm.is_offline for p in policies for a in _FORESEEING)
        # A large trace in our format is streamed, unless a bound or an algorithm needs its future.
        self.trace: Trace | StreamedTrace = (load_trace if bound or is_offline else open_any)(
            file,
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
        self.file, self.bound = file, bound
        has_future = (bound or is_offline) and isinstance(self.trace, Trace)
        self.future = Future(self.trace) if has_future else None  # type: ignore[arg-type]
        # Without prefetching, hardware changes when experts arrive, but not which are missed.
        self._lru = configs[0].with_changes(policy=load_policy("on_demand", _ON_DEMAND))
        self._done: dict[str, _Found] = {}
        self._fewest: dict[tuple[Capacity, bool, bool], tuple[int, int]] = {}

    def setting(self, config: Config) -> Setting:
        """Return the engine's setting. Raises ValueError where the capacity needs unknown sizes."""
        if not self.trace.has_sizes and config.emulate is None:
            check_sized(config.capacity, self.trace.name, "--expert_bytes")
        setting = config.setting(self.trace.geometry)
        return setting if config.seed is not None else replace(setting, seed=self.trace.seed)

    def replay(self, setting: Setting, **more: Any) -> Engine:
        """Replay the trace under a setting; return the engine, its integrity checked."""
        reset = self._lru.cache_reset
        engine = replay(self.trace, setting, future=self.future, cache_reset=reset, **more)
        engine.check_integrity()
        return engine

    def row(self, config: Config, on_progress: Progress) -> Row:
        """Replay the trace under this configuration; return its row, with bounds if requested."""
        setting, policy, emulate = self.setting(config), config.policy, config.emulate
        run, reason = self._run(setting, on_progress), ""
        if policy.prefetch.algorithm.is_active and not run.proposed:
            reason = "nothing of this trace made it propose an expert"
            if policy.prefetch.name == "history":
                requests = len(self.trace.requests)
                reason = f"it learns from earlier requests, and the trace has {requests}"
        row = Row(
            trace=self.file,
            has_sizes=self.trace.has_sizes or emulate is not None,
            policy=policy,
            capacity=setting.capacity,
            hardware=config.hardware,
            metrics=run.metrics,
            warnings=(f"prefetch={policy.prefetch.name} did nothing: {reason}.",) if reason else (),
            regime=run.regime,
            emulates="" if emulate is None else emulate.name,
            uncompiled=run.uncompiled,
            warmed_by="" if setting.warm is None else setting.warm.name,
        )
        if not self.bound:
            return row
        on_demand = replace(self.setting(self._lru), capacity=setting.capacity)
        lru = self._run(on_demand, on_progress)
        bounds: dict[str, dict[str, float | None]] = {}
        for phase in PHASES_SHOWN:
            misses, requests = self._bound(on_demand, decode=bool(phase))
            rate = misses / requests if requests else None
            bounds[phase] = {LRU: lru.metrics[f"{phase}miss_rate"], FEWEST: rate}
        fewest, requests = self._bound(on_demand)
        fewest_bypassing, _ = self._bound(on_demand, turns_away=True)
        return replace(
            row,
            bounds=bounds,
            closeness=closeness(lru.misses, run.misses, fewest),
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
            metrics=task_metrics(requests, engine.peak_cache_bytes),
            regime=regime.as_dict(decode_waits(requests, geometry.num_layers)),
            misses=sum(p.late + p.misses for p in passes),
            proposed=sum(p.predicted for p in passes),
            uncompiled=engine.uncompiled,
        )
        return self._done.setdefault(key, figures)

    def _bound(
        self, setting: Setting, *, decode: bool = False, turns_away: bool = False
    ) -> tuple[int, int]:
        """Return the fewest misses, and the requests they count: all, or all but prefills'."""
        key = setting.capacity, decode, turns_away
        if key not in self._fewest:
            assert isinstance(self.trace, Trace), "a bound of a trace that is streamed"
            self._fewest[key] = fewest_misses(
                self.trace,
                setting,
                cache_reset=self._lru.cache_reset,
                free_prefill=decode,
                turns_away=turns_away,
            )
        return self._fewest[key]
