"""A new column of speed is described in one place, from which everything else finds it."""

from __future__ import annotations

import pytest

from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.records.ledger import COUNTED, Counters, PassRecord, total
from lm_eval_moecache.report.columns import metric_column
from lm_eval_moecache.report.metrics import METRICS, Metric, cache_metrics, per


def record(index: int, **counts: float) -> PassRecord:
    return PassRecord(index, DECODE, 1, 0.0, 1.0, **counts)  # type: ignore[arg-type]


def test_a_new_column_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = [record(0, requests=4, misses=1, evictions=1), record(1, requests=4, evictions=2)]
    assert "evictions_per_request" not in cache_metrics(passes)
    monkeypatch.setitem(
        METRICS,  # type: ignore[arg-type]
        "evictions_per_request",
        Metric(
            "Evicted/req", 3, False, "evictions [per request]", per("evictions", "requests"), True
        ),
    )
    found = cache_metrics(passes)
    assert found["evictions_per_request"] == found["decode_evictions_per_request"] == 3 / 8
    assert found["prefill_evictions_per_request"] is None
    column = metric_column("decode_evictions_per_request")
    assert column is not None
    assert (column.heading, column.decimals) == ("Decode evicted/req", 3)
    assert column.higher_is_better is False


def test_counters_add_and_subtract_field_by_field() -> None:
    first = Counters(**{name: 2 * place for place, name in enumerate(COUNTED)})
    second = Counters(**{name: place for place, name in enumerate(COUNTED)})
    assert first - second == second
    assert second + second == first
    assert total([second, second]) == first
    assert total([]) == Counters()
    counted = record(0)
    counted.count(second)
    counted.count(second)
    assert all(getattr(counted, name) == getattr(first, name) for name in COUNTED)


def test_every_count_is_made_something_of() -> None:
    """A count that no metric reads is a column that nobody sees."""
    # `draft_metrics` and `host_metrics`, where there is a draft or a host at work.
    drafting, host = {"draft_s", "drafted", "accepted"}, {"host_executed", "host_s", "host_wait_s"}
    for name in sorted(set(COUNTED) - drafting - host):
        others = dict.fromkeys(("requests", "token_requests", "evictions", "predicted"), 4)
        others |= {"predictable": 4, "predicted_right": 2, "misses": 1, "token_misses": 1}
        others |= {"lifetime_tokens": 1, "unfaithful": 1, "weighed_tokens": 4, "lost_weight": 1}
        before = cache_metrics([record(0, **others)])
        after = cache_metrics([record(0, **(others | {name: others.get(name, 0) + 1}))])
        assert before != after, name
