"""Random settings of every kind over small random traces; `check` compares engine and oracle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np

from lm_eval_moecache.algorithms.learned.predictor import digest_of, target_of
from lm_eval_moecache.algorithms.policy import check_cache_form, load_policy
from lm_eval_moecache.algorithms.registry import (
    AXES,
    algorithm_names,
    find_algorithm,
    parameters_of,
)
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.event import (
    PHASES,
    UNSEEN_SCORES,
    VERIFY,
    Event,
)
from lm_eval_moecache.records.geometry import NO_TARGET, Draft, Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.real_model import LayerCaches, RealModel
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.testing.streams import equip
from lm_eval_moecache.trace.future import Future
from lm_eval_moecache.trace.recorder import identity
from lm_eval_moecache.trace.trace import Drafted, Lists, Trace
from lm_eval_moecache.trace.use import UseProfile
from tests.engine.oracle import Oracle
from tests.engine.traces import draw_routing, with_predictions

WILD = "tests.engine.wild."
KINDS = tuple("demand prefetch lossy ladder host lanes draft scan whole_pass wild".split())


@dataclass
class Case:
    trace: Trace
    setting: Setting
    future: Future
    reset: str
    pass_proposals: Sequence[Sequence[int]] | None
    kinds: set[str]


def pick(rng: np.random.Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def draw_geometry(rng: np.random.Generator, levels: int) -> Geometry:
    num_layers, num_experts = int(rng.integers(1, 5)), int(rng.integers(2, 9))
    alike = [int(rng.choice([1000, 1500]))] * num_layers
    sizes = alike if rng.random() < 0.5 else rng.choice([1000, 1500, 1700], num_layers).tolist()
    return Geometry(
        model="drawn",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=int(rng.integers(1, min(4, num_experts) + 1)),
        expert_bytes=tuple(tuple(size >> level for level in range(levels)) for size in sizes),
        dense_bytes=tuple(rng.choice([0, 300, 900], num_layers).tolist()),
        precision=("int8", "int4", "int2")[:levels],
        compute_bytes=tuple(2 * size for size in sizes) if rng.random() < 0.3 else (),
        hidden_size=int(rng.choice([0, 1, 64])),
    )


def draw_hardware(rng: np.random.Generator, lanes: bool) -> Hardware:
    """Round figures make things coincide, others never do."""

    def rate(*round_rates: float) -> float:
        return pick(rng, round_rates) if rng.random() < 0.6 else float(10 ** rng.uniform(5, 9))

    def seconds() -> float:
        return pick(rng, (0.0, 0.0, 1e-6, 1e-4, 1e-3, float(10 ** rng.uniform(-6, -2))))

    link = rate(1e6, 1e7, 1e9)
    hardware = Hardware(
        name="drawn",
        peak_flops=rate(1e6, 1e9, 1e15),
        memory_bytes_per_s=rate(1e7, 1e8),
        link_bytes_per_s=link,
        link_latency_s=seconds(),
        kernel_overhead_s=seconds() / 30,
        memory_bytes=1e9,
        layer_overhead_s=seconds() / 10,
        pass_overhead_s=seconds(),
        wait_overhead_s=seconds(),
        link_efficiency=float(rng.choice([1.0, 0.8])),
        link_lanes=int(rng.integers(1, 5)) if lanes else 1,
        link_lane_bytes_per_s=pick(rng, (None, link / 3)) if lanes else None,
        load_overhead_s_per_byte=pick(rng, (0.0, 1e-8)) if lanes else 0.0,
        host_flops=rate(1e6, 1e9),
        host_memory_bytes_per_s=rate(1e6, 1e7),
    )
    if rng.random() < 0.9:
        return hardware
    # The host takes as long for an expert as the link and the device together.
    fast = {"peak_flops": 1e15, "host_flops": 1e15, "host_memory_bytes_per_s": 1e6}
    free = dict.fromkeys(("kernel_overhead_s", "link_latency_s", "layer_overhead_s"), 0.0)
    even = {"memory_bytes_per_s": 2e6, "link_bytes_per_s": 2e6, "link_efficiency": 1.0}
    return replace(hardware, link_lane_bytes_per_s=None, **fast, **free, **even)


def draw_trace(
    rng: np.random.Generator,
    g: Geometry,
    critical: int,
    *,
    drafted: bool,
    scanned: bool,
    may_shorten: bool,
) -> Trace:
    """Requests of a prompt and decode steps, alone or in a batch of two, some verifying drafts."""
    rows, scans, first = list[tuple[int, ...]](), list[tuple[int, int]](), 0
    request, passes = -1, int(rng.integers(3, 15))
    while first < passes:
        request += 1
        if scanned and rng.random() < 0.5:
            count = int(rng.integers(1, 5))
            for i in range(count):
                rows += [(request, first + i, 1, i, at) for at in range(g.num_layers)]
            scans.append((first, count))
            first += count
            continue
        prompt, last_alone = int(rng.integers(1, 6)), may_shorten and rng.random() < 0.2
        for at in range(g.num_layers):
            skipped = prompt - 1 if last_alone and at == g.num_layers - 1 else 0
            rows += [(request, first, 0, token, at) for token in range(skipped, prompt)]
        first, place, batch = first + 1, prompt, int(rng.integers(1, 3))
        for _ in range(int(rng.integers(0, 5))):
            if drafted and rng.random() < 0.7:
                count = int(rng.integers(1, 4))
                step = [(request, first, 2, place + i) for i in range(count)]
            else:
                count, step = 1, [(request + 100 * i, first, 1, place) for i in range(batch)]
            rows += [(*each, at) for at in range(g.num_layers) for each in step]
            first, place = first + 1, place + count
    trace = draw_routing(rng, g, rows, scans=tuple(scans))
    return replace(trace, drafted=draw_drafts(rng, trace, critical)) if drafted else trace


def lists(parts: list[list[int]]) -> Lists:
    bounds = np.cumsum([0, *map(len, parts)])
    return Lists(np.array([value for part in parts for value in part], np.int32), bounds)


def draw_drafts(rng: np.random.Generator, trace: Trace, critical: int) -> Drafted:
    """Forwards of a draft before each verify pass; a prefetcher reads `critical` experts."""
    g = trace.geometry
    layers = g.num_layers if critical or rng.random() < 0.7 else 2
    own = Geometry(
        model="draft",
        num_layers=layers,
        num_experts=4,
        top_k=2,
        expert_bytes=((400, 100),) * layers,
        dense_bytes=(100,) * layers,
        precision=("int8", "int2"),
    )
    targets = tuple(range(g.num_layers)) if layers == g.num_layers else (NO_TARGET, 0)
    ranked, kept = (
        int(rng.integers(max(1, critical), g.num_experts + 1)),
        sum(t != NO_TARGET for t in targets),
    )
    tokens, experts, ranks, settled = [], [], [], {}
    for index in range(trace.num_passes):
        row = trace.row_bounds[index * g.num_layers]
        count = int(trace.row_bounds[index * g.num_layers + 1] - row)
        is_drafted = PHASES[trace.columns.phase[row]] == VERIFY
        forwards = rng.integers(1, 4, count).tolist() if is_drafted else []
        tokens.append(forwards)
        experts.append(rng.integers(1, 5, len(forwards) * layers).tolist())
        orders = [rng.permutation(g.num_experts)[:ranked] for _ in range(len(forwards) * kept)]
        ranks.append([int(e) for order in orders for e in order])
        if is_drafted:
            settled[index] = (count, int(rng.integers(0, count + 1)))
    draft = Draft(geometry=own, level=int(rng.integers(2)), nbytes=1000, targets=targets)
    return Drafted(
        draft=draft,
        ranked=ranked,
        tokens=lists(tokens),
        experts=lists(experts),
        ranks=lists(ranks),
        settled=settled,
    )


NUMBERS: dict[str, tuple[Any, ...]] = {
    "hazard.memory": (1, 200),
    "hysteresis.half_life": (2, 64),
    "heat_lru.protect_above": (1, 4),
    "next_gate.overfetch": (1.0, 1.5),
    "next_gate.depth": (1, 2),
    "score.percentile": (50.0, 80.0),
    "frequency.lookahead": (1, 2),
    "expert_map.distance": (1, 2),
    "oracle.horizon": (1, 3),
    "oracle.recall": (1.0, 0.7),
    "oracle.precision": (1.0, 0.5),
    "draft.critical": (None, 1),
    "bounded_insertion.uploads": (1, 2, 5),
    "drop.h": (0, 1),
    "predictor.overfetch": (1.0, 2.0),
}


def choose(rng: np.random.Generator, axis: str, names: Any) -> dict[str, Any]:
    """Choose an algorithm of an axis, and a reading of each of its parameters that has several."""
    name = pick(rng, names)
    chosen: dict[str, Any] = {axis: name}
    for key, parameter in parameters_of(find_algorithm(axis, name)).items():
        values = NUMBERS.get(f"{name}.{key}", get_args(parameter.annotation))
        values = (False, True) if parameter.annotation is bool else values
        values = [value for value in values if isinstance(value, (str, int, float))]
        if values and rng.random() < 0.5:
            value = pick(rng, values)
            if value is not None and value != parameter.default:
                chosen[f"{axis}.{key}"] = value
    return chosen


def named(axis: str, **facts: Any) -> list[str]:
    """The names of an axis' algorithms with these facts."""
    return [
        name
        for name in algorithm_names(axis)
        if all(getattr(find_algorithm(axis, name), key, None) == v for key, v in facts.items())
    ]


