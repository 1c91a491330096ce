"""The table of speed: one row a task, one for all, blanks where there is nothing to say."""

from __future__ import annotations

from typing import Any

from lm_eval_moecache.report.speed_table import speed_table

POLICY = {
    "name": "mine",
    "phases": "all",
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


REPORT: dict[str, Any] = {
    "policy": POLICY,
    "capacity": "5%",
    "capacity_bytes": 1234,
    "hardware": {"name": "a100-5GBps", "link_bytes_per_s": 2.5e9},
    "clock": "virtual",
    "scoring": "parallel",
    "cache_reset": "never",
    "warnings": [],
    "totals": METRICS,
    "tasks": {"gsm8k": METRICS, "mmlu": METRICS},
}


def test_each_task_has_its_row_and_warnings_stand_below() -> None:
    text = speed_table({**REPORT, "warnings": ["a knob did nothing"]})
    title, header, _, *rows, empty, last = text.split("\n")
    assert "(mine: standard + my_package.Mine + lru + fetch)" in title
    assert "capacity: 5% = 1234 bytes" in title
    assert (empty, last) == ("", "Warning: a knob did nothing")
    names = [cell.strip() for cell in header.strip("|").split("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["gsm8k", "mmlu", "**all**"]
    first = dict(zip(names, cells[0], strict=True))
    assert [float(first[name]) for name in ("TTFT ms", "Hit", "MB moved")] == [1.5, 0.25, 1.5]
    assert first["tok/s"] == first["TPOT ms"] == ""


def test_the_title_names_the_link_and_the_settings_that_are_not_the_default() -> None:
    title = speed_table(REPORT).split("\n")[0]
    assert "hardware: a100-5GBps at 2.5 GB/s" in title
    assert not any(word in title for word in ("scoring", "phases", "cache_reset"))
    changed = {"scoring": "scan", "cache_reset": "request"}
    policy = {**POLICY, "phases": "decode"}
    title = speed_table({**REPORT, **changed, "policy": policy}).split("\n")[0]
    assert title.endswith("phases: decode, scoring: scan, cache_reset: request")
