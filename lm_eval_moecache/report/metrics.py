"""The registry of metrics: each one's formula, heading, unit and better direction.

A new speed metric is one line of `metrics.csv` and, if it counts something new, one field of
`records.ledger.Counters` with the line that increments it. Tables, pages, plots and the comparison
find it by name. Below: metrics of passes, requests and tasks, computed from the ledger. Field names
are final; see results/README. A rate whose denominator is 0 (no prediction made, no token decoded)
is None, never 0.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.records.event import PREFILL, VERIFY
from lm_eval_moecache.records.ledger import (
    COUNTED,
    GENERATE,
    Counters,
    PassRecord,
    RequestRecord,
    total,
)

Metrics = dict[str, Any]
BATCH = "batch"
"""Number of the batch that a document shares with others, among its speed metrics."""
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
"""The metrics that are told as mean and percentiles."""
EARLY_STEPS = 8
"""Passes after a prefill that count as early: they miss, and reload, the experts it evicted."""
MEGABYTE = 1e6
"""Bytes per unit of a plot's axis; link rates are in GB/s."""


@dataclass(slots=True, kw_only=True)
class Totals(Counters):
    """The counters of a run's passes, or of one phase's, added up."""

    tokens: int = 0
    duration_s: float = 0.0

    @property
    def missed(self) -> int:
        """Requests that were not hits: late ones and misses."""
        return self.late + self.misses

    @property
    def missed_or_at_risk(self) -> int:
        """`missed`, where a rule that may leave experts unexecuted acted; else 0."""
        return self.missed if self.avoided or self.weighed_tokens else 0

    @property
    def faithful(self) -> int:
        """Executed assignments that the unmodified router chose."""
        return self.executed - self.unfaithful


@dataclass(frozen=True, slots=True)
class Column:
    """A column of tables, axes and comparisons. Of settings there is only a name and a heading."""

    name: str
    heading: str
    decimals: int | None = None
    """Of a number; None for a text."""
    higher_is_better: bool | None = None
    """None: neither direction is better."""
    words: str = ""
    """Name and unit on an axis, empty for the heading. Bytes are drawn in MB."""
    unit: str = ""
    meaning: str = ""
    of: Callable[[Totals], float | None] | None = None
    """Its value from the passes' totals; None where it is computed elsewhere (per request, say)."""
    by_phase: bool = False
    """Whether `prefill_`, `decode_` and `verify_` forms exist."""
    tested_by: str = ""
    """The metric of documents that tests compare; with a `-` in front, its opposite."""
    base: str = ""
    """Of a metric: its name in a record, `decode_miss_rate` of `decode_miss_rate@task`."""
    percentile: str = ""
    task: str = ""

    @property
    def is_score(self) -> bool:
        """Whether the column is of answers: accuracy, or a task's score."""
        return self.higher_is_better is not None and not self.base

    @property
    def in_megabytes(self) -> bool:
        return "[MB]" in self.words

    def text(self, value: float | str | None, stderr: float | None = None) -> str:
        """Return a cell as text: numbers rounded to `decimals`, `±` one standard error."""
        if not isinstance(value, (int, float)) or self.decimals is None:
            return "" if value is None else str(value)
        text = f"{value:.{self.decimals}f}"
        text = text if float(text) else text.removeprefix("-")
        if stderr is None:
            return text
        error = f"{stderr:.{self.decimals}f}"
        if stderr > _ROUND_OFF * abs(value) and not float(error):
            # 0 is said of an error that is 0; a smaller one has as many digits as it needs.
            error = f"{stderr:.{-math.floor(math.log10(stderr))}f}"
        return f"{text} ±{error}"


_ROUND_OFF = 1e-9
"""Standard errors up to this share of their value are of rounding: sums in another order."""
PERCENTILES = ("mean", "p50", "p90", "p99")
PHASES = {"prefill_": "prefill ", "decode_": "decode ", "verify_": "verify "}


def share(part: float, whole: float) -> float | None:
    """Return part / whole, or None where whole is 0."""
    return part / whole if whole else None


def per(part: str, whole: str = "", scale: int = 1) -> Callable[[Totals], float | None]:
    """Return a function that divides one field of `Totals` by another, times `scale`.

    Without a `whole` it is the field itself, a count.
    """

    def of(sums: Totals) -> float | None:
        value = getattr(sums, part)
        rate = share(value, getattr(sums, whole)) if whole else value
        return None if rate is None else rate * scale

    return of


