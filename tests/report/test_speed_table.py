"""The table of speed: one row a task, one for all, blanks where there is nothing to say."""

from __future__ import annotations

from typing import Any

from lm_eval_moecache.report.speed_table import speed_table

POLICY = {
    "name": "mine",
    "routing": {"name": "standard"},
    "prefetch": {"class_path": "my_package.Mine", "depth": 2},
    "eviction": {"name": "lru"},
    "miss": {"name": "fetch"},
}
METRICS: dict[str, Any] = {
    "requests": 3,
    "ttft_ms": {"mean": 1.5, "p50": 1.0, "p90": 2.0, "p99": 2.0},
    "tok_per_s": None,
    "hit_rate": 0.25,
    "bytes_moved": 1_500_000,
}


def test_each_task_has_its_row_and_the_title_says_under_what() -> None:
    report = {
        "policy": POLICY,
        "capacity": "5%",
        "capacity_bytes": 1234,
        "hardware": {"name": "a100-5gbps"},
        "clock": "virtual",
        "totals": METRICS,
        "tasks": {"gsm8k": METRICS, "mmlu": METRICS},
    }
    title, header, _, *rows = speed_table(report).strip().split("\n")
    assert "(mine: standard + my_package.Mine + lru + fetch)" in title
    assert "capacity: 5% = 1234 bytes" in title
    names = [cell.strip() for cell in header.strip("|").split("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["gsm8k", "mmlu", "**all**"]
    first = dict(zip(names, cells[0], strict=True))
    assert float(first["TTFT ms"]) == 1.5
    assert float(first["Hit"]) == 0.25
    assert float(first["MB moved"]) == 1.5
    assert first["tok/s"] == ""
    assert first["TPOT ms"] == ""
