"""What `moecache validate` compares and prints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_moecache.engine.setting import TOGETHER
from lm_eval_moecache.records.command import Report, wrapped
from lm_eval_moecache.records.hardware import DEFAULT_PROFILE, load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.report.tables.text import padded
from lm_eval_moecache.trace.importers import load_trace
from moecache_plan.mechanisms import PROMPTS
from moecache_plan.models import load_model
from moecache_plan.nearest import nearest_trace
from moecache_plan.published import WITHIN, summary
from moecache_plan.validation import Ran

if TYPE_CHECKING:
    from moecache_plan.counts import Counts

_PASSES = {"all": "prompts and decode steps", "decode": "decode steps"}


def validate(
    trace: str | None = None,
    measured: str | None = None,
    *,
    speeds: str | None = None,
    counts: str | None = None,
    model: str | None = None,
    hardware: str | None = None,
    capacity: str | None = None,
    policy: str = "on_demand",
    eviction: str = "lru",
    execute: str = TOGETHER,
    reads_per_expert: int = 1,
) -> Report:
    """Compare predictions with measurements: one run token by token, its counts, or many speeds.

    moecache validate TRACE MEASURED --hardware ... --capacity ...: replays a trace, and compares
    with MEASURED, a CSV with one row per decoded token and any of the columns wall_ms, stall_ms,
    io_ms, compute_ms, read_bytes, cache_hit_pct (lines with # are comments).

    moecache validate [TRACE] --counts FILE --capacity ...: holds a runtime's own hits, misses and
    bytes (the log or statistics of imp, FreeToken, streamlx, colibri or llama.cpp's cache of
    experts; BigMoeOnEdge's CSV) against a replay of that run's trace, or with --model of the
    nearest routing.

    moecache validate --speeds ROWS: forecasts published speeds of runtimes, a CSV with the columns
    runtime, model, precision, hardware, host_memory_GBps, link_GBps, disk_GBps, placement, context,
    prompt, prefill_tok_s, decode_tok_s, source, note.

    Args:
        trace: the routing of the measured run
        measured: measurements of that run: a CSV with one row per token
        speeds: published speeds of runtimes, a CSV: forecasts every row instead of replaying a
            trace
        counts: a runtime's own counts of its cache: its log, statistics, or CSV
        model: with --counts and no trace: the model that ran; the nearest shipped routing is
            replayed
        hardware: profile, or YAML
        capacity: cache capacity: 4000MiB
        policy: the engine's policy
        eviction: the engine's eviction
        execute: run an event's experts together once all have arrived, or as_they_arrive, resident
            ones first
        reads_per_expert: read requests per expert
    """
    asked = {"trace": trace, "measured": measured, "hardware": hardware, "capacity": capacity}
    given = {name: value for name, value in asked.items() if value is not None}
    if model is not None and counts is None:
        raise ValueError(f"model={model!r} needs --counts.")
    if speeds is not None:
        for name, value in {**({"counts": counts} if counts else {}), **given}.items():
            raise ValueError(
                f"{name}={value!r} cannot be combined with --speeds, whose rows say what was "
                "measured. Allowed with it: --json."
            )
        return _speeds(speeds)
    how = {"policy": policy, "eviction": eviction, "execute": execute}
    ran = Ran(capacity or "", **how, reads_per_expert=reads_per_expert)
    if counts is not None:
        if measured is not None:
            raise ValueError(f"measured={measured!r} cannot be combined with --counts.")
        return _counts(counts, trace, model, hardware or DEFAULT_PROFILE, ran)
    if trace is None or measured is None or hardware is None or capacity is None:
        missing = ", ".join(name for name in asked if name not in given)
        raise ValueError(
            f"{missing} is missing. Allowed: TRACE MEASURED --hardware NAME --capacity SIZE; "
            "[TRACE] --counts FILE; or --speeds ROWS."
        )
    return _tokens(trace, measured, hardware, ran)


def _tokens(file: str, measured: str, hardware: str, ran: Ran) -> Report:
    from moecache_plan import validation

    trace = load_trace(file)
    setting = ran.setting(trace, load_hardware(hardware))
    series = validation.read_measured(Path(measured))
    pair = validation.same_tokens(validation.simulate(trace, setting), series)
    comparison = validation.closeness(*pair)
    return Report(comparison, validation.as_text(comparison, series))


def _counts(counts: str, file: str | None, model: str | None, hardware: str, ran: Ran) -> Report:
    from moecache_plan import counts as runtime

    if (file is None) == (model is None):
        what = "is given twice" if file else "is missing"
        raise ValueError(
            f"counts={counts!r}: the routing {what}. Allowed: the TRACE of that run, or "
            "--model NAME, which replays the nearest shipped routing."
        )
    counted = runtime.read_counts(counts)
    if model is None:
        trace = load_trace(str(file))
        capacity = ran.capacity or _counted_capacity(counted, trace.geometry.num_layers)
        note = "Routing: the given trace. If it is of the same prompt, counts should be equal, too."
    else:
        real = load_model(model)
        trace = load_trace(str(nearest_trace(real)))
        capacity = ran.capacity or _counted_capacity(counted, real.num_layers)
        asked = parse_capacity(capacity, real.geometry())
        slots = runtime.slots_per_layer(asked.total_bytes, real.geometry())
        # As many cycles as the model has.
        slots *= trace.geometry.top_k / real.top_k
        per_layer = asked.per_layer or counted.has_layer_caches
        capacity = (
            f"{round(slots)}/layer" if per_layer else str(round(slots * trace.geometry.num_layers))
        )
        note = (
            f"Routing: {trace.geometry.model}, the nearest shipped, with a cache of as many cycles "
            "as the run's. Another text, and perhaps another model: only rates compare, and these "
            "by some points at best."
        )
    ran = ran._replace(capacity=capacity)
    ours = runtime.replayed(trace, ran.setting(trace, load_hardware(hardware)), counted)
    if file is not None and counted.steps not in (None, ours["steps"]):
        note = (
            f"The counts are of {counted.steps} decode steps and the trace of {ours['steps']:.0f}: "
            "they are not of one run, and only rates compare."
        )
    about = {"trace": trace.name, "capacity": capacity, "own_trace": file is not None}
    result = runtime.side_by_side(counted, ours, policy=ran.policy, **about)
    head = (
        f"{counted.writer}'s counts ({_PASSES[counted.phase]}) against a replay of {trace.name}: "
        f"{ran.policy}, {ran.eviction}, a cache of {capacity}."
    )
    return Report(result, "\n".join([*wrapped(head), "", runtime.as_text(result), *wrapped(note)]))


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


def _speeds(file: str) -> Report:
    from moecache_plan import published

    rows, left_out = published.read_rows(Path(file))
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
    return Report(result, text)


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
