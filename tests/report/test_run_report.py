"""The report of a run: its speed table, its warnings and the published schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.run_report import settings_without_effect, speed_table
from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.ledger import Ledger, RequestRecord
from lm_eval_moecache.report.runs.files import TABLE, read_tables
from lm_eval_moecache.report.runs.schema import MoecacheRecord, published_schema

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
    "miss_rate": 0.75,
    "bytes_moved": 1_500_000,
}
REPORT: dict[str, Any] = {
    **{"policy": POLICY, "capacity": "5%", "capacity_bytes": 1234},
    "hardware": {"name": "a100-5GBps", "link_bytes_per_s": 2.5e9},
    **{"clock": "virtual", "scoring": "parallel", "cache_reset": "request", "warnings": []},
    **{"totals": METRICS, "tasks": {"gsm8k": METRICS, "mmlu": METRICS}},
}


def test_each_task_has_its_row_and_warnings_stand_below() -> None:
    text = speed_table({**REPORT, "warnings": ["a knob did nothing"]})
    title, header, _, *rows, empty, means, last = text.split("\n")
    assert "(mine: standard + my_package.Mine(depth=2) + lru + fetch)" in title
    assert "capacity: 5% = 1234 bytes" in title
    assert (empty, last) == ("", "Warning: a knob did nothing")
    assert "request_hit_rate" in means and "means over documents" in means
    names = [cell.strip() for cell in header.strip("|").split("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["gsm8k", "mmlu", "**all**"]
    first = dict(zip(names, cells[0], strict=True))
    assert [float(first[name]) for name in ("TTFT ms", "Miss", "MB moved")] == [1.5, 0.75, 1.5]
    assert first["tok/s"] == first["TPOT ms"] == ""


def test_where_answers_may_be_others_a_column_says_so() -> None:
    lossy = {**METRICS, "routing_fidelity": 0.75, "low_precision_share": 0.0}
    lossless = {**METRICS, "routing_fidelity": 1.0, "low_precision_share": 0.0}
    header, _, row = speed_table({**REPORT, "totals": lossy, "tasks": {"a": lossy}}).split("\n")[
        1:4
    ]
    names, cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in (header, row))
    assert names[-2:] == ["Fidelity", "Low precision"] and float(cells[-2]) == 0.75
    assert "Fidelity" not in speed_table({**REPORT, "totals": lossless, "tasks": {"a": lossless}})


def test_the_title_names_a_rules_parameters_that_are_not_its_defaults() -> None:
    for factor, text in ((0.5, "drop_cold(factor=0.5)"), (0.75, "drop_cold(factor=0.75)")):
        policy = load_policy("on_demand", {"miss": "drop_cold", "miss.factor": factor}).as_dict()
        assert text in speed_table({**REPORT, "policy": policy}).split("\n")[0]


def test_the_title_names_the_link_and_the_settings_that_are_not_the_default() -> None:
    title = speed_table(REPORT).split("\n")[0]
    assert "hardware: a100-5GBps at 2.5 GB/s" in title
    assert not any(word in title for word in ("scoring", "phases", "cache_reset"))
    changed = {"scoring": "scan", "cache_reset": "never"}
    policy = {**POLICY, "phases": "decode"}
    title = speed_table({**REPORT, **changed, "policy": policy}).split("\n")[0]
    assert title.endswith("phases: decode, scoring: scan, cache_reset: never")


# --- a setting without effect on a task is warned of, and no other ---


def served(kind: str, *phases: str) -> list[RequestRecord]:
    ledger = Ledger()
    request = ledger.new_request("any", kind)
    ledger.serve([request])
    for phase in phases:
        ledger.begin_pass(phase, 1, 0.0)
    return [request]


TASKS = {
    "mmlu": served("loglikelihood", PREFILL),
    "gsm8k": served("generate_until", PREFILL, DECODE),
    "arc": served("loglikelihood", PREFILL, PREFILL),
}


SCAN = {"scoring": "scan", "capacity": "4/layer"}
LOSSY = {"policy": "pruning", "phases": "decode"}
SOLVED = SimpleNamespace(solution={"asked": "auto", "used": 0})


def warnings_of(tasks: Any, stage: Any = None, **given: Any) -> list[str]:
    config = read_config({"policy": "on_demand", **given})
    return settings_without_effect(tasks, config, stage)


@pytest.mark.parametrize(
    ("given", "said", "unsaid"),
    [
        (LOSSY, ("phases=decode", "arc, mmlu"), "gsm8k"),
        ({"miss": "degrade_zero"}, ("miss=degrade_zero", "arc, mmlu"), "gsm8k"),
        (SCAN, ("scoring=scan", "gsm8k"), "mmlu"),
        ({"seed": 3}, ("seed=3",), "scan"),
        ({"precision": "int8:int4"}, ("precision=int8:int4",), "scan"),
        ({"stage": SOLVED}, ("prefetch.cutoff=auto",), "scan"),
        ({"link": "fifo"}, ("link=fifo",), "scan"),
        ({"prefetch": "history"}, ("prefetch=history", "cache_reset=never"), "scan"),
    ],
)
def test_what_did_nothing_is_said_with_its_tasks(
    given: dict[str, Any], said: tuple[str, ...], unsaid: str
) -> None:
    (warning,) = warnings_of(TASKS, **given)
    assert all(text in warning for text in said)
    assert unsaid not in warning


def test_settings_that_did_something_are_not_warned_of() -> None:
    assert warnings_of(TASKS) == []
    assert warnings_of({"gsm8k": TASKS["gsm8k"]}, **LOSSY) == []
    # scan routes a text as if it were decoded.
    text_task = {"text": served("loglikelihood_rolling", DECODE, DECODE)}
    for tasks in (text_task, {}):
        assert warnings_of(tasks, **LOSSY, **SCAN) == []


# --- the published schema of config.moecache ---


RESULTS = Path(__file__).resolve().parent.parent.parent / "results"


def records(path: Path) -> Iterator[dict[str, Any]]:
    tables = path.name == TABLE
    for record in read_tables(path.parent) if tables else [json.loads(path.read_text())]:
        yield record["config"]["moecache"]


FILES = [*sorted(RESULTS.rglob(TABLE)), RESULTS / "first_run/results.json"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.parent.relative_to(RESULTS)))
def test_every_committed_record_fits(path: Path) -> None:
    for record in records(path):
        MoecacheRecord.model_validate_json(json.dumps(record), strict=True)


def test_the_schema_is_versioned_and_names_what_a_record_has() -> None:
    schema = published_schema()
    assert schema["version"] >= 1 and schema["$schema"].startswith("https://json-schema.org")
    (record,) = records(FILES[-1])
    assert set(record) <= set(schema["properties"])
    with pytest.raises(ValidationError):
        MoecacheRecord.model_validate({**record, "clock": "sundial"})