def _declared() -> dict[str, Column]:
    """Read `metrics.csv`: a line a metric, `part` / `whole` * `scale` of `Totals` where it is."""
    better = {"more": True, "less": False, "": None}
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return {
            row["name"]: Column(
                name=row["name"],
                heading=row["heading"],
                decimals=int(row["decimals"]),
                higher_is_better=better[row["better"]],
                words=row["words"],
                unit=row["unit"],
                meaning=row["meaning"],
                of=per(row["part"], row["whole"], int(row["scale"] or 1)) if row["part"] else None,
                by_phase=bool(row["by_phase"]),
                tested_by=row["tested_by"],
                base=row["name"],
            )
            for row in csv.DictReader(file)
        }


METRICS: Mapping[str, Column] = _declared()
"""Metric -> its declaration, in the order of the dictionary."""


@lru_cache(maxsize=4096)
def metric_column(name: str) -> Column | None:
    """Return the column `miss_rate`, `decode_miss_rate`, `ttft_ms.p99` or `tok_per_s@task`.

    None where no metric has that name.
    """
    metric, _, task = name.partition("@")
    base, dot, percentile = metric.partition(".")
    phase = next((p for p in PHASES if base.startswith(p)), "")
    declared = METRICS.get(base.removeprefix(phase))
    if declared is None or (dot and (base not in LATENCIES or percentile not in PERCENTILES)):
        return None
    heading = f"{phase[:-1].capitalize()} {declared.heading.lower()}" if phase else declared.heading
    suffix = (f" {percentile}" if percentile else "") + (f" ({task})" if task else "")
    return replace(
        declared,
        name=name,
        heading=heading + suffix,
        words=PHASES.get(phase, "") + declared.words + suffix,
        # A percentile, or a rate of one phase, has no samples by document.
        tested_by="" if phase or percentile not in ("", "mean") else declared.tested_by,
        base=base,
        percentile=percentile,
        task=task,
    )


UNCHANGED: Mapping[str, float] = {"routing_fidelity": 1.0, "low_precision_share": 0.0}
"""Metric -> its value in runs that compute what the model alone computes. A table with other runs
has both: fidelity says nothing of precision, the other nothing of routing."""


def totals(passes: Sequence[PassRecord]) -> Totals:
    """Return the sum of these passes' counters, tokens and durations."""
    counters = total(passes)
    counts = {name: getattr(counters, name) for name in COUNTED}
    tokens, duration_s = sum(p.num_tokens for p in passes), sum(p.duration_s for p in passes)
    return Totals(**counts, tokens=tokens, duration_s=duration_s)


def rates(passes: Sequence[PassRecord], prefix: str = "", *, by_phase: bool = True) -> Metrics:
    """Return these passes' metrics that have forms by phase, or those that have none."""
    sums = totals(passes)
    formulas = {n: m.of for n, m in METRICS.items() if m.of and m.by_phase == by_phase}
    return {prefix + name: formula(sums) for name, formula in formulas.items()}


def cache_metrics(passes: Sequence[PassRecord]) -> Metrics:
    """Return every metric of these passes that does not depend on which requests they served."""
    return {
        **rates(passes),
        **rates([p for p in passes if p.phase == PREFILL], "prefill_"),
        **rates([p for p in passes if p.phase != PREFILL], "decode_"),
        **rates(passes, by_phase=False),
    }


def prefill_metrics(requests: Sequence[RequestRecord]) -> Metrics:
    """Return miss rates right after a prefill and later: the prefill's cost to the cache.

    Empty where no request decodes for more than `EARLY_STEPS` passes. A pass that several requests
    share is early if it is early for any of them.
    """
    early: dict[int, PassRecord] = {}
    later: dict[int, PassRecord] = {}
    for request in requests:
        since: int | None = None
        for record in request.passes:
            if record.phase == PREFILL:
                since = 0
            elif since is not None:
                (early if since < EARLY_STEPS else later)[record.index] = record
                since += 1
    steady = [record for index, record in later.items() if index not in early]
    if not early or not steady:
        return {}
    miss_rate = per("missed", "requests")
    return {
        "early_decode_miss_rate": miss_rate(totals(list(early.values()))),
        "steady_decode_miss_rate": miss_rate(totals(steady)),
    }


