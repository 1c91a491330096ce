"""Turns the ledger's passes into the metrics users see. Field names are final; see results/README.

Rates of nothing (no prediction made, no token decoded) are None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lm_eval_moecache.records.event import PREFILL, VERIFY
from lm_eval_moecache.records.ledger import GENERATE, PassRecord, RequestRecord, total
from lm_eval_moecache.report.described import METRICS, Totals, ms, share

Metrics = dict[str, Any]


def totals(passes: Sequence[PassRecord]) -> Totals:
    """Add up what some passes counted."""
    tokens = sum(p.num_tokens for p in passes)
    return Totals(total(passes), tokens, sum(p.duration_s for p in passes))


def rates(passes: Sequence[PassRecord], prefix: str = "") -> Metrics:
    """Rates per request (unique experts per event), for all passes or one phase of them."""
    found = totals(passes)
    return {prefix + name: m.of(found) for name, m in METRICS.items() if m.of and m.by_phase}


def cache_metrics(passes: Sequence[PassRecord]) -> Metrics:
    """Everything about a set of passes that does not need to know whose requests they served."""
    found = totals(passes)
    return {
        **rates(passes),
        **rates([p for p in passes if p.phase == PREFILL], "prefill_"),
        **rates([p for p in passes if p.phase != PREFILL], "decode_"),
        **{name: m.of(found) for name, m in METRICS.items() if m.of and not m.by_phase},
    }


def draft_metrics(passes: Sequence[PassRecord]) -> Metrics:
    """The figures of drafting; of verifying nothing where no pass had drafts to verify."""
    verifying = [p for p in passes if p.drafted]
    drafting_s = sum(p.draft_s for p in passes)
    if not verifying and not drafting_s:
        return {}
    time_share = share(drafting_s, sum(p.duration_s for p in passes if p.phase != PREFILL))
    if not verifying:
        # A draft that only reads along (`prefetch=draft` without speculation).
        return {"draft_time_share": time_share}
    accepted = sum(p.accepted for p in verifying)
    return {
        **rates([p for p in passes if p.phase == VERIFY], "verify_"),
        "draft_acceptance": accepted / sum(p.drafted for p in verifying),
        "accepted_per_verify": accepted / len(verifying),
        "draft_time_share": time_share,
    }


def host_metrics(passes: Sequence[PassRecord]) -> Metrics:
    """The figures of host compute; nothing where the host executed nothing."""
    executed = sum(p.host_executed for p in passes)
    if not executed:
        return {}
    duration_s = sum(p.duration_s for p in passes)
    return {
        "host_share": share(executed, sum(p.executed for p in passes)),
        "host_utilization": share(sum(p.host_s for p in passes), duration_s),
        "host_wait_ms_per_token": ms(
            share(sum(p.host_wait_s for p in passes), sum(p.num_tokens for p in passes))
        ),
    }


def inter_token_ms(request: RequestRecord) -> list[float]:
    """Return the wait before each token after the first; what a verify pass adds has none."""
    waits: list[float] = []
    for record in request.passes[1:]:
        if record.phase != PREFILL:
            waits += [record.duration_s * 1000, *[0.0] * record.accepted]
    # The last pass may have accepted drafts that come after the request's end.
    return waits[: max((request.output_tokens or 0) - 1, len(request.passes) - 1)]


def request_metrics(request: RequestRecord) -> dict[str, float]:
    """The figures of one request, as they are put on its harness Instance (milliseconds)."""
    durations_ms = [p.duration_s * 1000 for p in request.passes]
    if not durations_ms:
        return {}
    values: dict[str, float] = {"e2el_ms": sum(durations_ms)}
    if request.kind == GENERATE:
        # A trace may begin after the prompt: then every pass is a token after the first.
        first = request.passes[0].phase == PREFILL
        if first:
            values["ttft_ms"] = durations_ms[0]
        tokens = request.output_tokens or 0
        if values["e2el_ms"]:  # free compute and nothing to load: no time to divide by
            values["tok_per_s"] = tokens / values["e2el_ms"] * 1000
        if tokens > first:
            waited_ms = values["e2el_ms"] - values.get("ttft_ms", 0.0)
            values["tpot_ms"] = waited_ms / (tokens - first)
    else:
        # Scoring answers when the whole text has been read: its first token is its last.
        values["ttft_ms"] = values["e2el_ms"]
    found = rates(request.passes)
    for name in ("hit_rate", "miss_rate", "collision_miss_rate"):
        if found[name] is not None:
            values[name] = found[name]
    return values


def task_metrics(requests: Sequence[RequestRecord], peak_cache_bytes: int) -> Metrics:
    """The figures of a set of requests; a pass that several of them share is counted once."""
    passes = unique_passes(requests)
    generating = [r for r in requests if r.kind == GENERATE]
    generation_s = sum(p.duration_s for p in unique_passes(generating))
    prefills = [p for p in passes if p.phase == PREFILL]
    singles = [request_metrics(r) for r in requests]
    itl_ms = [wait for request in generating for wait in inter_token_ms(request)]
    return {
        "requests": len(requests),
        **summary("ttft_ms", (s["ttft_ms"] for s in singles if "ttft_ms" in s)),
        **summary("tpot_ms", (s["tpot_ms"] for s in singles if "tpot_ms" in s)),
        **summary("itl_ms", itl_ms),
        **summary("e2el_ms", (s["e2el_ms"] for s in singles if "e2el_ms" in s)),
        "tok_per_s": share(sum(r.output_tokens or 0 for r in generating), generation_s),
        "prompt_tok_per_s": share(
            sum(p.num_tokens for p in prefills), sum(p.duration_s for p in prefills)
        ),
        **throughput(requests, passes),
        **cache_metrics(passes),
        "miss_rate_stderr": miss_rate_stderr(requests),
        **draft_metrics(passes),
        **host_metrics(passes),
        "peak_cache_bytes": peak_cache_bytes,
    }


def throughput(requests: Sequence[RequestRecord], passes: Sequence[PassRecord]) -> Metrics:
    """vLLM's names: per second of serving, which is that of these passes, one after another."""
    duration_s = sum(p.duration_s for p in passes)
    output = sum(r.output_tokens or 0 for r in requests)
    read = sum(p.num_tokens for p in passes if p.phase == PREFILL)
    generates = any(r.kind == GENERATE for r in requests)
    return {
        "request_throughput": share(len(requests), duration_s),
        "output_throughput": share(output, duration_s) if generates else None,
        "total_token_throughput": share(read + output, duration_s),
    }


