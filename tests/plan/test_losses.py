"""Published losses: what is read, the forecast by hand, and what is said of a model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import published_losses
import pytest

from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm
from lm_eval_moecache.emulate.models import load_real_model
from moecache_plan.losses import (
    ALGORITHMS,
    NOISE,
    RULES,
    Loss,
    amount,
    band,
    here,
    kind_of,
    known_names,
    published,
    rules_of,
    shipped,
)
from moecache_plan.losses_page import lines
from tests.conftest import Moecache

FOLDER = Path(__file__).resolve().parents[2] / "results/published_losses"


def loss(model: str, kept: float, **more: object) -> Loss:
    row = Loss(
        model=model,
        experts=8,
        top_k=2,
        rule="drop",
        setting="",
        share=None,
        share_of="",
        resident=None,
        kind="generate",
        task="gsm8k",
        metric="accuracy",
        before=0.8,
        after=0.8 * kept,
        n=None,
        source="",
        exactness="table",
    )
    return replace(row, **more)  # type: ignore[arg-type]


def test_a_band_is_the_median_with_every_model_counting_once() -> None:
    rows = [loss("A", 0.9), loss("B", 0.8), loss("C", 0.6), loss("C", 0.7), loss("C", 0.65)]
    found = band(rows)
    assert found is not None and (found.rows, found.models) == (5, 3)
    # Weights 1/3 each at .6, .65, .7 and 1 at .8, .9: middles at .5/9, 1.5/9, 2.5/9, 1/2, 5/6.
    assert found.kept == pytest.approx(0.8)
    wider = math.sqrt(4 / 3)
    at_a_tenth = 0.6 + 0.05 * (0.1 - 0.5 / 9) / (1 / 9)
    at_nine = 0.8 + 0.1 * (0.9 - 0.5) / (5 / 6 - 0.5)
    assert found.low == pytest.approx(0.8 - wider * (0.8 - at_a_tenth))
    assert found.high == pytest.approx(0.8 + wider * (min(at_nine, 0.9) - 0.8))


def test_a_range_is_never_under_the_noise_of_the_sources() -> None:
    found = band([loss(name, 0.95) for name in "ABC"])
    assert found is not None
    middle, least, most = found.points(0.5)
    assert middle == pytest.approx(2.5)
    assert (middle - least, most - middle) == pytest.approx((1.2815515594463 * NOISE,) * 2)


def test_no_forecast_loses_more_than_all_or_gains_more_than_is_left() -> None:
    found = band([loss(name, kept) for name, kept in zip("ABC", (0.0, 0.5, 1.5), strict=True)])
    assert found is not None
    _, least, most = found.points(0.9)
    assert least >= -10 - 1e-9 and most <= 90 + 1e-9


@pytest.mark.parametrize(
    ("share", "resident", "words"),
    [
        (0.25, 0.5, "up to 30% changed"),
        (0.5, None, "30 to 55% changed"),
        (0.9, None, "over 55% changed"),
        (None, 0.25, "up to a quarter in memory"),
        (None, 0.5, "over a quarter in memory"),
        (None, None, ""),
    ],
)
def test_an_amount_is_of_what_was_changed_or_else_of_memory(
    share: float | None, resident: float | None, words: str
) -> None:
    assert amount(share, resident) == words


def test_every_lossy_algorithm_has_a_class_of_rule() -> None:
    lossy = {
        name
        for axis in ("routing", "miss")
        for name in algorithm_names(axis)
        if not find_algorithm(axis, name).is_lossless
    }
    assert lossy == ALGORITHMS.keys() and set(ALGORITHMS.values()) <= RULES.keys()


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("prune", ["prune"]),
        ("cache_prior", ["reroute"]),
        ("mixture_cache", ["reroute"]),
        ("buddymoe", ["buddy"]),
        ("hobbit", ["cascade"]),
    ],
)
def test_a_rule_is_asked_for_by_class_algorithm_or_composition(name: str, rules: list[str]) -> None:
    assert rules_of(name) == rules


@pytest.mark.parametrize(
    ("typed", "known"),
    [
        (("REAP", "arc-c"), ("prune", "arc_challenge")),
        (("top-k", "humaneval+"), ("top_k", "humaneval_plus")),
        (("cache_prior", "MATH-500"), ("cache_prior", "math500")),
        (("prune", "gpqa"), ("prune", "gpqa")),
        (("buddymoe", "gpqa"), ("buddymoe", "gpqa")),
    ],
)
def test_rules_and_tasks_are_known_by_other_names(
    typed: tuple[str, str], known: tuple[str, str]
) -> None:
    assert known_names(*typed) == known
    assert rules_of(known[0]) and kind_of(known[1])


def test_a_composition_by_its_path_keeps_its_letters(tmp_path: Path) -> None:
    path = tmp_path / "My-Rule.yaml"
    path.write_text(
        "name: mine\nrouting: cache_prior\nprefetch: none\neviction: lru\nmiss: fetch\n"
    )
    rule, _ = known_names(str(path), "gpqa")
    assert rule == str(path) and rules_of(rule) == ["reroute"]


def test_scores_that_a_judge_gives_are_no_shares_of_right_answers() -> None:
    assert not any(row.is_share for row in shipped() if row.task in ("writing", "wildbench"))
    with pytest.raises(ValueError, match="'writing' is not known"):
        kind_of("writing")


QWEN = load_real_model("Qwen3-30B-A3B", "model")


def test_what_cache_aware_routing_costs_with_half_of_the_experts_in_memory() -> None:
    (report,) = published(QWEN, "mixture_cache", resident=0.5, task="gsm8k")
    assert (report["rule"], report["kind"]) == ("reroute", "generate")
    assert report["amount"] == "over a quarter in memory"
    # The unmodified model's own published score.
    assert report["score"] == pytest.approx(0.903)
    forecast = report["forecast"]
    assert forecast["least"] < forecast["points"] < forecast["most"]
    assert forecast["rows"] == 68 and forecast["models"] == 10
    assert report["judged"]["rows"] == 68 and 0.74 < report["judged"]["covered"] < 0.9
    first, second = report["nearest"][:2]
    # As many experts, and twice as many; both with an LRU cache of half of them.
    assert (first["model"], first["octaves"]) == ("Gemma-4-26B-A4B", 0)
    assert (second["model"], second["octaves"]) == ("Qwen3.5-35B-A3B", 1)
    assert first["of"] == ["gsm8k", "over a quarter in memory"]
    scores = [(each["before"], each["after"]) for each in first["settings"]]
    assert scores == [(0.878, after) for after in (0.877, 0.872, 0.875, 0.879)]
    assert first["least_points"] == pytest.approx(-0.1)
    assert first["most_points"] == pytest.approx(0.6)
    assert {row["model"] for row in report["here"]} == {"tiny"}
    assert all("mixture_cache" in row["rule"] for row in report["here"])
    (near,) = (line for line in lines([report]) if line.startswith("Gemma-4-26B-A4B"))
    assert near.split()[:3] == ["Gemma-4-26B-A4B", "4", "1319"]


def test_a_rule_of_one_model_has_rows_and_no_forecast() -> None:
    (report,) = published(QWEN, "buddymoe", resident=0.5)
    assert report["forecast"] is None and report["judged"] is None
    assert "No forecast: published on DeepSeek-V2-Lite" in " ".join(lines([report]))
    assert [each["model"] for each in report["nearest"]] == ["DeepSeek-V2-Lite"]


def test_a_rule_of_three_models_is_forecast_and_said_to_be_untested() -> None:
    (report,) = published(QWEN, "commit", task="gsm8k")
    assert report["forecast"]["models"] == 3 and report["judged"] is None
    assert "never tested on a fourth model" in " ".join(lines([report]))


def test_what_tiny_and_the_carved_model_lose_here_follows_from_the_pairs() -> None:
    assert (FOLDER / "here.csv").read_text() == published_losses.as_csv(
        published_losses.own_losses()
    )
    assert {row["model"] for row in here()} == {"tiny", "carved_gemma"}


@pytest.mark.slow
def test_choose_takes_the_share_in_memory_from_its_capacity(moecache: Moecache) -> None:
    words = ("choose", "Qwen3-30B-A3B", "--hardware=h100", "--lossy=cache_prior", "--task=gsm8k")
    for capacity, of in (("50%", "over a quarter in memory"), ("6/layer", "up to a quarter")):
        (lost,) = moecache.json(*words, "--capacity", capacity)["losses"]
        assert lost["amount"].startswith(of)
