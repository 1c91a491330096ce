"""Show what a routing trace contains, convert it, or list the formats that can be read."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import Namespace

from lm_eval_moecache.cli.main import make_parser, parsed, print_result
from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.records.event import DECODE, PHASES
from lm_eval_moecache.records.numbers import counted, read_count, unknown_name_error
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.sizes import parse_bytes
from lm_eval_moecache.trace.importers import find_format, load_trace, trace_formats
from lm_eval_moecache.trace.trace import Trace, build_trace, with_sizes

ACTIONS = ("convert", "formats", "show")
_BY_GATES = "prefetch by the next layer's gate"
_NO_LOGITS = "it has no logits of the router"


def run_raw(argv: list[str]) -> int:
    """Run one action."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(f"usage: moecache trace {{{','.join(ACTIONS)}}} [options]\n\n{__doc__}\n")
        return 0
    action = argv[0]
    if action not in ACTIONS:
        raise unknown_name_error("trace", action, ACTIONS)
    parser = make_parser(f"moecache trace {action}", __doc__)
    if action != "formats":
        parser.add_argument(
            "file", type=str, help="a trace of any format, or a folder of responses"
        )
        silent = "experts per token, if the file does not state it"
        parser.add_argument("--top_k", type=int | None, help=silent)
        of_model = "the traced model: its top-k and layers, and (convert) its experts' sizes"
        parser.add_argument("--model", type=str | None, help=of_model)
    if action == "convert":
        suffix = "output file; the suffix selects the format: .parquet, .csv, .jsonl"
        parser.add_argument("out", type=str, help=suffix)
        size = "size of one expert: '12MiB'"
        parser.add_argument("--expert_bytes", type=str | None, help=size)
        parser.add_argument("--request", type=int | None, help="export only this request (from 0)")
    arguments = parsed(parser, argv[1:])
    report, text = {"formats": _formats, "show": _show, "convert": _convert}[action](arguments)
    return print_result(arguments.json, report, text)


def _shape(arguments: Namespace) -> tuple[RealModel | None, dict[str, Any]]:
    """Return the model that was traced, if given, and what its options say of a trace's shape."""
    if arguments.model is None:
        return None, {"top_k": arguments.top_k}
    model = load_real_model(arguments.model, "model")
    return model, {"top_k": arguments.top_k or model.top_k, "num_layers": model.num_layers}


def _formats(arguments: Namespace) -> tuple[dict[str, Any], str]:
    rows: list[dict[str, Any]] = [
        {
            "format": name,
            "suffixes": list(kind.suffixes),
            "about": kind.about,
            "holds": kind.holds,
            "written": kind.write is not None,
        }
        for name, kind in trace_formats().items()
    ]
    lines = []
    for row in rows:
        ways = "read and written" if row["written"] else "read"
        lines += [f"{row['format']} ({' '.join(row['suffixes'])}; {ways})", f"  {row['about']}"]
        lines += [f"  besides the ids: {row['holds']}"]
    return {"formats": rows}, "\n".join([*lines, ""])


