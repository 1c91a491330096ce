"""What `moecache choose` ranks and prints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval_moecache.emulate.models import as_stored
from lm_eval_moecache.emulate.stored import load_stored
from lm_eval_moecache.records.command import Report, aligned, listed, wrapped
from lm_eval_moecache.records.hardware import same_card_note
from lm_eval_moecache.records.numbers import read_count, read_number
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.importers import trace_formats
from moecache_plan import losses
from moecache_plan.detect import parse_machine
from moecache_plan.losses_page import lines
from moecache_plan.machines import SYSTEM, Machine
from moecache_plan.models import load_model
from moecache_plan.nearest import nearest_trace
from moecache_plan.plan import MOST_CONTEXT
from moecache_plan.ranking import (
    BLOCKS,
    CONTENDERS,
    FUTURE,
    HOST,
    PREDICTOR,
    PROFILE,
    RECALL,
    TIED,
    configs_of,
    find,
)


def choose(
    model_or_trace: str,
    *,
    capacity: str = "25%",
    hardware: str | None = None,
    ram: str | None = None,
    host_memory: str | None = None,
    disk: str | None = None,
    precision: str | None = None,
    trace: str | None = None,
    context: int = 4096,
    recall: float = RECALL,
    lossy: str | None = None,
    task: str | None = None,
) -> Report:
    """Rank lossless policies for a model at a capacity: how fast each is, and what it needs.

    A MODEL is replayed on the most similar shipped trace, with the model's sizes; a TRACE as it was
    recorded. Every policy serves the whole trace, from an empty cache unless its experts are placed
    beforehand. No policy changes an output: all have the accuracy of the unmodified model.
    `--lossy` prints what a lossy rule lost in publications.

    Args:
        model_or_trace: a trace (give .json files and folders by --trace); or a model: a name, a hub
            id, or a config.json, a model's folder, a GGUF or its index
        capacity: cache size: 5% of all expert bytes, 2GiB, 51experts
        hardware: a card, Mac or chip as its box has it (rtx-4090-24gb, M4 Max 64GB), or a YAML;
            none: a processor alone; default: the machine it runs on
        ram: the machine's RAM: 64GB
        host_memory: nominal rate of the RAM: 83GB/s, or channels and MT/s: 2x5600
        disk: the drive's scattered reads: 3.5GB/s
        precision: stored weights: bf16, int4, a GGUF type such as q4_k_m, mxfp4, awq, 4.5bpw;
            default: as published
        trace: with a model: trace of its routing; default: the most similar shipped one
        context: with a model: tokens that a decoded one attends to
        recall: recall and precision of the predictors, which an oracle simulates
        lossy: also print what a lossy rule lost in publications: a composition, a routing or miss
            algorithm, prune, merge or quantise
        task: with --lossy: a published task (gsm8k, mmlu ...), generate or choice
    """
    read_number("--recall", recall, above=0, most=1)
    read_count("--context", context, least=1, most=MOST_CONTEXT)
    asked = _read_lossy(lossy, task)
    machine = parse_machine(hardware, ram=ram, host_memory=host_memory, disk=disk)
    if machine.cards > 1:
        raise ValueError(
            f"hardware={hardware!r}: one cache is on one card. Allowed: {machine.name}."
        )
    file, model = _read_subject(model_or_trace, precision=precision, trace=trace)
    if model is None and asked is not None:
        raise ValueError(
            f"--lossy={lossy!r} needs a model, but {file!r} is a trace. Allowed: "
            f"`moecache choose MODEL --trace {file} --lossy {lossy}`."
        )
    if model is not None:
        _check_ram(model, machine, capacity)
    report = {
        **find(file, model, configs_of(capacity, machine, model, recall), context),
        "hardware": machine.name,
        "machine": machine.about or machine.title,
        "recall": recall,
    }
    if model is not None and asked is not None:
        held = parse_capacity(capacity, model.geometry()).total_bytes
        resident = min(held / model.all_expert_bytes, 1.0)
        report["losses"] = losses.published(model, **asked, resident=resident)
    return Report(report, lambda: _text(report, machine))


def _read_lossy(lossy: str | None, task: str | None) -> dict[str, str] | None:
    """Return what is asked of a lossy rule, checked; None without `--lossy`."""
    if lossy is None:
        if task is not None:
            raise ValueError(f"--task={task!r} needs --lossy.")
        return None
    rule, of = losses.known_names(lossy, task or losses.GENERATE)
    losses.rules_of(rule)
    losses.kind_of(of)
    return {"lossy": rule, "task": of}


def _check_ram(model: RealModel, machine: Machine, capacity: str) -> None:
    """Refuse a known RAM without room for what lies in it: the cache of a processor alone, with a
    card all experts."""
    if machine.shares_memory or machine.is_guess("host_memory_bytes"):
        return
    needed: float = model.all_expert_bytes
    if machine.is_processor:
        needed = parse_capacity(capacity, model.geometry()).total_bytes + model.dense_bytes
    if needed > machine.ram - SYSTEM:
        raise ValueError(
            f"ram={machine.ram / 1e9:.3g}GB is too small for the {needed / 1e9:.1f} GB of "
            f"{model.name} ({model.stored.name}) that lie in it and {SYSTEM / 1e9:g} GB of the "
            "system. Allowed: more, fewer bits (--precision), another --hardware, or on a "
            "processor alone a smaller --capacity."
        )


def _read_subject(
    subject: str, *, precision: str | None, trace: str | None
) -> tuple[str, RealModel | None]:
    """Return the trace to replay, and the model by which its layers are charged, if one is given.

    Raises ValueError for an option that cannot be combined with it.
    """
    suffixes = {suffix for kind in trace_formats().values() for suffix in kind.suffixes}
    # A .json is a model's configuration; routing in one is given by --trace.
    if Path(subject).suffix in suffixes - {".json"}:
        for key, value in {"precision": precision, "trace": trace}.items():
            if value is not None:
                raise ValueError(
                    f"--{key}={value!r} needs a model, but {subject!r} is a trace. Allowed: "
                    f"`moecache choose MODEL --trace {subject}`, which charges a model's layers."
                )
        return subject, None
    try:
        model = load_model(subject)
    except ValueError as error:
        if not Path(subject).exists():
            raise
        hint = f"If it is a trace, name its model: `moecache choose MODEL --trace {subject}`."
        raise ValueError(f"{error} {hint}") from error
    if precision is not None:
        model = as_stored(model, load_stored(precision))
    return trace or str(nearest_trace(model)), model


# --- the page ---


def _text(report: Mapping[str, Any], machine: Machine) -> str:
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
    notes = [line for note in notes_of(report, machine) for line in wrapped(note)]
    table = [*wrapped(_verdict(report)), "", *aligned(cells, "<>>>><<"), ""]
    lossy = ["", *lines(report["losses"])] if "losses" in report else [""]
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
        f"{report['model']}{precision} on {report['machine']} with a cache of "
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


def notes_of(report: Mapping[str, Any], machine: Machine) -> list[str]:
    """Return what the figures are, and what they are not, a paragraph each."""
    notes = []
    if report["left_out"]:
        names = ", ".join(report["left_out"])
        why = f"{report['hardware']} has no figures for its host's compute"
        if machine.is_processor:
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
    (*traced, traced_k), (*sizes, top_k) = report["routing_sizes"], report["sizes"]
    if traced != sizes:
        notes.append(
            f"It is a stand-in of as many cycles: {traced[0]} layers x {traced[1]} experts, "
            f"{traced_k} a token, for {sizes[0]} x {sizes[1]}, {top_k} a token."
        )
    elif traced_k != top_k:
        notes.append(
            f"The trace has {traced_k} experts a token, {report['model']} {top_k}: what a step "
            f"takes for experts counts {top_k}/{traced_k} times, in a cache of as many cycles."
        )
    if not report["in_regime"]:
        notes.append(
            "So many cycles are nearly all experts of the replayed trace, which cannot show how "
            "many of them miss: --trace takes another."
        )
    what = "one stream"
    if (streams := report["streams"]) > 1:
        what = f"{streams:.3g} streams at once: tok/s is their sum, TPOT that of each"
    notes.append(
        f"A forecast of the virtual clock for {what}; nothing was run on the device. Compare its "
        "rows: no program's overhead is in it (moecache plan forecasts speeds with it)."
    )
    return notes