def draft_metrics(passes: Sequence[PassRecord]) -> Metrics:
    """Return the metrics of drafting; those of verifying only where a pass verified drafts."""
    verifying = [p for p in passes if p.drafted]
    drafting_s = sum(p.draft_s for p in passes)
    if not verifying and not drafting_s:
        return {}
    time_share = share(drafting_s, sum(p.duration_s for p in passes if p.phase != PREFILL))
    if not verifying:
        # A draft model that only prefetches (`prefetch=draft` without speculation).
        return {"draft_time_share": time_share}
    accepted = sum(p.accepted for p in verifying)
    return {
        **rates([p for p in passes if p.phase == VERIFY], "verify_"),
        "draft_acceptance": accepted / sum(p.drafted for p in verifying),
        "accepted_per_verify": accepted / len(verifying),
        "draft_time_share": time_share,
    }


def host_metrics(passes: Sequence[PassRecord]) -> Metrics:
    """Return the metrics of host compute; empty where the host executed no expert."""
    sums = totals(passes)
    if not sums.host_executed:
        return {}
    return {
        "host_share": share(sums.host_executed, sums.executed),
        "host_utilization": share(sums.host_s, sums.duration_s),
        "host_wait_ms_per_token": per("host_wait_s", "tokens", 1000)(sums),
    }


def inter_token_ms(request: RequestRecord) -> list[float]:
    """Return the wait in ms before each token after the first; accepted drafts wait 0."""
    waits: list[float] = []
    steps = [record for record in request.passes[1:] if record.phase != PREFILL]
    for record in steps:
        waits += [record.duration_s * 1000, *[0.0] * record.accepted]
    # The last pass may have accepted drafts beyond the request's end.
    return waits[: max((request.output_tokens or 0) - 1, len(steps))]


def request_metrics(request: RequestRecord) -> dict[str, float]:
    """Return the metrics of one request, as put on its harness Instance (times in ms).

    Metrics whose mean over requests differs from the task's have names of their own: the mean of
    `request_tok_per_s` is not `tok_per_s`, which is total tokens / total time.
    """
    durations_ms = [p.duration_s * 1000 for p in request.passes]
    if not durations_ms:
        return {}
    values: dict[str, float] = {"e2el_ms": sum(durations_ms)}
    if request.kind == GENERATE:
        # The last pass of the prompt, which may be read in chunks, yields the first token. A trace
        # may begin after the prompt: then no pass does.
        num_prefills = sum(1 for _ in takewhile(lambda p: p.phase == PREFILL, request.passes))
        has_first_token = num_prefills > 0
        if has_first_token:
            values["ttft_ms"] = sum(durations_ms[:num_prefills])
        tokens = request.output_tokens or 0
        if values["e2el_ms"]:  # free compute and nothing to load: no time to divide by
            values["request_tok_per_s"] = tokens / values["e2el_ms"] * 1000
        if tokens > has_first_token:
            waited_ms = values["e2el_ms"] - values.get("ttft_ms", 0.0)
            values["tpot_ms"] = waited_ms / (tokens - has_first_token)
    else:
        # Scoring answers once the whole text is read: its first token is its last.
        values["ttft_ms"] = values["e2el_ms"]
    request_rates = rates(request.passes)
    for name in ("hit_rate", "miss_rate", "collision_miss_rate"):
        if request_rates[name] is not None:
            values[f"request_{name}"] = request_rates[name]
    return values


