"""Rank lossless policies for a model at a capacity: how fast each is, and what it needs.

A MODEL is replayed on the most similar shipped trace, with the model's sizes; a TRACE as it was
recorded. Every policy serves the whole trace, from an empty cache unless its experts are placed
beforehand. No policy changes an output: all have the accuracy of the unmodified model. `--lossy`
prints what a lossy rule lost in publications.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.main import aligned, listed, print_result, wrapped
from lm_eval_moecache.emulate.models import MODEL_FILES, emulated_names, load_real_model
from lm_eval_moecache.emulate.stored import PRECISION_HELP, load_stored
from lm_eval_moecache.engine.stand_in import stand_in
from lm_eval_moecache.harness.arguments import Config, read_config
from lm_eval_moecache.records.hardware import (
    DEFAULT_PROFILE,
    NO_CARD,
    Hardware,
    load_hardware,
    profile_names,
    same_card_note,
)
from lm_eval_moecache.records.numbers import read_count, read_number
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.importers import trace_formats
from moecache_plan import losses_page as _losses
from moecache_plan.ideal import RECALL
from moecache_plan.machines import SYSTEM, charged, known
from moecache_plan.plan import MOST_CONTEXT
from moecache_plan.ranking import (
    BLOCKS,
    CONTENDERS,
    FUTURE,
    HOST,
    PREDICTOR,
    PROFILE,
    TIED,
    find,
)


def add_arguments(parser: ArgumentParser) -> None:
    text = "a trace (give .json files and folders by --trace); or a model: "
    text += f"{', '.join(emulated_names())}, or {MODEL_FILES}"
    parser.add_argument("model_or_trace", type=str, help=text)
    text = "cache size: 5%% of all expert bytes, 2GiB, 51 experts"
    parser.add_argument("--capacity", type=str, default="25%", help=text)
    text = f"one of {', '.join(profile_names())}; or a YAML"
    parser.add_argument("--hardware", type=str, default=DEFAULT_PROFILE, help=text)
    text = "link bandwidth, overrides the profile's: '5GB/s'"
    parser.add_argument("--bandwidth", type=str | None, help=text)
    parser.add_argument("--ram", type=str | None, help="the machine's RAM: 64GB")
    text = "nominal rate of the RAM: 83GB/s, or channels and MT/s: 2x5600"
    parser.add_argument("--host_memory", type=str | None, help=text)
    text = f"stored weights of a model: {PRECISION_HELP}; default: as published"
    parser.add_argument("--precision", type=str | None, help=text)
    text = "with a model: trace of its routing; default: the most similar shipped one"
    parser.add_argument("--trace", type=str | None, help=text)
    text = "with a model: tokens that a decoded one attends to"
    parser.add_argument("--context", type=int, default=4096, help=text)
    text = "recall and precision of the predictors, which an oracle simulates"
    parser.add_argument("--recall", type=float, default=RECALL, help=text)
    _losses.add_arguments(parser)


def run(arguments: Namespace) -> int:
    recall = read_number("--recall", arguments.recall, above=0, most=1)
    context = read_count("--context", arguments.context, least=1, most=MOST_CONTEXT)
    hardware = load_hardware(arguments.hardware, arguments.bandwidth)
    given = known(ram=arguments.ram, host_memory=arguments.host_memory)
    hardware = charged(hardware, given)
    file, model = _read_subject(arguments)
    if model is not None and given["ram"] is not None:
        _check_ram(model, hardware, given["ram"], arguments.capacity)
    lossy = _losses.read(arguments)
    if model is None and lossy is not None:
        raise ValueError(
            f"--lossy={arguments.lossy!r} needs a model, but {file!r} is a trace. Allowed: "
            f"`moecache choose MODEL --trace {file} --lossy {arguments.lossy}`."
        )
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
    if model is not None:
        report |= _losses.report(lossy, model, _share(arguments, model))
    return print_result(arguments.json, report, _text(report))


def _check_ram(model: RealModel, hardware: Hardware, ram: float, capacity: str) -> None:
    """Refuse a RAM without room for what lies in it: the cache of a processor alone, with a card
    all experts."""
    needed: float = model.all_expert_bytes
    if hardware.is_processor:
        needed = parse_capacity(capacity, model.geometry()).total_bytes + model.dense_bytes
    elif hardware.is_unified:
        return
    if needed > ram - SYSTEM:
        raise ValueError(
            f"ram={ram / 1e9:g}GB is too small for the {needed / 1e9:.1f} GB of {model.name} "
            f"({model.stored.name}) that lie in it and {SYSTEM / 1e9:g} GB of the system. "
            "Allowed: more, fewer bits (--precision), or on a processor alone a smaller --capacity."
        )


def _share(arguments: Namespace, model: RealModel) -> float:
    """Return the share of a model's experts that the capacity holds."""
    held = parse_capacity(arguments.capacity, model.geometry()).total_bytes
    return min(held / model.all_expert_bytes, 1.0)


