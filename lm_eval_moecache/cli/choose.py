"""Rank lossless policies for a model at a capacity: how fast each is, and what it needs.

A MODEL is replayed on the most similar shipped trace, its layers charged as the model's; a TRACE as
it was recorded. Every policy serves the whole trace, from an empty cache unless its experts are
placed beforehand. No output changes: all have the accuracy of the unmodified model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jsonargparse import ArgumentParser, Namespace
from tqdm import tqdm

from lm_eval_moecache.cli.main import aligned, listed, print_result, wrapped
from lm_eval_moecache.cli.plan import MOST_CONTEXT, RECALL, stand_in, step_time, traced_bytes
from lm_eval_moecache.engine.regime import regime_of
from lm_eval_moecache.harness.arguments import Config, read_config
from lm_eval_moecache.planning.models import MODEL_FILES, emulated_names, load_real_model
from lm_eval_moecache.planning.stored import PRECISION_HELP, load_stored
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.hardware import DEFAULT_PROFILE, load_hardware, profile_names
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.numbers import read_count, read_number
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.report.metrics import totals
from lm_eval_moecache.report.statistics import Floats, mean_interval
from lm_eval_moecache.sweep.replay_grid import Replays
from lm_eval_moecache.trace.importers import trace_formats
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.use import use_of

BLOCKS = 8
"""Stretches of consecutive decode steps by which differences are separated from chance."""
_LEAST_STEPS = 4
"""Decode steps in a block below which nothing is said about differences."""
_PATIENCE_S = 2.0
PREDICTOR, HOST, PROFILE, FUTURE = "predictor", "host", "profile", "the future"
FASTEST, TIED, SLOWER = "fastest", "tied", "slower"


class Contender(NamedTuple):
    """A lossless composition, what it does, and what it needs."""

    model_args: str
    words: str
    needs: tuple[str, ...] = ()
    """`predictor` (an oracle stands for it), `host` (computes experts), `profile` (of use)."""

    @property
    def args(self) -> dict[str, str]:
        """Its `model_args` as a mapping."""
        return dict(item.split("=") for item in self.model_args.split(","))


_BALANCED = "miss=host,miss.rule=balanced"
LRU = "lru"
CONTENDERS: Mapping[str, Contender] = {
    LRU: Contender("policy=on_demand", "loads on demand, evicts by recency"),
    "lfu": Contender("policy=on_demand,eviction=lfu", "on demand, evicts by frequency"),
    "lfru": Contender(
        "policy=on_demand,eviction=lfru", "on demand, evicts by frequency and recency"
    ),
    "hazard": Contender(
        "policy=on_demand,eviction=hazard",
        "on demand, evicts the expert whose next use is forecast to be furthest",
    ),
    "specmd": Contender(
        "policy=specmd",
        "the default of lm_eval runs: prefetches, evicts by Least-Stale",
        (PREDICTOR,),
    ),
    "mixtral_offloading": Contender(
        "policy=mixtral_offloading",
        "prefetches the next layer's experts, evicts by recency",
        (PREDICTOR,),
    ),
    "prefetch+hazard": Contender(
        "policy=mixtral_offloading,eviction=hazard",
        "prefetches the next layer's experts, evicts as hazard does",
        (PREDICTOR,),
    ),
    "ktransformers": Contender(
        "policy=ktransformers",
        "the most used experts stay resident, the host computes the others",
        (HOST, PROFILE),
    ),
    "host": Contender(
        f"policy=on_demand,{_BALANCED}",
        "the host computes an absent expert where that ends the event sooner, else it is loaded; "
        "evicts by recency",
        (HOST,),
    ),
    "host+hazard": Contender(
        f"policy=on_demand,eviction=hazard,{_BALANCED}", "as host, evicts as hazard does", (HOST,)
    ),
    "bound": Contender(
        "policy=on_demand,eviction=belady",
        "the fewest misses of any eviction that loads on demand (Belady); the host and "
        "prefetching may be faster",
        (FUTURE,),
    ),
}


def add_arguments(parser: ArgumentParser) -> None:
    text = "a trace (no .json or folder: those by --trace); or a model: "
    text += f"{', '.join(emulated_names())}, or {MODEL_FILES}"
    parser.add_argument("model_or_trace", type=str, help=text)
    text = "cache size: 5%% of all expert bytes, 2GiB, 51 experts"
    parser.add_argument("--capacity", type=str, default="25%", help=text)
    text = f"one of {', '.join(profile_names())}; or a YAML"
    parser.add_argument("--hardware", type=str, default=DEFAULT_PROFILE, help=text)
    text = "link bandwidth, overrides the profile's: '5GB/s'"
    parser.add_argument("--bandwidth", type=str | None, help=text)
    text = f"stored weights of a model: {PRECISION_HELP}; default: as published"
    parser.add_argument("--precision", type=str | None, help=text)
    text = "with a model: trace of its routing; default: the most similar shipped one"
    parser.add_argument("--trace", type=str | None, help=text)
    text = "with a model: tokens that a decoded one attends to"
    parser.add_argument("--context", type=int, default=4096, help=text)
    text = "recall and precision of the predictors, which an oracle simulates"
    parser.add_argument("--recall", type=float, default=RECALL, help=text)


def run(arguments: Namespace) -> int:
    recall = read_number("--recall", arguments.recall, above=0, most=1)
    context = read_count("--context", arguments.context, least=1, most=MOST_CONTEXT)
    hardware = load_hardware(arguments.hardware, arguments.bandwidth)
    file, model = _read_subject(arguments)
    has_host = bool(hardware.host_flops and hardware.host_memory_bytes_per_s)
    configs: dict[str, Config] = {}
    for name, contender in CONTENDERS.items():
        if HOST in contender.needs and not has_host:
            continue
        args = {"capacity": arguments.capacity, **contender.args}
        if PREDICTOR in contender.needs:
            args |= {"prefetch": "oracle", "prefetch.recall": recall, "prefetch.precision": recall}
        # A seed of None is the trace's own.
        changes = {"hardware": hardware, "emulate": model, "seed": None}
        configs[name] = read_config(args, replayed=True).with_changes(**changes)
    report = {**find(file, model, configs, context), "hardware": hardware.name, "recall": recall}
    return print_result(arguments.json, report, _text(report))


def _read_subject(arguments: Namespace) -> tuple[str, RealModel | None]:
    """Return the trace to replay, and the model by which its layers are charged, if one is given.

    Raises ValueError for an option that does not go with it.
    """
    subject = arguments.model_or_trace
    suffixes = {suffix for kind in trace_formats().values() for suffix in kind.suffixes}
    # A .json is a model's configuration; routing in one is given by --trace.
    if Path(subject).suffix in suffixes - {".json"}:
        for key in ("precision", "trace"):
            if (value := arguments[key]) is not None:
                raise ValueError(
                    f"--{key}={value!r} goes with a model, and {subject!r} is a trace. Allowed: "
                    f"`moecache choose MODEL --trace {subject}`, which charges a model's layers."
                )
        return subject, None
    try:
        model = load_real_model(subject, key="model")
    except ValueError as error:
        if not Path(subject).exists():
            raise
        hint = f"If it is a trace, name its model: `moecache choose MODEL --trace {subject}`."
        raise ValueError(f"{error} {hint}") from error
    if arguments.precision is not None:
        model = replace(model, stored=load_stored(arguments.precision))
    return arguments.trace or str(stand_in(model)), model


# --- the replays ---


def find(
    file: str, model: RealModel | None, configs: Mapping[str, Config], context: int = 0
) -> dict[str, Any]:
    """Replay a trace under each contender's configuration; return the ranking as JSON data.

    Where a model is charged, the capacity is the model's, the trace has a cache of as many cycles,
    and a step takes what `plan` says: the model's layers, top-k and context (0: none).
    Raises ValueError for a trace without sizes or decode steps.
    """
    replays = Replays(file, list(configs.values()), None, True)
    trace = replays.trace
    assert isinstance(trace, Trace), "a trace that is streamed"
    if model is None and not trace.has_sizes:
        raise ValueError(
            f"trace {trace.name} does not say how large an expert is. Allowed: "
            f"`moecache choose MODEL --trace {file}`."
        )
    geometry = trace.geometry
    first = replays.setting(configs[LRU])
    charged, capacity = first.charged(geometry), first.capacity
    step: Callable[[float], float] = float
    if model is not None:
        charged = model.geometry()
        capacity = parse_capacity(configs[LRU].capacity, charged)
        step = step_time(model, first.hardware, geometry, context)
        size = traced_bytes(model, geometry, capacity.total_bytes / charged.total_expert_bytes)
        text = f"{size}B"
        if capacity.per_layer:
            per_layer = first.charged(geometry).total_expert_bytes // geometry.num_experts
            text = f"{max(1, size // per_layer)}/layer"
        configs = {name: each.with_changes(capacity=text) for name, each in configs.items()}

    def step_s(record: PassRecord) -> float:
        return step(record.duration_s) / (1 + record.accepted)

    rows: list[dict[str, Any]] = []
    blocks: dict[str, Floats] = {}
    # A profile is counted in one half and serves the other: two replays.
    num_replays = sum(1 + (PROFILE in CONTENDERS[name].needs) for name in configs)
    shown: dict[str, Any] = {"delay": _PATIENCE_S, "disable": not sys.stderr.isatty()}
    total = num_replays * trace.num_passes
    with tqdm(total=total, desc=trace.name, unit="pass", **shown) as bar:
        for name, config in configs.items():
            steps = _decode_steps(replays, config, name, bar.update)
            if not steps:
                raise ValueError(f"trace {trace.name} decodes no token: there is no speed to rank.")
            times = np.array([step_s(record) for record in steps])
            if len(steps) >= _LEAST_STEPS * BLOCKS:
                blocks[name] = np.array([part.mean() for part in np.array_split(times, BLOCKS)])
            sums = totals(steps)
            rows.append(
                {
                    "policy": name,
                    "model_args": CONTENDERS[name].args,
                    "needs": list(CONTENDERS[name].needs),
                    "tpot_ms": 1000 * float(times.mean()),
                    "decode_tok_per_s": 1 / float(times.mean()),
                    "decode_miss_rate": sums.missed / sums.requests,
                }
            )
        bar.refresh()
    rows.sort(key=lambda row: row["tpot_ms"])
    lru_ms = next(row["tpot_ms"] for row in rows if row["policy"] == LRU)
    fastest = next(row["policy"] for row in rows if FUTURE not in row["needs"])
    for row in rows:
        row["speedup_over_lru"] = lru_ms / row["tpot_ms"]
        row |= _against(blocks, row, fastest)
    return {
        "model": geometry.model if model is None else model.name,
        "precision": None if model is None else model.stored.name,
        "trace": file,
        "routing": geometry.model,
        "decode_steps": len(steps),
        "capacity": capacity.text,
        "capacity_cycles": regime_of(charged, capacity.total_bytes, first.hardware).cycles,
        "fastest": fastest,
        "rows": rows,
        "left_out": [name for name in CONTENDERS if name not in configs],
    }


def _decode_steps(
    replays: Replays, config: Config, name: str, on_progress: Any
) -> list[PassRecord]:
    """Return the decode steps of a replay.

    Where experts are placed, either half of the trace runs under the placement by the other's use:
    nothing else carries over from step to step where nothing is loaded.
    """
    trace = replays.trace
    assert isinstance(trace, Trace), "a trace that is streamed"
    half = trace.num_passes // 2
    placed = ((use_of(trace, half), slice(half)), (use_of(trace, 0, half), slice(half, None)))
    steps: list[PassRecord] = []
    for profile, part in placed if PROFILE in CONTENDERS[name].needs else [(None, slice(None))]:
        setting = replays.setting(config.with_changes(warm=profile))
        engine = replays.replay(setting, on_progress=on_progress)
        steps += [p for p in engine.ledger.passes[part] if p.phase != PREFILL]
    return steps


def _against(blocks: Mapping[str, Floats], row: Mapping[str, Any], fastest: str) -> dict[str, Any]:
    """Return by which share a policy's steps are longer than the fastest one's: a 95% interval.

    It is Student's, of the differences between blocks of consecutive steps (batch means). None
    where the trace is too short for blocks, and for the bound, which is no choice.
    """
    name = row["policy"]
    if name == fastest:
        return {"slower_by": None, "verdict": FASTEST}
    if FUTURE in row["needs"] or not blocks:
        return {"slower_by": None, "verdict": None}
    own, best = blocks[name], blocks[fastest]
    low, high = (float(end / best.mean()) for end in mean_interval(own - best))
    return {"slower_by": [low, high], "verdict": SLOWER if low > 0 else TIED}


# --- the page ---


def _text(report: Mapping[str, Any]) -> str:
    rows = report["rows"]
    cells = [["policy", "TPOT ms", "tok/s", "x LRU", "miss", "slower by", "needs"]]
    for row in rows:
        slower = row["verdict"] or "-"
        if row["slower_by"] is not None:
            low, high = (f"{100 * end:.0f}" for end in row["slower_by"])
            slower = f"{low} to {high}%" + ("  (tied)" if row["verdict"] == TIED else "")
        figures = [_digits(row["tpot_ms"]), _digits(row["decode_tok_per_s"])]
        figures += [f"{row['speedup_over_lru']:.2f}", f"{100 * row['decode_miss_rate']:.1f}%"]
        cells.append([row["policy"], *figures, slower, ", ".join(row["needs"])])
    legend = [(row["policy"], CONTENDERS[row["policy"]].words) for row in rows]
    lead = max(8, *(len(name) for name, _ in legend)) + 3
    notes = [line for note in _notes(report) for line in wrapped(note)]
    table = [*wrapped(_verdict(report)), "", *aligned(cells, "<>>>><<"), ""]
    return "\n".join([*table, *listed(legend, lead), "", *notes, ""])


def _digits(number: float) -> str:
    """Return a number to three significant digits, without an exponent."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:#.3g}"


