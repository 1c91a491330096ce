"""Which policy a search names as the best, and what it says of it."""

from __future__ import annotations

from typing import Any

import yaml

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.tune.outcome import (
    SEARCHED,
    SHIPPED,
    Entry,
    Outcome,
    front_table,
    policy_yaml,
)

QUESTION: dict[str, Any] = {
    "pretrained": "tiny",
    "tasks": ["quiz"],
    "limit": None,
    "capacity": "25%",
    "hardware": "a100-5GBps",
    "bandwidth": None,
    "metric": "tok_per_s",
    "budget": 1.0,
}


def entry(name: str, accuracy: float, speed: float, kind: str = SEARCHED, **policy: Any) -> Entry:
    return Entry(
        name=name,
        kind=kind,
        policy=load_policy("on_demand", policy).as_dict(),
        accuracy=accuracy,
        stderr=0.01,
        speed=speed,
        measured_by="model",
        within_budget=accuracy >= 0.89,
    )


def outcome(*entries: Entry, metric: str = "tok_per_s") -> Outcome:
    return Outcome(
        question={**QUESTION, "metric": metric},
        floor=0.89,
        entries=entries,
        left_out={"commitmoe": "needs a predictor"},
        counts={"complete": 2, "pruned": 5},
    )


def test_the_best_is_the_fastest_within_the_budget_and_not_the_fastest_of_all() -> None:
    found = outcome(
        entry("specmd", 0.90, 100.0, SHIPPED),
        entry("trial 7", 0.89, 130.0),
        entry("trial 8", 0.70, 500.0),
    )
    best = found.fastest()
    assert best is not None and best.name == "trial 7"
    assert found.verdict == (
        "trial 7 (tok_per_s 130.0, accuracy 0.890) is faster than every shipped composition that "
        "meets the budget: specmd (100.0)."
    )
    assert [e.name for e in found.front] == ["trial 8", "trial 7", "specmd"]


def test_a_latency_is_better_where_it_is_lower() -> None:
    found = outcome(
        entry("specmd", 0.90, 100.0, SHIPPED), entry("trial 7", 0.9, 130.0), metric="tpot_ms"
    )
    best = found.fastest()
    assert best is not None
    assert best.name == "specmd"
    assert found.verdict.startswith("None was found faster than the shipped specmd")
    assert [e.name for e in found.front] == ["specmd"]


def test_nothing_within_the_budget_is_said() -> None:
    assert outcome(entry("trial 1", 0.5, 1.0)).verdict == "No policy met the budget."
    found = outcome(entry("specmd", 0.5, 9.0, SHIPPED), entry("trial 1", 0.9, 1.0))
    assert found.verdict.endswith("meets the budget; no shipped composition does.")


def test_equal_figures_are_one_entry_of_the_front_and_the_first_of_them() -> None:
    found = outcome(entry("a", 0.9, 5.0, SHIPPED), entry("b", 0.9, 5.0), entry("c", 0.9, 4.0))
    assert [e.name for e in found.front] == ["a"]
    best = found.fastest()
    assert best is not None and best.name == "a"


def test_the_best_policys_file_is_that_policy(tmp_path: Any) -> None:
    chosen = entry("trial 7", 0.9, 130.0, **{"miss": "drop", "miss.h": 1, "prefetch": "next_gate"})
    path = tmp_path / "best.yaml"
    path.write_text(policy_yaml(chosen, outcome(chosen)))
    loaded = load_policy(str(path)).as_dict()
    for part in ("phases", "routing", "prefetch", "eviction", "miss"):
        assert loaded[part] == chosen.policy[part]
    assert yaml.safe_load(path.read_text())["name"] == "tuned"


def test_the_table_shows_front_shipped_verdict_and_what_was_left_out() -> None:
    found = outcome(entry("specmd", 0.9, 100.0, SHIPPED), entry("trial 7", 0.9, 130.0))
    text = front_table(found.as_dict())
    front, _, shipped = text.partition("## Shipped compositions")
    assert "| trial 7 |" in front and "specmd" not in front
    assert "| specmd |" in shipped
    assert "Left out: commitmoe: needs a predictor" in text