def task_metrics(requests: Sequence[RequestRecord], peak_cache_bytes: int) -> Metrics:
    """Return the metrics of a set of requests; a pass that several share is counted once.

    Throughput (vLLM's names) is per second of serving: the summed duration of these passes.
    """
    passes = unique_passes(requests)
    generating = [r for r in requests if r.kind == GENERATE]
    generation_s = sum(p.duration_s for p in unique_passes(generating))
    duration_s = sum(p.duration_s for p in passes)
    prefills = [p for p in passes if p.phase == PREFILL]
    prompt_tokens = sum(p.num_tokens for p in prefills)
    prefill_s = sum(p.duration_s for p in prefills)
    output_tokens = sum(r.output_tokens or 0 for r in requests)
    labels = clusters(requests)
    values: dict[str, list[tuple[float, int]]] = {}
    for request, label in zip(requests, labels, strict=True):
        for name, value in request_metrics(request).items():
            values.setdefault(name, []).append((value, label))
        if request.kind == GENERATE:
            values.setdefault("itl_ms", []).extend((w, label) for w in inter_token_ms(request))
            values.setdefault("output_tokens", []).append((request.output_tokens or 0, label))
    tokens = summary(*zip(*values["output_tokens"], strict=True)) if generating else {}
    return {
        "requests": len(requests),
        **{
            name: summary(*zip(*values[name], strict=True))
            for name in LATENCIES
            if values.get(name)
        },
        "output_tokens": tokens.get("mean"),
        "output_tokens_stderr": tokens.get("stderr"),
        "tok_per_s": share(sum(r.output_tokens or 0 for r in generating), generation_s),
        "prompt_tok_per_s": share(prompt_tokens, prefill_s),
        "request_throughput": share(len(requests), duration_s),
        "output_throughput": share(output_tokens, duration_s) if generating else None,
        "total_token_throughput": share(prompt_tokens + output_tokens, duration_s),
        **cache_metrics(passes),
        "miss_rate_stderr": miss_rate_stderr(requests, labels),
        **prefill_metrics(requests),
        **draft_metrics(passes),
        **host_metrics(passes),
        "peak_cache_bytes": peak_cache_bytes,
    }


def unique_passes(requests: Iterable[RequestRecord]) -> list[PassRecord]:
    """Return the passes of these requests, each once, in order of execution."""
    passes = {p.index: p for request in requests for p in request.passes}
    return [passes[index] for index in sorted(passes)]


def clusters(requests: Sequence[RequestRecord]) -> list[int]:
    """Return a label for each request, equal where requests are not independent of each other.

    That is where they belong to one document or share a pass (a batch, or choices that share a
    forward), directly or through others. Labels are positions of requests.
    """
    from scipy.cluster.hierarchy import DisjointSet

    joined = DisjointSet(range(len(requests)))
    first: dict[Any, int] = {}
    for place, request in enumerate(requests):
        keys: list[Any] = [record.index for record in request.passes]
        if request.document is not None:
            keys.append((request.task, request.document))
        for key in keys:
            if (other := first.setdefault(key, place)) != place:
                joined.merge(other, place)
    return [int(joined[place]) for place in range(len(requests))]


def summary(values: Sequence[float], labels: Sequence[int]) -> Metrics:
    """Return `{mean, p50, p90, p99, stderr}`; values of one label are one sample of the error."""
    array = np.asarray(values, dtype=np.float64)
    percentiles = zip(("p50", "p90", "p99"), np.percentile(array, [50, 90, 99]), strict=True)
    statistics: Metrics = {"mean": float(array.mean()), **{key: float(p) for key, p in percentiles}}
    return statistics | {"stderr": clustered_stderr(array - array.mean(), labels, array.size)}


def clustered_stderr(residuals: Any, labels: Sequence[float], divisor: float) -> float | None:
    """Return the standard error of a mean, or of a ratio of sums, over clustered samples.

    `residuals` are what each sample differs from the mean (from the ratio times its denominator),
    `divisor` the number of samples (the sum of denominators). With one sample a cluster it is the
    usual error. None for fewer than two clusters, which say nothing of the spread.
    """
    sums = np.bincount(np.unique(labels, return_inverse=True)[1], weights=residuals)
    if sums.size < 2 or not divisor:
        return None
    return float(np.sqrt((sums**2).sum() * sums.size / (sums.size - 1)) / divisor)


def miss_rate_stderr(requests: Sequence[RequestRecord], labels: Sequence[int]) -> float | None:
    """Return the standard error of the miss rate pooled over the passes of these requests.

    A ratio estimator's: summed misses over summed needs. None for fewer than two clusters, or where
    they need no expert.
    """
    of_pass = {p.index: label for r, label in zip(requests, labels, strict=True) for p in r.passes}
    passes = unique_passes(requests)
    needs = np.asarray([p.requests for p in passes], dtype=np.float64)
    misses = np.asarray([p.late + p.misses for p in passes])
    if not needs.sum():
        return None
    residuals = misses - misses.sum() / needs.sum() * needs
    return clustered_stderr(residuals, [of_pass[p.index] for p in passes], float(needs.sum()))