def _show(arguments: Namespace) -> tuple[dict[str, Any], str]:
    """Return what a trace holds, and why it cannot answer a question (None where it can)."""
    file = arguments.file
    trace = load_trace(file, logits=True, predicted=True, **_shape(arguments)[1])
    geometry, columns = trace.geometry, trace.columns
    phases = columns.phase[trace.row_bounds[:-1][:: geometry.num_layers]]
    counts = {phase: int((phases == code).sum()) for code, phase in enumerate(PHASES)}
    names = ["ids"]
    names += [] if columns.weights is None else ["weights"]
    names += [] if trace.logits is None else ["logits"]
    names += [] if trace.predicted is None else [f"predictions {trace.predicted.depth} ahead"]
    names += [f"proposals of {len(trace.proposed)} prefetchers"] if trace.proposed else []
    names += ["drafts"] if trace.drafted.settled else []
    cycle = geometry.num_layers * geometry.top_k
    size = geometry.max_expert_bytes if trace.has_sizes else None
    only_steps, sizes = counts[DECODE] == len(phases), "give --expert_bytes or --emulate"
    weights, logits, recorded = columns.weights, trace.logits, _recorded(trace)
    no_gates = trace.predicted is None and not recorded
    questions = (
        ("hits and misses of lossless policies, Belady's bound", False, ""),
        ("what a prompt costs the cache", only_steps, "every token is a decode step"),
        ("times, and capacities in bytes", size is None, f"it has no sizes: {sizes}"),
        ("evictions and miss rules that use weights", weights is None, "it has no weights"),
        ("routing rules that use scores (open loop)", logits is None, _NO_LOGITS),
        (_BY_GATES, no_gates, "it has no predictions of the gates"),
    )
    facts = {
        "file": file,
        "format": find_format(file),
        "model": "" if geometry.model == Path(file).stem else geometry.model,
        "requests": len(trace.requests),
        "tokens": int((columns.layer == 0).sum()),
        "passes": {phase: count for phase, count in counts.items() if count},
        "layers": geometry.num_layers,
        "experts": geometry.num_experts,
        "top_k": geometry.top_k,
        "cycle": cycle,
        "cycle_share": cycle / (geometry.num_layers * geometry.num_experts),
        "columns": names,
        "expert_bytes": size,
        "prefetchers": recorded,
        "answers": {what: why if lacks else None for what, lacks, why in questions},
    }
    passes = ", ".join(f"{count} {phase}" for phase, count in facts["passes"].items())
    lines = [
        f"{file}: {facts['format']}, of {facts['model'] or 'a model it does not name'}",
        f"  {counted(facts['requests'], 'request')}, {counted(facts['tokens'], 'token')}, "
        f"passes: {passes}",
        f"  {facts['layers']} layers x {facts['experts']} experts, top-{facts['top_k']}: one token "
        f"needs {cycle} of {facts['layers'] * facts['experts']} (a cycle, "
        f"{facts['cycle_share']:.1%})",
        f"  columns: {', '.join(names)}",
        f"  one expert: {size} bytes" if size else "  no sizes of experts",
    ]
    for what, why in facts["answers"].items():
        which = f" as recorded: {' or '.join(recorded)}" if trace.predicted is None else ""
        yes = f"  yes  {what}{which if what == _BY_GATES else ''}"
        lines.append(yes if why is None else f"  no   {what}: {why}")
    return facts, "\n".join([*lines, ""])


def _recorded(trace: Trace) -> list[str]:
    """Return the gates' prefetchers whose proposals a trace holds, with their parameters."""
    told = []
    for recorded in map(json.loads, trace.proposed):
        name = recorded.pop("name", recorded.pop("class_path", ""))
        if not recorded.pop("predictor"):
            parameters = ", ".join(f"{key}={value}" for key, value in recorded.items())
            told.append(f"{name} ({parameters})" if parameters else name)
    return told


def _convert(arguments: Namespace) -> tuple[dict[str, Any], str]:
    out = Path(arguments.out)
    written = {kind.suffixes[0]: kind.write for kind in trace_formats().values() if kind.write}
    if out.suffix not in written:
        raise ValueError(
            f"out={arguments.out!r}: no format of that suffix is written. Allowed: "
            f"{', '.join(written)}."
        )
    expert_bytes = arguments.expert_bytes
    size = None if expert_bytes is None else parse_bytes(expert_bytes, "expert_bytes")
    model, shape = _shape(arguments)
    trace = load_trace(arguments.file, expert_bytes=size, **shape)
    if model is not None:
        trace = with_sizes(trace, model)
    if arguments.request is not None:
        trace = only_request(trace, arguments.request)
    written[out.suffix](trace, out)
    read_back = load_trace(str(out))
    np.testing.assert_array_equal(read_back.keys, trace.keys)
    facts = {"out": str(out), "passes": read_back.num_passes, "rows": len(read_back.columns.layer)}
    text = f"{out}: {facts['passes']} passes, {facts['rows']} rows, read back as they were.\n"
    return facts, text


def only_request(trace: Trace, number: int) -> Trace:
    """Return the trace of one request. Raises ValueError where it has no rows."""
    numbers = np.unique(trace.columns.request)
    read_count("request", number, most=int(numbers.max()))
    columns = trace.columns
    rows = columns.request == number
    if not rows.any():
        raise ValueError(f"request={number}: trace {trace.name} has no rows of it.")
    chosen = columns.at(rows)
    _, passes = np.unique(chosen.pass_index, return_inverse=True)
    request_columns = replace(chosen, pass_index=passes.astype(np.int32))
    return build_trace(
        trace.name, trace.geometry, request_columns, seed=trace.seed, has_sizes=trace.has_sizes
    )
