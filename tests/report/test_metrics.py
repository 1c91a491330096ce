"""The metrics, each worked by hand from a few passes."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.hooks import metrics_table
from lm_eval_moecache.engine.regime import s_mbu
from lm_eval_moecache.records.event import DECODE, PREFILL, VERIFY
from lm_eval_moecache.records.ledger import (
    COUNTED,
    Ledger,
    PassRecord,
    RequestRecord,
)
from lm_eval_moecache.report.metrics import (
    METRICS,
    Column,
    cache_metrics,
    clustered_stderr,
    clusters,
    inter_token_ms,
    metric_column,
    miss_rate_stderr,
    per,
    rates,
    request_metrics,
    summary,
    task_metrics,
    unique_passes,
)
from tests.engine.scripted import make_geometry, make_hardware, make_setting

ROOT = Path(__file__).resolve().parents[2]


def test_the_dictionary_of_columns_is_that_of_the_declarations() -> None:
    assert metrics_table() in (ROOT / "results/README.md").read_text()
    assert all(metric.meaning for metric in METRICS.values())


def make_pass(index: int, phase: str, start_s: float, end_s: float, **counts: float) -> PassRecord:
    record = PassRecord(index, phase, 1, start_s, end_s)
    for name, value in counts.items():
        setattr(record, name, value)
    return record


def generation(passes: list[PassRecord], output_tokens: int, index: int = 0) -> RequestRecord:
    return RequestRecord(index, "t", "generate_until", 5, output_tokens, passes)


def scoring(passes: list[PassRecord], index: int = 0) -> RequestRecord:
    return RequestRecord(index, "t", "loglikelihood", 5, None, passes)


def three_passes() -> list[PassRecord]:
    """A prefill of 4 s, then decode steps of 1 s and 3 s."""
    return [
        make_pass(0, PREFILL, 10.0, 14.0, num_tokens=5),
        make_pass(1, DECODE, 14.0, 15.0),
        make_pass(2, DECODE, 15.0, 18.0),
    ]


@pytest.mark.parametrize(
    ("request_", "figures"),
    [
        # First token after 4 s, end to end 8 s, (8 - 4) / (3 - 1) = 2 s/token, 3 tokens in 8 s.
        (
            generation(three_passes(), 3),
            {"ttft_ms": 4000, "e2el_ms": 8000, "tpot_ms": 2000, "request_tok_per_s": 0.375},
        ),
        # Prompts in chunks of 2 s, 3 s and 4 s: the first of three tokens comes with the last, the
        # others take 1 s and 2 s.
        (
            generation(
                [
                    make_pass(0, PREFILL, 0.0, 2.0),
                    make_pass(1, PREFILL, 2.0, 5.0),
                    make_pass(2, PREFILL, 5.0, 9.0),
                    make_pass(3, DECODE, 9.0, 10.0),
                    make_pass(4, DECODE, 10.0, 12.0),
                ],
                3,
            ),
            {"ttft_ms": 9000, "e2el_ms": 12000, "tpot_ms": 1500, "request_tok_per_s": 0.25},
        ),
        # An answer of one token has no time per further token.
        (
            generation(three_passes()[:1], 1),
            {"ttft_ms": 4000, "e2el_ms": 4000, "request_tok_per_s": 0.25},
        ),
        # A scoring request's TTFT is its pass; the windows of one text add up.
        (scoring(three_passes()[:1]), {"ttft_ms": 4000, "e2el_ms": 4000}),
        (
            scoring([make_pass(0, PREFILL, 0.0, 2.0), make_pass(1, PREFILL, 2.0, 5.0)]),
            {"ttft_ms": 5000, "e2el_ms": 5000},
        ),
        # No passes, no figures; no time (all resident, free compute), no rate.
        (generation([], 0), {}),
        (generation([make_pass(0, PREFILL, 3.0, 3.0)], 1), {"ttft_ms": 0, "e2el_ms": 0}),
    ],
    ids=["generation", "chunks", "one token", "scoring", "windows", "no passes", "no time"],
)
def test_a_requests_latencies(request_: RequestRecord, figures: dict[str, float]) -> None:
    assert request_metrics(request_) == figures


def test_a_task_of_scores_has_no_time_per_token() -> None:
    task = task_metrics([scoring(three_passes()[:1])], 0)
    assert "tpot_ms" not in task and "itl_ms" not in task
    assert task["tok_per_s"] is task["output_throughput"] is None
    assert task["prompt_tok_per_s"] == task["total_token_throughput"] == 5 / 4


def test_inter_token_latencies_are_pooled_over_tokens_not_requests() -> None:
    long = generation(three_passes(), 3, 0)
    short = generation([make_pass(3, PREFILL, 18.0, 19.0), make_pass(4, DECODE, 19.0, 24.0)], 2, 1)
    itl = task_metrics([long, short], 0)["itl_ms"]
    # 1, 3 and 5 s.
    assert (itl["mean"], itl["p50"]) == (3000.0, 3000.0)


def test_a_chunk_of_a_prompt_is_no_wait_between_tokens() -> None:
    chunks = [make_pass(0, PREFILL, 0.0, 2.0), make_pass(1, PREFILL, 2.0, 5.0)]
    decodes = [make_pass(2, DECODE, 5.0, 6.0), make_pass(3, DECODE, 6.0, 9.0)]
    decodes[1].accepted = 2
    # 1 s, 3 s and an accepted draft; the second draft lies beyond the fourth token.
    assert inter_token_ms(generation([*chunks, *decodes], 4)) == [1000.0, 3000.0, 0.0]


def test_a_summary_is_mean_standard_error_and_percentiles_between_requests() -> None:
    figures = summary([4.0, 1.0, 3.0, 2.0, 5.0], range(5))
    # Sorted 1..5: rank 0.9 x 4 = 3.6 -> 4.6; rank 0.99 x 4 = 3.96 -> 4.96.
    percentiles = {"p50": 3.0, "p90": 4.6, "p99": 4.96}
    assert figures == pytest.approx({"mean": 3.0, "stderr": (2.5 / 5) ** 0.5, **percentiles})
    assert summary([1.0], [0])["stderr"] is None


def test_requests_of_one_batch_are_one_sample_of_the_standard_error() -> None:
    """Two batches of four: TTFT 1 s and 2 s. Means of batches: 0.5 x sqrt(2) / sqrt(2) = 0.5 s."""
    passes = [make_pass(0, PREFILL, 0.0, 1.0, requests=4, misses=1)]
    passes += [make_pass(1, PREFILL, 1.0, 3.0, requests=8, misses=4)]
    requests = [generation([passes[i // 4]], 1, i) for i in range(8)]
    ttft = task_metrics(requests, 0)
    assert ttft["ttft_ms"]["mean"] == 1500 and ttft["ttft_ms"]["stderr"] == pytest.approx(500)
    # Each pass counts once: rate 5/12, residuals -2/3 and 2/3.
    error = math.sqrt(2 * (2 / 3) ** 2 * 2) / 12
    assert ttft["miss_rate_stderr"] == pytest.approx(error)
    # A single batch tells nothing of the spread.
    assert task_metrics(requests[:4], 0)["ttft_ms"]["stderr"] is None


def test_clusters_join_through_passes_and_documents() -> None:
    """Batches {0, 1} and {2, 3}; 1 and 2 are choices of one document; 4 is alone."""
    shared = [make_pass(i, PREFILL, 0.0, 1.0) for i in range(3)]
    place = [0, 0, 1, 1, 2]
    requests = [replace(scoring([shared[p]]), document=i) for i, p in enumerate(place)]
    assert len(set(clusters(requests))) == 3
    requests[2].document = 1
    labels = clusters(requests)
    assert len(set(labels[:4])) == 1 and labels[4] not in labels[:4]
    # The same document of another task is another document.
    requests[2].task = "other"
    assert len(set(clusters(requests))) == 3


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 4)), min_size=2, max_size=20))
def test_the_clustered_error_is_that_of_the_clusters_sums(samples: list[tuple[float, int]]) -> None:
    """Against the textbook: the variance of clusters' residual sums, as many times as there are."""
    values, labels = map(list, zip(*samples, strict=True))
    residuals = [value - sum(values) / len(values) for value in values]
    pairs = [*zip(residuals, labels, strict=True)]
    sums = [sum(r for r, at in pairs if at == k) for k in set(labels)]
    error = clustered_stderr(residuals, labels, len(values))
    if len(sums) < 2:
        assert error is None
        return
    # Residuals sum to 0, and so do the clusters'.
    expected = math.sqrt(len(sums) * statistics.variance(sums)) / len(values)
    assert error == pytest.approx(expected, abs=1e-9)


