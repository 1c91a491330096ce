"""Compare predictions with measurements: one run token by token, its counts, or many speeds.

moecache validate TRACE MEASURED --hardware ... --capacity ...: replays a trace, and compares with
MEASURED, a CSV with one row per decoded token and any of the columns wall_ms, stall_ms, io_ms,
compute_ms, read_bytes, cache_hit_pct (lines with # are comments).

moecache validate [TRACE] --counts FILE --capacity ...: holds a runtime's own hits, misses and bytes
(the log or statistics of imp, FreeToken, streamlx, colibri or llama.cpp's cache of experts;
BigMoeOnEdge's CSV) against a replay of that run's trace, or with --model of the nearest routing.

moecache validate --speeds ROWS: forecasts published speeds of runtimes, a CSV with the columns
runtime, model, precision, hardware, host_memory_GBps, link_GBps, disk_GBps, placement, context,
prompt, prefill_tok_s, decode_tok_s, source, note.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.main import print_result, wrapped
from lm_eval_moecache.engine.setting import MOST_READS, TOGETHER
from lm_eval_moecache.records.hardware import DEFAULT_PROFILE, load_hardware
from lm_eval_moecache.records.numbers import read_count
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.report.tables.text import padded
from lm_eval_moecache.trace.importers import load_trace
from moecache_plan.mechanisms import PROMPTS
from moecache_plan.models import load_model
from moecache_plan.nearest import nearest_trace
from moecache_plan.published import WITHIN, summary

if TYPE_CHECKING:
    from moecache_plan.counts import Counts

_PASSES = {"all": "prompts and decode steps", "decode": "decode steps"}


def add_arguments(parser: ArgumentParser) -> None:
    text = "the routing of the measured run"
    parser.add_argument("trace", type=str | None, nargs="?", help=text)
    text = "measurements of that run: a CSV with one row per token"
    parser.add_argument("measured", type=str | None, nargs="?", help=text)
    text = "published speeds of runtimes, a CSV: forecasts every row instead of replaying a trace"
    parser.add_argument("--speeds", type=str | None, help=text)
    text = "a runtime's own counts of its cache: its log, statistics, or CSV"
    parser.add_argument("--counts", type=str | None, help=text)
    text = "with --counts and no trace: the model that ran; the nearest shipped routing is replayed"
    parser.add_argument("--model", type=str | None, help=text)
    parser.add_argument("--hardware", type=str | None, help="profile, or YAML")
    parser.add_argument("--capacity", type=str | None, help="cache capacity: 4000MiB")
    parser.add_argument("--policy", type=str, default="on_demand", help="the engine's policy")
    parser.add_argument("--eviction", type=str, default="lru", help="the engine's eviction")
    order = "run an event's experts together once all have arrived, or as_they_arrive, resident "
    order += "ones first"
    parser.add_argument("--execute", type=str, default=TOGETHER, help=order)
    reads = "read requests per expert"
    parser.add_argument("--reads_per_expert", type=int, default=1, help=reads)


def run(arguments: Namespace) -> int:
    asked = ("trace", "measured", "hardware", "capacity")
    given = [name for name in asked if arguments[name] is not None]
    if arguments.model is not None and arguments.counts is None:
        raise ValueError(f"model={arguments.model!r} needs --counts.")
    if arguments.speeds is not None:
        if arguments.counts is not None:
            given = ["counts", *given]
        if given:
            raise ValueError(
                f"{given[0]}={arguments[given[0]]!r} cannot be combined with --speeds, whose rows "
                "say what was measured. Allowed with it: --json."
            )
        return _speeds(arguments)
    if arguments.counts is not None:
        return _counts(arguments)
    if missing := [name for name in asked if name not in given]:
        raise ValueError(
            f"{', '.join(missing)} is missing. Allowed: TRACE MEASURED --hardware NAME --capacity "
            "SIZE; [TRACE] --counts FILE; or --speeds ROWS."
        )
    return _tokens(arguments)


def _tokens(arguments: Namespace) -> int:
    from moecache_plan import validation

    trace = load_trace(arguments.trace)
    hardware = load_hardware(arguments.hardware)
    reads = read_count("reads_per_expert", arguments.reads_per_expert, least=1, most=MOST_READS)
    setting = validation.setting_of(trace, hardware, arguments, reads)
    measured = validation.read_measured(Path(arguments.measured))
    pair = validation.same_tokens(validation.simulate(trace, setting), measured)
    comparison = validation.closeness(*pair)
    return print_result(arguments.json, comparison, validation.as_text(comparison, measured))


def _counts(arguments: Namespace) -> int:
    from moecache_plan import counts as runtime
    from moecache_plan import validation

    if arguments.measured is not None:
        raise ValueError(f"measured={arguments.measured!r} cannot be combined with --counts.")
    if (arguments.trace is None) == (arguments.model is None):
        what = "is given twice" if arguments.trace else "is missing"
        raise ValueError(
            f"counts={arguments.counts!r}: the routing {what}. Allowed: the TRACE of that run, or "
            "--model NAME, which replays the nearest shipped routing."
        )
    counted = runtime.read_counts(arguments.counts)
    if arguments.trace is not None:
        trace = load_trace(arguments.trace)
        capacity = arguments.capacity or _counted_capacity(counted, trace.geometry.num_layers)
        note = "Routing: the given trace. If it is of the same prompt, counts should be equal, too."
    else:
        model = load_model(arguments.model)
        trace = load_trace(str(nearest_trace(model)))
        asked = parse_capacity(
            arguments.capacity or _counted_capacity(counted, model.num_layers), model.geometry()
        )
        slots = runtime.slots_per_layer(asked.total_bytes, model.geometry())
        # As many cycles as the model has.
        slots *= trace.geometry.top_k / model.top_k
        per_layer = asked.per_layer or counted.has_layer_caches
        capacity = (
            f"{round(slots)}/layer" if per_layer else str(round(slots * trace.geometry.num_layers))
        )
        note = (
            f"Routing: {trace.geometry.model}, the nearest shipped, with a cache of as many cycles "
            "as the run's. Another text, and perhaps another model: only rates compare, and these "
            "by some points at best."
        )
    arguments.capacity = capacity
    hardware = load_hardware(arguments.hardware or DEFAULT_PROFILE)
    setting = validation.setting_of(trace, hardware, arguments, 1)
    ours = runtime.replayed(trace, setting, counted)
    if arguments.trace is not None and counted.steps not in (None, ours["steps"]):
        note = (
            f"The counts are of {counted.steps} decode steps and the trace of {ours['steps']:.0f}: "
            "they are not of one run, and only rates compare."
        )
    about = {"trace": trace.name, "capacity": capacity, "own_trace": arguments.trace is not None}
    result = runtime.side_by_side(counted, ours, policy=arguments.policy, **about)
    head = (
        f"{counted.writer}'s counts ({_PASSES[counted.phase]}) against a replay of {trace.name}: "
        f"{arguments.policy}, {arguments.eviction}, a cache of {capacity}."
    )
    text = "\n".join([*wrapped(head), "", runtime.as_text(result), *wrapped(note), ""])
    return print_result(arguments.json, result, text)


def _counted_capacity(counted: Counts, num_layers: int) -> str:
    """Return the capacity that the runtime's own log states."""
    slots = counted.slots_per_layer
    if slots is None:
        raise ValueError(
            f"capacity is missing, and {counted.writer}'s counts do not state it. Allowed: "
            "--capacity 62/layer, 25%, 2GiB or 51experts."
        )
    return (
        f"{int(slots)}/layer" if counted.has_layer_caches else f"{round(slots * num_layers)}experts"
    )


