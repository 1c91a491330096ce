"""What `moecache trace` shows, converts and lists."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.records.command import Report
from lm_eval_moecache.records.event import DECODE, PHASES
from lm_eval_moecache.records.numbers import counted, read_count
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.sizes import parse_bytes
from lm_eval_moecache.trace.importers import find_format, load_trace
from lm_eval_moecache.trace.importers import trace_formats as known_formats
from lm_eval_moecache.trace.trace import Trace, build_trace, with_sizes

_BY_GATES = "prefetch by the next layer's gate"
_NO_LOGITS = "it has no logits of the router"


def trace_show(file: str, *, top_k: int | None = None, model: str | None = None) -> Report:
    """Show what a trace holds, and which questions it can answer, with the reason where it cannot.

    Args:
        file: a trace of any format, or a folder of responses
        top_k: experts per token, if the file does not state it
        model: the traced model: its top-k and layers
    """
    trace = load_trace(file, logits=True, predicted=True, **_shape(model, top_k)[1])
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
    facts: dict[str, Any] = {
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
    return Report(facts, "\n".join(lines))


def _recorded(trace: Trace) -> list[str]:
    """Return the gates' prefetchers whose proposals a trace holds, with their parameters."""
    told = []
    for recorded in map(json.loads, trace.proposed):
        name = recorded.pop("name", recorded.pop("class_path", ""))
        if not recorded.pop("predictor"):
            parameters = ", ".join(f"{key}={value}" for key, value in recorded.items())
            told.append(f"{name} ({parameters})" if parameters else name)
    return told


def trace_convert(
    file: str,
    out: str,
    *,
    top_k: int | None = None,
    model: str | None = None,
    expert_bytes: str | None = None,
    request: int | None = None,
) -> Report:
    """Convert a trace into another format, and read it back.

    Args:
        file: a trace of any format, or a folder of responses
        out: output file; the suffix selects the format: .parquet, .csv, .jsonl
        top_k: experts per token, if the file does not state it
        model: the traced model: its top-k, layers and sizes of experts
        expert_bytes: size of one expert: '12MiB'
        request: export only this request (from 0)
    """
    written = {kind.suffixes[0]: kind.write for kind in known_formats().values() if kind.write}
    target = Path(out)
    if target.suffix not in written:
        raise ValueError(
            f"out={out!r}: no format of that suffix is written. Allowed: {', '.join(written)}."
        )
    size = None if expert_bytes is None else parse_bytes(expert_bytes, "expert_bytes")
    real, shape = _shape(model, top_k)
    trace = load_trace(file, expert_bytes=size, **shape)
    if real is not None:
        trace = with_sizes(trace, real)
    if request is not None:
        trace = only_request(trace, request)
    written[target.suffix](trace, target)
    read_back = load_trace(out)
    np.testing.assert_array_equal(read_back.keys, trace.keys)
    facts = {"out": out, "passes": read_back.num_passes, "rows": len(read_back.columns.layer)}
    text = f"{out}: {facts['passes']} passes, {facts['rows']} rows, read back as they were."
    return Report(facts, text)


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


def trace_formats() -> Report:
    """List the formats of traces that can be read, and what each holds."""
    rows: list[dict[str, Any]] = [
        {
            "format": name,
            "suffixes": list(kind.suffixes),
            "about": kind.about,
            "holds": kind.holds,
            "written": kind.write is not None,
        }
        for name, kind in known_formats().items()
    ]
    lines = []
    for row in rows:
        ways = "read and written" if row["written"] else "read"
        lines += [f"{row['format']} ({' '.join(row['suffixes'])}; {ways})", f"  {row['about']}"]
        lines += [f"  besides the ids: {row['holds']}"]
    return Report({"formats": rows}, "\n".join(lines))


def _shape(model: str | None, top_k: int | None) -> tuple[RealModel | None, dict[str, Any]]:
    """Return the model that was traced, if given, and what the options say of a trace's shape."""
    if model is None:
        return None, {"top_k": top_k}
    real = load_real_model(model, "model")
    return real, {"top_k": top_k or real.top_k, "num_layers": real.num_layers}