EVICTIONS = algorithm_names("eviction")
PREFETCHERS = named("prefetch", is_active=True, needs_draft=False, predicts_pass=False)
LADDERS = named("miss", uses_ladder=True)
LOSSY_MISSES = named("miss", uses_ladder=False, is_lossless=False)
AWAITING = [n for n in LOSSY_MISSES if "late" in parameters_of(find_algorithm("miss", n))]
LOSSY_ROUTING = named("routing", is_lossless=False)


def draw(seed: int) -> Case:
    """Draw a setting, of each of `KINDS` in turn; what does not go together is drawn again."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    while True:
        try:
            return draw_case(rng, kind)
        except ValueError:
            continue


def draw_case(rng: np.random.Generator, kind: str) -> Case:
    def also(name: str, share: float = 0.2) -> bool:
        return kind == name or rng.random() < share

    whole_pass, scan = kind == "whole_pass", kind == "scan"
    lossy, host, lanes, drafted = map(also, ("lossy", "host", "lanes", "draft"))
    ladder = also("ladder") or (kind == "wild" and rng.random() < 0.5)
    geometry = draw_geometry(rng, int(rng.integers(2, 4)) if ladder else 1)
    axes = choose(rng, "eviction", EVICTIONS)
    if lossy and rng.random() < 0.6:
        axes |= choose(rng, "routing", LOSSY_ROUTING)
    if axes.get("routing") == "commit" and not scan:
        axes |= choose(rng, "prefetch", ["predictor"])
    elif whole_pass:
        axes |= choose(rng, "prefetch", ["data_aware"])
    elif kind == "draft" and rng.random() < 0.7:
        cutoff = int(rng.integers(geometry.num_layers + 1))
        axes |= choose(rng, "prefetch", ["draft"]) | {"prefetch.cutoff": cutoff}
    elif kind == "wild":
        axes["prefetch"] = WILD + "RandomPrefetch"
    elif not scan and also("prefetch", 0.5):
        axes |= choose(rng, "prefetch", PREFETCHERS)
    if kind == "wild" and ladder:
        axes["miss"] = WILD + "RandomLevels"
    elif ladder and rng.random() < 0.8:
        axes |= choose(rng, "miss", LADDERS)
    elif host:
        axes |= choose(rng, "miss", ["host", "bounded_insertion"])
    elif lossy and rng.random() < 0.7:
        if "prefetch" in axes and rng.random() < 0.3:
            axes |= {**choose(rng, "miss", AWAITING), "miss.late": "await"}
        else:
            axes |= choose(rng, "miss", LOSSY_MISSES)
    else:
        axes |= choose(rng, "miss", ["fetch", "fetch_cached_first"])
    if rng.random() < 0.3:
        axes["phases"] = "decode"
    policy = equip(load_policy("on_demand", axes), geometry)
    algorithms = {a: getattr(policy, a).build(geometry, 0) for a in AXES}
    prefetch, routing, miss = algorithms["prefetch"], algorithms["routing"], algorithms["miss"]
    if whole_pass and (routing.depth or miss.uses_ladder or not policy.is_lossless):
        raise ValueError("a replay has this prefetcher's proposals, and these need predictions")
    if axes.get("routing") == "swap_rank" and miss.uses_weights and not miss.uses_logits:
        raise ValueError("what the expert put in weighs, depends on who else asks for logits")
    if scan and routing.depth:
        raise ValueError("a scan has no next layer")
    forms = {"drafted": drafted and not scan, "scanned": scan, "may_shorten": not routing.depth}
    trace = draw_trace(rng, geometry, getattr(prefetch, "num_critical", 0), **forms)
    artifact = prefetch.artifact
    digest = "" if artifact is None else digest_of(artifact)
    by = digest if prefetch.uses_predictor else ""
    depth = max(routing.depth, prefetch.depth)
    trace = with_predictions(rng, trace, max(1, depth), by)
    pass_proposals = None
    if whole_pass:
        events = trace.num_passes * geometry.num_layers
        keys = geometry.num_layers * geometry.num_experts
        counts = rng.integers(0, keys // 2 + 1, events)
        recorded = [rng.permutation(keys)[:count].tolist() for count in counts]
        resets = ("never", "request")
        proposed = {identity(policy.prefetch, 0, digest, r): lists(recorded) for r in resets}
        pass_proposals = recorded[:: geometry.num_layers]
        trace = replace(trace, proposed=proposed)
    per_layer = scan or rng.random() < 0.3
    capacity = f"{rng.integers(1, geometry.num_experts + 1)}/layer"
    if not per_layer:
        most = geometry.num_layers * geometry.num_experts
        capacity = f"{rng.integers(1, most + 1)}experts"
    check_cache_form(policy, per_layer)
    emulate, attention = None, "flat"
    if not scan and rng.random() < 0.15:
        emulate, attention = draw_model(rng), pick(rng, ("flat", "context"))
    charged = geometry if emulate is None else emulate.emulated_by(geometry)
    uses = rng.integers(0, 3, (geometry.num_layers, geometry.num_experts)).tolist()
    profile = UseProfile(model="", counts=tuple(map(tuple, uses)))
    setting = Setting(
        policy=policy,
        capacity=parse_capacity(capacity, charged),
        hardware=draw_hardware(rng, lanes),
        link=pick(rng, ("priority", "priority", "fifo")),
        execute=pick(rng, ("together", "as_they_arrive")) if lanes and not ladder else "together",
        reads_per_expert=int(rng.integers(1, 4)) if lanes else 1,
        attention=attention,
        emulate=emulate,
        warm=profile if rng.random() < 0.3 else None,
    )
    reset = pick(rng, ("never", "request"))
    return Case(trace, setting, Future(trace), reset, pass_proposals, kinds_of(trace, setting))


def draw_model(rng: np.random.Generator) -> RealModel:
    """A model to emulate, with a sliding window in some layers and without one in others."""
    caches = (LayerCaches(3, 64.0, 32, None), LayerCaches(2, 64.0, 32, 3))
    return RealModel(
        name="emulated",
        num_layers=5,
        num_experts=16,
        top_k=2,
        expert_weights=int(rng.integers(300, 900)),
        layer_weights=400,
        read_once=100,
        embedding=50,
        caches=caches,
        state_bytes=10,
    )


def kinds_of(trace: Trace, setting: Setting) -> set[str]:
    policy, hardware = setting.policy, setting.hardware
    miss, prefetch = policy.miss.algorithm, policy.prefetch.algorithm
    facts = {
        "prefetch": prefetch.is_active,
        "gates": prefetch.is_active and not prefetch.predicts_pass and not prefetch.needs_draft,
        "predictor": prefetch.uses_predictor,
        "whole_pass": prefetch.predicts_pass,
        "demand": not prefetch.is_active and policy.is_lossless,
        "wild": policy.prefetch.name.startswith(WILD),
        "lossy": not policy.is_lossless,
        "lossy routing": not policy.routing.algorithm.is_lossless,
        "lossy miss": not miss.is_lossless,
        "ladder": len(trace.geometry.precision) > 1,
        "host": miss.uses_host,
        "lanes": hardware.link_lanes > 1,
        "reads": setting.reads_per_expert > 1,
        "as they arrive": setting.execute != "together",
        "load overhead": hardware.load_overhead_s_per_byte > 0,
        "draft": trace.drafted.draft is not None,
        "draft prefetch": prefetch.needs_draft,
        "scan": bool(trace.scans),
        "attention": setting.attention == "context",
        "emulated": setting.emulate is not None,
        "fifo": setting.link == "fifo",
        "warm": setting.warm is not None,
        "offline": prefetch.is_offline or policy.eviction.algorithm.is_offline,
        f"eviction {policy.eviction.name}": True,
        f"prefetch {policy.prefetch.name}": True,
        f"miss {policy.miss.name}": True,
        f"routing {policy.routing.name}": True,
    }
    return {kind for kind, holds in facts.items() if holds}


def events_of(case: Case) -> list[list[Event]]:
    """The events of a trace, by pass and layer, with all that it knows of them."""
    trace, g = case.trace, case.trace.geometry
    build = [getattr(case.setting.policy, axis).build for axis in ("routing", "prefetch")]
    routing, prefetch = (make(g, case.setting.seed) for make in build)
    depth, passes = max(routing.depth, prefetch.depth), list[list[Event]]()
    weights = UNSEEN_SCORES if trace.columns.weights is None else trace.columns.weights
    logits = UNSEEN_SCORES if trace.logits is None else trace.logits
    for number, (start, stop) in enumerate(pairwise(trace.row_bounds.tolist())):
        index, layer = divmod(number, g.num_layers)
        phase = PHASES[trace.columns.phase[start]]
        targets = [at for at in range(layer + 1, layer + 1 + depth) if at < g.num_layers]
        if prefetch.uses_predictor:
            targets = [at for at in [target_of(layer, g.num_layers, phase)] if at is not None]
        predicted = dict.fromkeys(targets, UNSEEN_SCORES)
        if trace.predicted is not None and targets:
            first, last = trace.predicted.offsets[[start, stop]]
            values = trace.predicted.values[first:last].astype(np.float32)
            scores = values.reshape(stop - start, -1, g.num_experts)
            predicted = {target: scores[:, i] for i, target in enumerate(targets)}
        experts = trace.columns.experts[start:stop].astype(np.int64)
        event = Event(
            passes=[index],
            layer=layer,
            phase=phase,
            num_experts=g.num_experts,
            experts=experts,
            weights=weights[start:stop],
            logits=logits[start:stop].astype(np.float32),
            predicted=predicted,
        )
        passes += [[]] if layer == 0 else []
        passes[index].append(event)
    return passes


def starts_of(case: Case) -> list[int]:
    """Return the passes before which the device starts anew: another request's first ones."""
    trace, before, starts = case.trace, set[int](), [0]
    for at in range(trace.num_passes if case.reset == "request" else 0):
        served = {i for i, request in enumerate(trace.requests) if at in request.passes}
        if trace.starts_sequence(at):
            starts += [at] if at and served != before else []
            before = served
    return starts