def test_a_pass_that_requests_share_is_counted_once_in_order_of_execution() -> None:
    shared = [
        make_pass(0, PREFILL, 0.0, 4.0, num_tokens=10, requests=8, misses=4, bytes_moved=400),
        make_pass(1, DECODE, 4.0, 6.0, num_tokens=2, requests=2, misses=1, bytes_moved=100),
    ]
    first, second = generation(shared, 2, 0), generation(shared, 2, 1)
    task = task_metrics([first, second], 700)
    figures = {"requests": 2, "bytes_moved": 500, "miss_rate": 0.5, "peak_cache_bytes": 700}
    # 4 tokens in 6 s, not in 12 s; 10 prompt tokens in 4 s.
    figures |= {"tok_per_s": 4 / 6, "prompt_tok_per_s": 2.5, "bytes_per_token": 500 / 12}
    # vLLM's names: per second of serving.
    figures |= {"request_throughput": 2 / 6, "output_throughput": 4 / 6}
    figures["total_token_throughput"] = (10 + 4) / 6
    assert {name: task[name] for name in figures} == pytest.approx(figures)
    # Each request waited for the whole batch.
    assert task["e2el_ms"]["mean"] == 6000.0
    second.passes, first.passes = shared[1:], shared[:1]
    assert unique_passes([second, first]) == shared


