"""Say what a routing trace holds (show), convert it, list the formats that are read."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.main import parsed
from lm_eval_moecache.cli.parsers import make_parser, print_result
from lm_eval_moecache.records.emulation import load_real_model
from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.event import PHASES
from lm_eval_moecache.records.numbers import read_count
from lm_eval_moecache.records.sizes import parse_bytes
from lm_eval_moecache.trace.convert import with_sizes
from lm_eval_moecache.trace.importers import find_format, load_trace, trace_formats
from lm_eval_moecache.trace.trace import Trace, build_trace

ACTIONS = ("convert", "formats", "show")


def run_raw(argv: list[str]) -> int:
    """Run one action."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(f"usage: moecache trace {{{','.join(ACTIONS)}}} [options]\n\n{__doc__}\n")
        return 0
    if argv[0] not in ACTIONS:
        raise unknown("trace", argv[0], ACTIONS)
    arguments = parsed(parser_of(argv[0]), argv[1:])
    if argv[0] == "formats":
        return _formats(arguments)
    return _show(arguments) if argv[0] == "show" else _convert(arguments)


def parser_of(action: str) -> ArgumentParser:
    """Return the parser of an action."""
    made = make_parser(f"moecache trace {action}", __doc__)
    if action == "formats":
        return made
    made.add_argument("file", type=str, help="a trace of any format, or a folder of responses")
    made.add_argument("--top_k", type=int | None, help="experts a token, where the file is silent")
    if action == "convert":
        made.add_argument(
            "out", type=str, help="its suffix is the format's: .parquet, .csv, .jsonl"
        )
        made.add_argument("--model", type=str | None, help="whose sizes it gets: a name, a config")
        made.add_argument("--expert_bytes", type=str | None, help="size of one expert: '12MiB'")
        made.add_argument("--request", type=int | None, help="this one alone, from 0")
    return made


def _formats(arguments: Namespace) -> int:
    rows: list[dict[str, Any]] = [
        {
            "format": name,
            "suffixes": list(kind.suffixes),
            "about": (kind.__doc__ or "").split("\n")[0],
            "holds": kind.holds,
            "written": kind.written,
        }
        for name, kind in trace_formats().items()
    ]
    lines = []
    for row in rows:
        ways = "read and written" if row["written"] else "read"
        lines += [f"{row['format']} ({' '.join(row['suffixes'])}; {ways})", f"  {row['about']}"]
        lines += [f"  beside the ids: {row['holds']}"]
    return print_result(arguments.json, {"formats": rows}, "\n".join([*lines, ""]))


def _show(arguments: Namespace) -> int:
    found = about(arguments.file, arguments.top_k)
    lines = [
        f"{found['file']}: {found['format']}, of {found['model'] or 'a model it does not name'}"
    ]
    passes = ", ".join(f"{count} {phase}" for phase, count in found["passes"].items())
    lines += [
        f"  {found['requests']} requests, {found['tokens']} tokens, passes: {passes}",
        f"  {found['layers']} layers x {found['experts']} experts, top-{found['top_k']}: one token "
        f"needs {found['cycle']} of {found['layers'] * found['experts']} (a cycle, "
        f"{found['cycle_share']:.1%})",
        f"  columns: {', '.join(found['columns'])}",
    ]
    size = found["expert_bytes"]
    lines.append(f"  one expert: {size} bytes" if size else "  no sizes of experts")
    lines += [f"  {'yes' if why is None else 'no '}  {what}{'' if why is None else f': {why}'}"
              for what, why in found["answers"].items()]  # fmt: skip
    return print_result(arguments.json, found, "\n".join([*lines, ""]))