def check(seed: int) -> Case:
    """Compare every figure of engine and oracle on the case of a seed, and return it."""
    case = draw(seed)
    compare(case, f"seed={seed}")
    return case


def compare(case: Case, of: str) -> None:
    """Compare every figure of engine and oracle on a case."""
    trace, setting = case.trace, case.setting
    oracles, expected_passes = list[Oracle](), list[PassRecord]()
    for first, last in pairwise([*starts_of(case), trace.num_passes]):
        # What starts anew is a run of its own.
        own = dataclasses.replace(case, trace=trace.between(first, last, 0))
        proposals = case.pass_proposals and case.pass_proposals[first:last]
        future = case.future if case.reset == "never" else Future(own.trace)
        oracles.append(Oracle(own.trace, events_of(own), setting, future, proposals))
        for record in oracles[-1].passes:
            record.index += first
        expected_passes += oracles[-1].passes
    engine = replay(trace, setting, future=case.future, cache_reset=case.reset)
    what = f"{of} {setting.policy.name} {sorted(case.kinds)}"
    for record, expected in zip(engine.ledger.passes, expected_passes, strict=True):
        for name in (field.name for field in dataclasses.fields(record)):
            here, there = getattr(record, name), getattr(expected, name)
            is_same = here == there
            if name == "lost_weight":  # a sum of float32 shares, in another order
                is_same = math.isclose(here, there, rel_tol=1e-5)
            assert is_same, f"{what}: pass {record.index}: {name} is {here}, not {there}"
    served = [[record.index for record in each.passes] for each in engine.ledger.requests]
    assert served == [[*each.passes] for each in trace.requests], what
    if case.reset == "never":
        residents = {key: level for pool in engine.pools for key, level in pool.resident.items()}
        assert residents == oracles[0].level, what
        assert engine.now == oracles[0].now, what
    assert engine.peak_cache_bytes == max(sum(oracle.peak) for oracle in oracles), what
    engine.check_integrity()