def unique_passes(requests: Iterable[RequestRecord]) -> list[PassRecord]:
    """Return the passes of these requests, each once, in order of execution."""
    found = {p.index: p for request in requests for p in request.passes}
    return [found[index] for index in sorted(found)]


def summary(name: str, values: Iterable[float]) -> Metrics:
    """Return `{name: {mean, p50, p90, p99, stderr}}`, or nothing where there are no values."""
    array = np.asarray(list(values), dtype=np.float64)
    if not array.size:
        return {}
    p50, p90, p99 = np.percentile(array, [50, 90, 99])
    return {
        name: {
            "mean": float(array.mean()),
            "p50": float(p50),
            "p90": float(p90),
            "p99": float(p99),
            "stderr": float(array.std(ddof=1) / np.sqrt(array.size)) if array.size > 1 else None,
        }
    }


def miss_rate_stderr(requests: Sequence[RequestRecord]) -> float | None:
    """Return the standard error of the miss rate over the requests that it is pooled from.

    That of a ratio estimate: misses over needs, both sums over requests. None for fewer than two.
    """
    needs = np.asarray([sum(p.requests for p in r.passes) for r in requests], dtype=np.float64)
    lost = np.asarray([sum(p.late + p.misses for p in r.passes) for r in requests])
    if len(requests) < 2 or not needs.sum():
        return None
    residuals = lost - lost.sum() / needs.sum() * needs
    count = len(requests)
    return float(np.sqrt((residuals**2).sum() * count / (count - 1)) / needs.sum())
