"""Every metric, described once: what it is made of, what it is called, which way is better.

A new figure of speed is a line here, and where it counts something new, a field of
`records.ledger.Counters` with the line that adds to it. Tables, pages, plots and the comparison
find it by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from lm_eval_moecache.records.ledger import Counters


class Totals(NamedTuple):
    """What the passes of a run, or of one phase, add up to."""

    counted: Counters
    tokens: int
    duration_s: float


class Metric(NamedTuple):
    """The one description of a metric of DESIGN 2.3: how tables and axes name it."""

    heading: str
    decimals: int
    higher_is_better: bool | None
    """None: neither way."""
    words: str
    """Words and unit, for an axis. Bytes are drawn in MB: `columns.MEGABYTE`."""
    of: Callable[[Totals], float | None] | None = None
    """What it is made of; None where single requests say it, and not the passes' counts."""
    by_phase: bool = False
    """Whether `prefill_`, `decode_` and `verify_` forms exist."""


def share(part: float, whole: float) -> float | None:
    """Return a rate, which of nothing is None and never 0."""
    return part / whole if whole else None


def ms(seconds: float | None) -> float | None:
    """Return milliseconds, of nothing None."""
    return None if seconds is None else seconds * 1000


METRICS: Mapping[str, Metric] = {
    "ttft_ms": Metric("TTFT ms", 3, False, "time to first token [ms]"),
    "tpot_ms": Metric("TPOT ms", 3, False, "time per output token [ms]"),
    "itl_ms": Metric("ITL ms", 3, False, "inter-token latency [ms]"),
    "e2el_ms": Metric("E2E ms", 3, False, "end-to-end latency [ms]"),
    "tok_per_s": Metric("tok/s", 1, True, "output tokens per second"),
    "prompt_tok_per_s": Metric("prompt tok/s", 1, True, "prompt tokens per second"),
    "request_throughput": Metric("requests/s", 2, True, "requests per second"),
    "output_throughput": Metric("output tok/s", 1, True, "output tokens per second of serving"),
    "total_token_throughput": Metric("total tok/s", 1, True, "tokens per second of serving"),
    "hit_rate": Metric(
        "Hit",
        4,
        True,
        "hit rate [of requests]",
        lambda t: share(t.counted.hits, t.counted.requests),
        True,
    ),
    "miss_rate": Metric(
        "Miss",
        4,
        False,
        "miss rate [of requests]",
        lambda t: share(t.counted.late + t.counted.misses, t.counted.requests),
        True,
    ),
    "late_rate": Metric(
        "Late",
        4,
        False,
        "late rate [of requests]",
        lambda t: share(t.counted.late, t.counted.requests),
        True,
    ),
    "collision_miss_rate": Metric(
        "Collision",
        4,
        False,
        "collision misses [of requests]",
        lambda t: share(t.counted.collisions, t.counted.requests),
        True,
    ),
    "token_miss_rate": Metric(
        "Token miss",
        4,
        False,
        "misses per token [of its top-k]",
        lambda t: share(t.counted.token_misses, t.counted.token_requests),
        True,
    ),
    "prefetch_hits": Metric(
        "Prefetch hits", 0, None, "prefetch hits [requests]", lambda t: t.counted.prefetch_hits
    ),
    "prefetch_precision": Metric(
        "Prefetch precision",
        4,
        True,
        "prefetch precision [of proposals]",
        lambda t: share(t.counted.predicted_right, t.counted.predicted),
    ),
    "prefetch_recall": Metric(
        "Prefetch recall",
        4,
        True,
        "prefetch recall [of requests]",
        lambda t: share(t.counted.predicted_right, t.counted.predictable),
    ),
    "stall_ms_per_token": Metric(
        "Stall ms/tok",
        3,
        False,
        "stall per token [ms]",
        lambda t: ms(share(t.counted.stall_s, t.tokens)),
    ),
    "link_utilization": Metric(
        "Link use",
        3,
        None,
        "link use [of time]",
        lambda t: share(t.counted.link_busy_s, t.duration_s),
    ),
    "bytes_moved": Metric(
        "Bytes moved", 0, False, "moved over the link [MB]", lambda t: t.counted.bytes_moved
    ),
    "bytes_per_token": Metric(
        "Bytes/tok",
        0,
        False,
        "moved per token [MB]",
        lambda t: share(t.counted.bytes_moved, t.tokens),
    ),
    "evictions": Metric("Evictions", 0, None, "evictions", lambda t: t.counted.evictions),
    "expert_lifetime_tokens": Metric(
        "Lifetime tok",
        1,
        None,
        "expert lifetime [tokens]",
        lambda t: share(t.counted.lifetime_tokens, t.counted.evictions),
    ),
    "routing_fidelity": Metric(
        "Fidelity",
        4,
        True,
        "routing fidelity [of executed]",
        lambda t: share(t.counted.executed - t.counted.unfaithful, t.counted.executed),
    ),
    "substituted_share": Metric(
        "Substituted",
        4,
        None,
        "substituted [of executed]",
        lambda t: share(t.counted.substituted, t.counted.executed),
    ),
    "dropped_share": Metric(
        "Dropped",
        4,
        None,
        "dropped [of assignments]",
        lambda t: share(t.counted.dropped, t.counted.token_requests),
    ),
    "low_precision_share": Metric(
        "Low precision",
        4,
        None,
        "low precision [of executed]",
        lambda t: share(t.counted.low_precision, t.counted.executed),
    ),
    "peak_cache_bytes": Metric("Peak bytes", 0, False, "peak of the cache [MB]"),
    "draft_acceptance": Metric("Acceptance", 4, True, "accepted drafts [of drafted tokens]"),
    "accepted_per_verify": Metric(
        "Accepted/verify", 3, True, "accepted drafts per verify pass [tokens]"
    ),
    "draft_time_share": Metric("Drafting", 4, None, "drafting [of decode time]"),
    "host_share": Metric("On host", 4, None, "executed on the host [of executed]"),
    "host_utilization": Metric("Host use", 4, None, "host use [of time]"),
    "host_wait_ms_per_token": Metric("Host wait ms/tok", 3, False, "wait for the host [ms]"),
    "requests": Metric("Requests", 0, None, "requests"),
}