@pytest.mark.parametrize(
    ("passes", "figures"),
    [
        # 20 requests, 2 late, 7 misses, 3 of them collisions. A verify step of drafts belongs to
        # decoding: 10 requests, 1 late, 3 misses.
        (
            [
                make_pass(0, PREFILL, 0, 1, requests=10, late=1, misses=4, collisions=2),
                make_pass(1, DECODE, 1, 2, requests=4, late=1, misses=0),
                make_pass(2, VERIFY, 2, 3, requests=6, late=0, misses=3, collisions=1),
            ],
            {
                **{"hit_rate": 0.55, "miss_rate": 0.45, "late_rate": 0.1},
                **{"collision_miss_rate": 0.15, "prefill_miss_rate": 0.5},
                **{"decode_miss_rate": 0.4, "decode_collision_miss_rate": 0.1},
            },
        ),
        (
            [
                make_pass(0, DECODE, 0, 1, predicted=3, predicted_right=1, predictable=2),
                make_pass(1, DECODE, 1, 2, predicted=5, predicted_right=3, predictable=4),
            ],
            {"prefetch_precision": 4 / 8, "prefetch_recall": 4 / 6},
        ),
        (
            [
                make_pass(0, PREFILL, 0, 8, num_tokens=3, stall_s=6, link_busy_s=6, bytes_moved=3),
                make_pass(1, DECODE, 8, 10, num_tokens=1, stall_s=1, link_busy_s=1, bytes_moved=1),
                make_pass(2, DECODE, 10, 10, num_tokens=0, evictions=4, lifetime_tokens=10),
            ],
            {
                **{"stall_ms_per_token": 7000 / 4, "link_utilization": 0.7},
                **{"bytes_per_token": 1.0, "expert_lifetime_tokens": 2.5},
            },
        ),
        # 8 of 10 assignments were executed, 4 of them the router's choices.
        (
            [
                make_pass(
                    *(0, DECODE, 0, 1),
                    **{"token_requests": 10, "token_misses": 5, "dropped": 2, "unfaithful": 4},
                    **{"substituted": 2, "low_precision": 1},
                )
            ],
            {
                **{"dropped_share": 0.2, "routing_fidelity": 0.4, "substituted_share": 0.2},
                **{"low_precision_share": 1 / 8, "token_miss_rate": 0.5},
            },
        ),
    ],
    ids=["rates", "predictions", "time and traffic", "changed work"],
)
def test_a_caches_figures(passes: list[PassRecord], figures: dict[str, float]) -> None:
    metrics = cache_metrics(passes)
    assert {name: metrics[name] for name in figures} == pytest.approx(figures)


