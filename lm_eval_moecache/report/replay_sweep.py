"""Replays traces at several capacities, with the bounds that say how good a policy is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
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
from lm_eval_moecache.records.sizes import Capacity, check_capacity, is_per_layer, parse_capacity
from lm_eval_moecache.records.use import UseProfile
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.stream import StreamedTrace, open_any
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.use import placement

LRU, FEWEST = "lru", "bound"
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
    bounds: dict[str, dict[str, float | None]]
    """Phase ("" for all, `decode_`) -> on-demand LRU's miss rate, and the one that no eviction on
    demand goes below in that phase; empty where not asked for."""
    closeness: float | None
    warnings: tuple[str, ...]
    """Settings that did nothing on this trace."""
    cycles: float
    """Tokens' worth of experts that the capacity holds."""
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


def run_sweep(
    files: Sequence[str], setting: SweepSetting, *, show_progress: bool = False
) -> list[Row]:
    """Replay each trace under each policy, on each machine, at each capacity, in the order given.

    Raises ValueError for a setting that a live run refuses, too, before any trace is read.
    """
    _check(setting)
    rows = []
    for file in files:
        foresees = setting.bound or any(map(_is_offline, setting.policies))
        trace = _trace(file, setting, foresees)
        settings = len(setting.policies) * len(setting.hardwares) + (1 if setting.bound else 0)
        with tqdm(
            total=trace.num_passes * len(setting.capacities) * settings,
            desc=trace.name,
            unit="pass",
            delay=_PATIENCE_S,
            disable=not show_progress,
        ) as bar:
            replays = _Replays(trace, setting, foresees, bar)
            for policy, hardware in product(setting.policies, setting.hardwares):
                for text in setting.capacities:
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
        self._fewest: dict[tuple[Capacity, bool], tuple[int, int]] = {}

    def run(self, policy: Policy, capacity: Capacity, hardware: Hardware) -> _Found:
        key = repr((_axes(policy), policy.phases, capacity, hardware))
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

    def fewest(self, capacity: Capacity, *, decode: bool) -> tuple[int, int]:
        """Return the bound on misses, and the requests it is of: all, or those after prefills."""
        key = capacity, decode
        if key not in self._fewest:
            assert isinstance(self.trace, Trace), "a bound of a trace that is streamed"
            lru = load_policy("on_demand", _ON_DEMAND | {"eviction": LRU})
            self._fewest[key] = fewest_misses(
                self.trace,
                self.setting_of(lru, capacity, self.setting.hardwares[0]),
                cache_reset=self.setting.cache_reset,
                free_prefill=decode,
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
    bounds, close = _bounds(replays, own, capacity) if replays.setting.bound else ({}, None)
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
        bounds=bounds,
        closeness=close,
        warnings=_idle(policy, own, len(replays.trace.requests)),
        cycles=own.regime["capacity_cycles"],
        emulates="" if emulate is None else emulate.name,
        uncompiled=own.uncompiled,
        warmed_by="" if warm is None else warm.name,
        regime=own.regime if has_sizes else None,
    )


def _bounds(
    replays: _Replays, own: _Found, capacity: Capacity
) -> tuple[dict[str, dict[str, float | None]], float | None]:
    """Return the bounds by phase, and how close to them this replay comes."""
    # Nothing is prefetched, so the machine says when and not what.
    machine = replays.setting.hardwares[0]
    policy = load_policy("on_demand", _ON_DEMAND | {"eviction": LRU})
    lru = replays.run(policy, capacity, machine)
    bounds: dict[str, dict[str, float | None]] = {}
    for phase in ("", "decode_"):
        misses, requests = replays.fewest(capacity, decode=bool(phase))
        rate = misses / requests if requests else None
        bounds[phase] = {LRU: lru.metrics[f"{phase}miss_rate"], FEWEST: rate}
    return bounds, closeness(lru.misses, own.misses, replays.fewest(capacity, decode=False)[0])


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


def _axes(policy: Policy) -> list[Any]:
    return [getattr(policy, axis).as_dict() for axis in AXES]


def _capacity(
    text: str, trace: Trace | StreamedTrace, emulate: RealModel | None, policy: Policy
) -> Capacity:
    is_size = not (text.endswith(("%", "/layer")) or text.isdigit())
    if is_size and not trace.has_sizes and emulate is None:
        raise ValueError(
            f"capacity={text!r}: trace {trace.name} does not say how large an expert is. Give "
            "--expert_bytes, or a capacity as a share, a number of experts or N/layer."
        )
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
