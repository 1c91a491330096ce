"""The public names of the package: what they return, what they refuse, and what they import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import lm_eval_moecache
from lm_eval_moecache import MoECacheError, MoECacheSpecLM, load_runs, load_trace, plan, replay
from lm_eval_moecache.records.schemas.keys import DEFAULTS
from lm_eval_moecache.report.runs.files import load_runs as read_runs
from tests.conftest import Moecache


def test_every_public_name_is_there_and_the_package_imports_none_of_them() -> None:
    heavy = ("torch", "numba", "pydantic", "numpy", "jsonargparse")
    script = (
        "import sys, lm_eval_moecache\n"
        f"print(sorted(set(sys.modules) & set({heavy})))\n"
        "print([n for n in lm_eval_moecache.__all__ if not getattr(lm_eval_moecache, n, None)])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n[]\n", done.stderr
    with pytest.raises(AttributeError, match="no attribute 'Evictoin'"):
        getattr(lm_eval_moecache, "Evictoin")  # noqa: B009


def test_a_replay_is_the_commands_with_a_report(trace: Path, moecache: Moecache) -> None:
    report = replay(trace, policy="specmd", capacity="50%", seed=3)
    words = ("--policy=specmd", "--capacity=50%", "--seed=3")
    assert report.as_dict() == moecache.json("replay", trace, *words)
    assert report.metrics == report.as_dict()["runs"][0]["metrics"]
    assert f"{report}\n" == moecache("replay", trace, *words)
    loaded = load_trace(trace, predicted=True)
    assert replay(loaded, policy="specmd", capacity="50%", seed=3).metrics == report.metrics


def test_rules_with_and_without_parameters_stand_side_by_side(
    trace: Path, moecache: Moecache
) -> None:
    stale = [{"name": "least_stale", "order": order} for order in ("fifo", "last_use")]
    report = replay(trace, eviction=["lru", *stale], capacity=["5experts", "50%"], jobs=2)
    table = report.to_dataframe()
    assert table["eviction"].tolist() == [e for e in ("lru", *["least_stale"] * 2) for _ in "ab"]
    assert table["capacity"].tolist() == ["5experts", "50%"] * 3
    assert table["tpot_ms.p99"].notna().all()
    assert table["composition.eviction.order"].tolist()[2:] == ["fifo"] * 2 + ["last_use"] * 2
    with pytest.raises(MoECacheError, match="there are 6 replays"):
        assert report.metrics
    lists = "lru,{name: least_stale, order: fifo},{name: least_stale, order: last_use}"
    words = ("--eviction", lists, "--capacity=5experts,50%")
    assert moecache.json("replay", trace, *words) == report.as_dict()
    text = moecache("replay", trace, *words)
    assert "least_stale (eviction.order=fifo)" in text
    assert "least_stale (eviction.order=last_use)" in text


def test_a_plan_is_what_the_command_prints(moecache: Moecache) -> None:
    report = plan("OLMoE-1B-7B", precision="int4", context=2048)
    words = ("OLMoE-1B-7B", "--precision=int4", "--context=2048")
    assert report == moecache.json("plan", *words)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan("OLMoE-1B-7B", hardwear="h100"), "Did you mean 'hardware'"),
        (lambda: plan("no such model"), "no such model"),
        (lambda: load_runs("no/such/folder"), "no/such/folder"),
        (lambda: load_trace("no_such.parquet"), "no_such.parquet"),
        (lambda: replay("no_such.parquet"), "no_such.parquet"),
        (lambda: replay("any.parquet", evictoin="lru"), "Did you mean 'eviction'"),
        (lambda: replay("any.parquet", eviction="lruu"), "Did you mean 'lru'"),
        (lambda: replay("any.parquet", capacity="much"), "much"),
    ],
)
def test_what_a_user_gets_wrong_is_one_kind_of_error(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(MoECacheError, match=message):
        call()


def test_help_shows_the_models_keys_with_their_defaults() -> None:
    shown = signature(MoECacheSpecLM).parameters
    assert {key: shown[key].default for key in DEFAULTS} == DEFAULTS


def test_runs_are_a_line_each_of_the_same_named_columns() -> None:
    place = Path(__file__).resolve().parent.parent / "results/demo"
    table, samples = load_runs(place)
    stored = read_runs(place)
    assert table.shape == (len(stored), 43) and table.columns.is_unique
    row, run = table.iloc[0], stored[0]
    answers = samples[
        (samples.run_id == run.run_id) & (samples.metric == "exact_match,strict-match")
    ]
    assert answers.value.mean() == pytest.approx(row["accuracy"])
    best = table[table.accuracy > table.accuracy.max() - 0.01].sort_values("right_per_hour")
    assert best.label.iloc[-1] == "every expert resident"
    score = run.score("tiny_gsm8k")
    assert score is not None
    assert (row["accuracy"], row["accuracy_stderr"]) == (score.value, score.stderr)
    assert row["tok_per_s"] == run.moecache["totals"]["tok_per_s"]
    assert row["ttft_ms.p99"] == run.moecache["totals"]["ttft_ms"]["p99"]
    assert (row["policy"], row["capacity"]) == ("on_demand", "100%")
    assert row["hardware"] == "rtx-4090" and row["emulate"] == "OLMoE-1B-7B"