def test_rates_of_nothing_are_none_and_never_zero() -> None:
    assert set(rates([]).values()) == {None}
    metrics = cache_metrics([make_pass(0, PREFILL, 0.0, 0.0, num_tokens=0)])
    rate_names = "hit_rate decode_hit_rate token_miss_rate prefetch_precision prefetch_recall"
    rate_names += " link_utilization bytes_per_token stall_ms_per_token expert_lifetime_tokens"
    rate_names += " routing_fidelity dropped_share"
    assert {metrics[name] for name in rate_names.split()} == {None}
    assert (metrics["prefetch_hits"], metrics["bytes_moved"], metrics["evictions"]) == (0, 0, 0)


def test_the_ledger_attributes_passes_to_the_open_requests_only() -> None:
    ledger = Ledger()
    first = ledger.new_request("a", "generate_until")
    second = ledger.new_request("b", "loglikelihood")
    ledger.serve([first, second])
    shared = ledger.begin_pass(PREFILL, 4, 0.0)
    ledger.serve([second])
    unshared = ledger.begin_pass(PREFILL, 2, 1.0)
    ledger.serve([])
    ledger.begin_pass(PREFILL, 1, 2.0)
    assert (first.passes, second.passes) == ([shared], [shared, unshared])
    assert [p.index for p in ledger.passes] == [0, 1, 2]
    assert [r.index for r in ledger.requests] == [0, 1]


@pytest.mark.parametrize("missed", [*product(("misses", "late"), repeat=2)])
def test_the_miss_rates_standard_error_is_that_of_a_ratio_over_requests(
    missed: tuple[str, str],
) -> None:
    """A late expert is a miss here too."""

    def error(*requests: tuple[int, int]) -> float | None:
        served = [
            scoring([make_pass(i, DECODE, 0, 1, requests=needs, **{kind: number})], i)
            for i, ((needs, number), kind) in enumerate(zip(requests, missed, strict=False))
        ]
        return miss_rate_stderr(served, clusters(served))

    # 2 of 4 and 1 of 8: R = 1/4, residuals +1 and -1, so sqrt(2 * 2 / 1) / 12.
    assert error((4, 2), (8, 1)) == pytest.approx(2 / 12)
    assert error((4, 1), (8, 2)) == 0
    assert error((4, 1)) is None


def test_what_a_prefill_costs_is_told_by_the_passes_right_after_it() -> None:
    """Eight early passes of 4 requests each, half missed; two later passes with 1 miss in 8."""
    early = [make_pass(1 + i, DECODE, i, i + 1, requests=4, misses=2) for i in range(8)]
    later = [make_pass(9, DECODE, 9, 10, requests=4, misses=1)]
    later += [make_pass(10, VERIFY, 10, 11, requests=4)]
    prefill = make_pass(0, PREFILL, 0, 1, requests=9, misses=9)
    figures = task_metrics([generation([prefill, *early, *later], 11)], 0)
    assert figures["early_decode_miss_rate"] == 16 / 32
    assert figures["steady_decode_miss_rate"] == 1 / 8
    # A trace without its prompt, or a request too short for later passes, has no such rates.
    for passes in ([*early, *later], [prefill, *early]):
        assert "early_decode_miss_rate" not in task_metrics([generation(passes, len(passes))], 0)