def _speeds(arguments: Namespace) -> int:
    from moecache_plan import published

    rows, left_out = published.read_rows(Path(arguments.speeds))
    result = published.speeds_report([published.predict(row) for row in rows], left_out)
    text = speeds_text(result)
    unknown = sorted({row["runtime"] for row in result["rows"] if not row["has_profile"]})
    if unknown:
        said = f"{', '.join(unknown)}: no profile; forecast by the rows' placements alone."
        text += "\n".join([*wrapped(said), ""])
    if result["rows"]:
        text += (
            "\nForecast by the shipped constants, which were fitted on the rows of "
            "results/runtimes:\nfor those rows this is not a test. `moecache profile runtimes` "
            "forecasts each without its machine.\n"
        )
    return print_result(arguments.json, result, text)


def speeds_text(result: Mapping[str, Any]) -> str:
    """Return the comparison as text: every row, the rows left out, and the summaries."""
    lines = [
        (
            *(row["runtime"], row["model"], row["precision"], row["hardware"], row["mechanism"]),
            row["placed"],
            *map(_short, (row["predicted_tok_s"], row["measured_tok_s"])),
            f"{_short(row['low'])} to {_short(row['high'])}",
            *map(_factor, (row["factor"], row["rule_of_thumb_factor"], row["prefill_factor"])),
        )
        for row in result["rows"]
    ]
    heads = (
        *("runtime", "model", "precision", "hardware", "mechanism", "placement"),
        *("predicted", "measured", "range", "factor", "thumb", "prefill"),
    )
    text = f"{padded(heads, lines)}\n" if lines else ""
    for row in result["left_out"]:
        text += f"left out: {row['runtime']} {row['model']} {row['hardware']}: {row['reason']}\n"
    groups = {
        "decode": {
            **summary(row["factor"] for row in result["rows"]),
            "covered": result["covered"],
        },
        **result["mechanisms"],
        "rule of thumb": result["rule_of_thumb"],
        **{name: result[name] for name in PROMPTS.values()},
    }
    cells = [
        (
            name,
            group["rows"],
            group.get("machines", ""),
            _factor(group["median_factor"]),
            *(f"{100 * share:.0f}%" for share in group["within"].values()),
            "" if (share := group.get("covered")) is None else f"{100 * share:.0f}%",
        )
        for name, group in groups.items()
        if group["rows"]
    ]
    within = [f"within {most:g}" for most in WITHIN]
    titles = ("", "rows", "machines", "median factor", *within, "in range")
    return f"{text}\n{padded(titles, cells)}\n" if cells else text


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}"


def _factor(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"