def _read_subject(arguments: Namespace) -> tuple[str, RealModel | None]:
    """Return the trace to replay, and the model by which its layers are charged, if one is given.

    Raises ValueError for an option that cannot be combined with it.
    """
    subject = arguments.model_or_trace
    suffixes = {suffix for kind in trace_formats().values() for suffix in kind.suffixes}
    # A .json is a model's configuration; routing in one is given by --trace.
    if Path(subject).suffix in suffixes - {".json"}:
        for key in ("precision", "trace"):
            if (value := arguments[key]) is not None:
                raise ValueError(
                    f"--{key}={value!r} needs a model, but {subject!r} is a trace. Allowed: "
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
    lossy = ["", *_losses.lines(report["losses"])] if "losses" in report else [""]
    return "\n".join([*table, *listed(legend, lead), "", *notes, *lossy])


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
            names = " or ".join(", ".join(without).rsplit(", ", 1))
            text += f" Without {names}: {_row_text(best)}."
    return text


def _row_text(row: Mapping[str, Any]) -> str:
    args = ",".join(f"{key}={value}" for key, value in row["model_args"].items())
    tied = ", tied with it," if row["verdict"] == TIED else ","
    return f"{row['policy']} ({args}){tied} {_digits(row['decode_tok_per_s'])} tok/s"


def _notes(report: Mapping[str, Any]) -> list[str]:
    notes = []
    if report["left_out"]:
        names = ", ".join(report["left_out"])
        why = f"{report['hardware']} has no figures for its host's compute"
        if report["hardware"] == NO_CARD:
            why = "there is no card, only the processor"
        notes.append(f"Left out: {names}. {why[0].upper()}{why[1:]}.")
    if text := same_card_note(report["hardware"]):
        notes.append(text)
    share = f"{100 * report['recall']:.0f}%"
    notes.append(
        f"predictor: simulated here. It names {share} of the next layer's experts, and {share} of "
        "those it names are right (--recall). A live run predicts with the model's gates. "
        "profile: each half of the trace starts with the most used experts of the other half in "
        "place; the other policies start empty."
    )
    notes.append(
        f"Routing: {report['routing']}, {report['decode_steps']} decode steps of "
        f"{Path(report['trace']).name}. x LRU: speed over that of lru. slower by: how much longer "
        f"a step takes than the fastest policy's, a 95% interval over {BLOCKS} consecutive parts "
        "of the trace; tied where it contains 0. All parts are of one text, and another text may "
        "order policies differently: if you can, use a trace of your own texts."
    )
    traced, top_k = report["routing_top_k"], report["top_k"]
    if traced != top_k:
        notes.append(
            f"The trace has {traced} experts a token, {report['model']} {top_k}: what a step takes "
            f"for experts counts {top_k}/{traced} times, in a cache of as many cycles."
        )
    what = "one stream"
    if (streams := report["streams"]) > 1:
        what = f"{streams:.3g} streams at once: tok/s is their sum, TPOT that of each"
    notes.append(
        f"A forecast of the virtual clock for {what}; nothing was run on the device. Compare its "
        "rows: no program's overhead is in it (moecache plan forecasts speeds with it)."
    )
    return notes