def test_a_pass_that_is_early_for_one_request_is_not_steady_for_another() -> None:
    shared = make_pass(10, DECODE, 10, 11, requests=2, late=1)
    alone = make_pass(11, DECODE, 11, 12, requests=2)
    first = [make_pass(i, PREFILL if not i else DECODE, i, i + 1) for i in range(9)]
    second = [make_pass(9, PREFILL, 9, 10), shared]
    figures = task_metrics([generation([*first, shared, alone], 10), generation(second, 2, 1)], 0)
    assert figures["early_decode_miss_rate"] == 1 / 2
    assert figures["steady_decode_miss_rate"] == 0.0


# --- a new column is defined in one place ---


def test_a_new_column_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = [
        make_pass(0, DECODE, 0, 1, requests=4, misses=1, evictions=1),
        make_pass(1, DECODE, 0, 1, requests=4, evictions=2),
    ]
    assert "evictions_per_request" not in cache_metrics(passes)
    metric = Column(
        *("evictions_per_request", "Evicted/req", 3, False, "evictions [per request]"),
        of=per("evictions", "requests"),
        by_phase=True,
    )
    monkeypatch.setitem(METRICS, metric.name, metric)  # type: ignore[arg-type]
    metrics = cache_metrics(passes)
    assert metrics["evictions_per_request"] == metrics["decode_evictions_per_request"] == 3 / 8
    assert metrics["prefill_evictions_per_request"] is None
    column = metric_column("decode_evictions_per_request")
    assert column is not None
    assert (column.heading, column.decimals) == ("Decode evicted/req", 3)
    assert column.higher_is_better is False


def test_every_count_is_made_something_of() -> None:
    """Every count moves some metric; one that moves none would never be seen."""
    # `draft_metrics` and `host_metrics` read these, where a draft or the host is at work.
    drafting, host = {"draft_s", "drafted", "accepted"}, {"host_executed", "host_s", "host_wait_s"}
    for name in sorted(set(COUNTED) - drafting - host):
        others = dict.fromkeys(("requests", "token_requests", "evictions", "predicted"), 4)
        others |= {"predictable": 4, "predicted_right": 2, "misses": 1, "token_misses": 1}
        others |= {"lifetime_tokens": 1, "unfaithful": 1, "weighed_tokens": 4, "lost_weight": 1}
        incremented = others | {name: others.get(name, 0) + 1}
        before, after = (
            cache_metrics([make_pass(0, DECODE, 0, 1, **c)]) for c in (others, incremented)
        )
        assert before != after, name


def test_s_mbu_of_a_decode_step_worked_by_hand() -> None:
    """Two layers of 200 dense bytes, experts of 100: (400 + 3 x 100) bytes in 2 s of 1,000 B/s."""
    geometry = make_geometry(num_layers=2)
    hardware = make_hardware(memory_bytes_per_s=1000.0)
    setting = make_setting(geometry=geometry, hardware=hardware)
    passes = [
        make_pass(0, PREFILL, 0, 50, requests=9),
        make_pass(1, DECODE, 50, 52, requests=6, avoided=2, host_executed=1),
    ]
    request = generation(passes, 2)
    assert s_mbu([request], geometry, setting) == pytest.approx(0.35)
    assert s_mbu([generation(passes[:1], 1)], geometry, setting) is None
    endless = make_setting(geometry=geometry, hardware=make_hardware(memory_bytes_per_s=math.inf))
    assert s_mbu([request], geometry, endless) is None
