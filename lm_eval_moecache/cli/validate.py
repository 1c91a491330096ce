"""Hold predictions against measurements: of one run token by token, or of many runs' speeds.

moecache validate TRACE MEASURED --hardware ... --capacity ...: replays a trace, and compares with
MEASURED, a CSV with one row per decoded token and any of the columns wall_ms, stall_ms, io_ms,
compute_ms, read_bytes, cache_hit_pct (lines with # are comments).

moecache validate --speeds ROWS: forecasts published speeds of runtimes, a CSV with the columns
runtime, model, precision, hardware, host_memory_GBps, link_GBps, disk_GBps, placement, context,
prompt, prefill_tok_s, decode_tok_s, source, note.
"""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.main import print_result
from lm_eval_moecache.engine.setting import MOST_READS, TOGETHER
from lm_eval_moecache.records.files import check_output
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.numbers import read_count
from lm_eval_moecache.report.plots import PICTURES
from lm_eval_moecache.trace.importers import load_trace


def add_arguments(parser: ArgumentParser) -> None:
    text = "the routing of the measured run"
    parser.add_argument("trace", type=str | None, nargs="?", help=text)
    text = "measurements of that run: a CSV with one row per token"
    parser.add_argument("measured", type=str | None, nargs="?", help=text)
    text = "published speeds of runtimes, a CSV: forecasts every row instead of replaying a trace"
    parser.add_argument("--speeds", type=str | None, help=text)
    parser.add_argument("--hardware", type=str | None, help="profile, or YAML")
    parser.add_argument("--capacity", type=str | None, help="cache capacity: 4000MiB")
    parser.add_argument("--policy", type=str, default="on_demand", help="the engine's policy")
    parser.add_argument("--eviction", type=str, default="lru", help="the engine's eviction")
    order = "run an event's experts together once all have arrived, or as_they_arrive, resident "
    order += "ones first"
    parser.add_argument("--execute", type=str, default=TOGETHER, help=order)
    reads = "read requests per expert"
    parser.add_argument("--reads_per_expert", type=int, default=1, help=reads)
    names = "column names: '{wall_ms: total_ms}'"
    parser.add_argument("--columns", type=dict[str, str] | None, help=names)
    parser.add_argument("--tokens", type=str, default=":", help="FIRST:LAST, as in Python")
    text = "plot predicted and measured times per token, or speeds, to this file"
    parser.add_argument("--plot", type=str | None, help=text)


def run(arguments: Namespace) -> int:
    asked = ("trace", "measured", "hardware", "capacity")
    given = [name for name in asked if getattr(arguments, name) is not None]
    if arguments.speeds is not None:
        if given:
            raise ValueError(
                f"{given[0]}={getattr(arguments, given[0])!r} does not go with --speeds, whose "
                "rows say where they were measured. Allowed with it: --plot, --json."
            )
        return _speeds(arguments)
    if missing := [name for name in asked if name not in given]:
        raise ValueError(
            f"{', '.join(missing)} is missing. Allowed: TRACE MEASURED --hardware NAME --capacity "
            "SIZE; or --speeds ROWS."
        )
    return _tokens(arguments)


def _speeds(arguments: Namespace) -> int:
    from lm_eval_moecache.report import speeds

    rows, left_out = speeds.read_rows(Path(arguments.speeds))
    result = speeds.compare([speeds.foretell(row) for row in rows], left_out)
    if arguments.plot is not None:
        speeds.plot(result["rows"], Path(arguments.plot))
    return print_result(arguments.json, result, speeds.as_text(result))


def _tokens(arguments: Namespace) -> int:
    from lm_eval_moecache.analysis import validation

    tokens = validation.read_tokens(arguments.tokens)
    if arguments.plot is not None:
        check_output("plot", arguments.plot, PICTURES)
    trace = load_trace(arguments.trace)
    hardware = load_hardware(arguments.hardware)
    reads = read_count("reads_per_expert", arguments.reads_per_expert, least=1, most=MOST_READS)
    setting = validation.setting_of(trace, hardware, arguments, reads)
    measured = validation.read_measured(Path(arguments.measured), arguments.columns or {})
    predicted, measured_tokens = validation.same_tokens(
        validation.foretell(trace, setting), measured, tokens
    )
    comparison = validation.compare(predicted, measured_tokens)
    if arguments.plot is not None:
        validation.plot(predicted, measured_tokens, Path(arguments.plot))
    return print_result(arguments.json, comparison, validation.as_text(comparison, measured_tokens))