def _verdict(report: Mapping[str, Any]) -> str:
    """Say what to take: the fastest of all, and the fastest of those that need less."""
    rows = [row for row in report["rows"] if FUTURE not in row["needs"]]
    best = rows[0]
    precision = f" ({report['precision']})" if report["precision"] else ""
    text = (
        f"{report['model']}{precision} on {report['hardware']} with a cache of "
        f"{report['capacity']} ({report['capacity_cycles']:.2g} cycles): the fastest is "
        f"{_row_text(best)}."
    )
    for without in ([PROFILE], [PROFILE, HOST], [PROFILE, HOST, PREDICTOR]):
        if {*without} & {*best["needs"]}:
            best = next(row for row in rows if not {*without} & {*row["needs"]})
            text += f" Without {' or '.join(without)}: {_row_text(best)}."
    return text


def _row_text(row: Mapping[str, Any]) -> str:
    args = ",".join(f"{key}={value}" for key, value in row["model_args"].items())
    tied = ", tied with it," if row["verdict"] == TIED else ","
    return f"{row['policy']} ({args}){tied} {_digits(row['decode_tok_per_s'])} tok/s"


def _notes(report: Mapping[str, Any]) -> list[str]:
    notes = []
    if report["left_out"]:
        names = ", ".join(report["left_out"])
        notes.append(f"Left out: {names}. {report['hardware']} says nothing of its host's compute.")
    share = f"{100 * report['recall']:.0f}%"
    notes.append(
        f"predictor: an oracle names {share} of the next layer's experts, and {share} of what it "
        "names is right (--recall); a live run predicts by the model's gates. profile: experts "
        "placed in one half of the trace by their use in the other."
    )
    notes.append(
        f"Routing: {report['routing']}, {report['decode_steps']} decode steps of "
        f"{Path(report['trace']).name}. slower by: how much longer a step takes than the fastest "
        f"policy's, a 95% interval over {BLOCKS} consecutive stretches of the trace; tied where it "
        "holds 0. However cut, this is one text: on another the order may change. Choose by a "
        "trace of your own texts where you can."
    )
    notes.append("A forecast of the virtual clock for one stream; nothing was run on the device.")
    return notes