def about(file: str, top_k: int | None = None) -> dict[str, Any]:
    """Return what a trace holds, and why it cannot answer a question (None where it can)."""
    trace = load_trace(file, logits=True, predicted=True, top_k=top_k)
    geometry, columns = trace.geometry, trace.columns
    phases = columns.phase[trace.row_bounds[:-1][:: geometry.num_layers]]
    names = ["ids"]
    names += [] if columns.weights is None else ["weights"]
    names += [] if trace.logits is None else ["logits"]
    names += [] if trace.predicted is None else [f"predictions {trace.predicted.depth} ahead"]
    names += [f"proposals of {len(trace.proposed)} prefetchers"] if trace.proposed else []
    names += ["drafts"] if trace.drafted.settled else []
    only_steps = set(phases.tolist()) == {PHASES.index("decode")}
    cycle = geometry.num_layers * geometry.top_k
    return {
        "file": file,
        "format": find_format(file),
        "model": "" if geometry.model == Path(file).stem else geometry.model,
        "requests": len(trace.requests),
        "tokens": int((columns.layer == 0).sum()),
        "passes": {
            phase: int((phases == code).sum())
            for code, phase in enumerate(PHASES)
            if (phases == code).any()
        },
        "layers": geometry.num_layers,
        "experts": geometry.num_experts,
        "top_k": geometry.top_k,
        "cycle": cycle,
        "cycle_share": cycle / (geometry.num_layers * geometry.num_experts),
        "columns": names,
        "expert_bytes": geometry.max_expert_bytes if trace.has_sizes else None,
        "answers": _answers(trace, only_steps),
    }


def _answers(trace: Trace, only_steps: bool) -> dict[str, str | None]:
    no_weights = None if trace.columns.weights is not None else "it has no weights"
    no_logits = None if trace.logits is not None else "it has no logits of the router"
    no_gates = None if trace.predicted is not None else "it has no predictions of the gates"
    no_sizes = None if trace.has_sizes else "it has no sizes: give --expert_bytes or --emulate"
    return {
        "hits and misses of lossless policies, Belady's bound": None,
        "what a prompt costs the cache": "every token is a decode step" if only_steps else None,
        "times, and capacities in bytes": no_sizes,
        "evictions by weight, misses answered by weight": no_weights,
        "routing that looks at scores (open loop)": no_logits,
        "prefetch by the next layer's gate": no_gates,
    }


def _convert(arguments: Namespace) -> int:
    out = Path(arguments.out)
    kinds = [
        kind for kind in trace_formats().values() if kind.written and kind.suffixes[0] == out.suffix
    ]
    if not kinds:
        known = ", ".join(k.suffixes[0] for k in trace_formats().values() if k.written)
        raise ValueError(
            f"out={arguments.out!r}: no format of that suffix is written. Allowed: {known}."
        )
    model = None if arguments.model is None else load_real_model(arguments.model, "model")
    size = (
        None
        if arguments.expert_bytes is None
        else parse_bytes(arguments.expert_bytes, "expert_bytes")
    )
    top_k = arguments.top_k or (None if model is None else model.top_k)
    trace = load_trace(arguments.file, expert_bytes=size, top_k=top_k)
    if model is not None:
        trace = with_sizes(trace, model)
    if arguments.request is not None:
        trace = only_request(trace, arguments.request)
    kinds[0].write(trace, out)
    again = load_trace(str(out))
    np.testing.assert_array_equal(again.keys, trace.keys)
    told = {"out": str(out), "passes": again.num_passes, "rows": len(again.columns.layer)}
    text = f"{out}: {told['passes']} passes, {told['rows']} rows, read back as they were.\n"
    return print_result(arguments.json, told, text)


def only_request(trace: Trace, number: int) -> Trace:
    """Return the rows of one request."""
    numbers = np.unique(trace.columns.request)
    read_count("request", number, most=int(numbers.max()))
    columns = trace.columns
    rows = columns.request == number
    if not rows.any():
        raise ValueError(f"request={number}: trace {trace.name} has no rows of it.")
    kept: dict[str, Any] = {
        name: None if getattr(columns, name) is None else getattr(columns, name)[rows]
        for name in ("request", "phase", "token", "layer", "experts", "weights")
    }
    _, passes = np.unique(columns.pass_index[rows], return_inverse=True)
    own = replace(columns, pass_index=passes.astype(np.int32), **kept)
    return build_trace(trace.name, trace.geometry, own, seed=trace.seed, has_sizes=trace.has_sizes)
