"""The regression gate: what passes, what fails, and what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.report.columns import metric_column
from lm_eval_moecache.report.compare import Rules, compare, score_test
from lm_eval_moecache.report.metrics import METRICS
from lm_eval_moecache.report.results import Score, load_runs
from tests.report.runs import record, write

Captured = pytest.CaptureFixture[str]
ANSWERS = (1.0,) * 9 + (0.0,)


def gate(tmp_path: Path, new: dict[str, Any], *options: str, **old: Any) -> int:
    write(tmp_path / "old", record("a", **{"answers": ANSWERS, **old}))
    write(tmp_path / "new", record("a", **{"answers": ANSWERS, **new}))
    return main(["compare", str(tmp_path / "old"), str(tmp_path / "new"), *options])


def test_a_rerun_passes(tmp_path: Path, capsys: Captured) -> None:
    assert gate(tmp_path, {}) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "pass: 4 figures: 4 same"


def test_lower_accuracy_fails_naming_task_metric_and_test(tmp_path: Path, capsys: Captured) -> None:
    assert gate(tmp_path, {"answers": (1.0,) * 2 + (0.0,) * 8}) == 1
    out = capsys.readouterr().out
    assert "worse    quiz acc,none: 0.9 -> 0.2" in out
    assert "McNemar: 7 lost, 0 won of 10 documents, p 0.0078, corrected 0.0078" in out
    assert "1 scores are tested; the chance that chance alone fails" in out
    assert "at most 1% (Holm, Tarone)" in out


def test_what_chance_does_passes_and_alpha_decides(tmp_path: Path) -> None:
    lower = {"answers": (1.0,) * 7 + (0.0,) * 3}
    assert gate(tmp_path, lower) == 0
    assert gate(tmp_path, lower, "--alpha=25%") == 1
    assert gate(tmp_path, lower, "--alpha=25%", "--floor=20%") == 0
    assert gate(tmp_path, lower, "--alpha=0") == 2


def test_tests_are_corrected_for_their_number(tmp_path: Path, capsys: Captured) -> None:
    """Seven lost answers are news in one task, but not in one of two (and of all together)."""
    old = record("a", answers=(1.0,) * 9 + (0.0,), tasks=("quiz", "exam"))
    new = record("a", answers=(1.0,) * 9 + (0.0,), tasks=("quiz", "exam"))
    lower = record("a", answers=(1.0,) * 2 + (0.0,) * 8)
    new["results"]["quiz"], new["scores"]["quiz"] = (
        lower["results"]["quiz"],
        lower["scores"]["quiz"],
    )
    write(tmp_path / "old", old)
    write(tmp_path / "new", new)
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert "within   quiz acc,none" in capsys.readouterr().out


def test_small_losses_in_every_task_are_one_loss(tmp_path: Path, capsys: Captured) -> None:
    tasks = tuple(f"quiz{i}" for i in range(5))
    lower = {"answers": (1.0,) * 7 + (0.0,) * 3, "tasks": tasks}
    assert gate(tmp_path, lower, tasks=tasks) == 1
    worse = [s for s in capsys.readouterr().out.splitlines() if s.startswith("worse")]
    assert len(worse) == 1
    assert worse[0].startswith("worse    (all) accuracy: 0.9 -> 0.7 ")
    assert "10 lost, 0 won of 50 documents" in worse[0]


def test_tests_on_too_few_documents_are_named(tmp_path: Path, capsys: Captured) -> None:
    assert gate(tmp_path, {"answers": (0.0,) * 4}, answers=(1.0,) * 4) == 0
    assert "1 of them have too few documents to ever fail: quiz acc,none" in (
        capsys.readouterr().out
    )


MACHINE = {
    "machine": {"cpu": "x86_64", "cpu_model": "Some 6 85 7", "instructions": "AVX2", "threads": 1},
    "versions": {"torch": "2.9", "transformers": "5.1", "numpy": "2.4"},
}


def test_on_the_baselines_machine_figures_repeat_to_the_digit(
    tmp_path: Path, capsys: Captured
) -> None:
    one_lost = (1.0,) * 8 + (0.0,) * 2

    def judged(new: dict[str, Any], *options: str, **figures: Any) -> int:
        old = record("a", answers=ANSWERS, **figures) | {"environment": MACHINE}
        later = record("a", answers=one_lost, **figures) | {"environment": new}
        write(tmp_path / "old", old)
        write(tmp_path / "new", later)
        return main(["compare", str(tmp_path / "old"), str(tmp_path / "new"), *options])

    assert judged(MACHINE) == 1
    out = capsys.readouterr().out
    assert "1 runs were made on the baseline's machine" in out
    assert "allowed 0, exactly" in out
    assert judged(MACHINE, "--same_machine=no") == 0
    assert judged(MACHINE, "--floor=20%") == 0
    for part, change in (
        ("machine", {"cpu_model": "Other 6 85 7"}),
        ("machine", {"instructions": "AVX512"}),
        ("machine", {"cores": 64}),
        ("versions", {"torch": "3.0"}),
    ):
        other = MACHINE | {part: {**MACHINE[part], **change}}
        assert judged(other) == ("cores" in change)
        assert judged(other, "--same_machine=yes") == 1
    # A measured clock never repeats, and a lossy policy depends on it.
    assert judged(MACHINE, clock="wall") == 0


def test_a_higher_miss_rate_fails_and_passes_by_tolerance(tmp_path: Path, capsys: Captured) -> None:
    assert gate(tmp_path, {"miss_rate": 0.26}) == 1
    assert "worse    quiz miss_rate: 0.25 -> 0.26" in capsys.readouterr().out
    assert gate(tmp_path, {"miss_rate": 0.2525}) == 0
    assert gate(tmp_path, {"miss_rate": 0.2525}, "--same_machine=yes") == 1
    assert gate(tmp_path, {"miss_rate": 0.26}, "--tolerance=0.05") == 0
    assert gate(tmp_path, {"miss_rate": 0.26}, "--tolerance=5%") == 0
    assert gate(tmp_path, {"miss_rate": 0.26}, "--tolerance=3%") == 1
    assert gate(tmp_path, {"miss_rate": 0.26}, "--tolerance=miss_rate=0.05") == 0
    assert gate(tmp_path, {"miss_rate": 0.26}, "--tolerance=tok_per_s=0.05") == 1
    assert gate(tmp_path, {"miss_rate": 0.24, "tok_per_s": 101}) == 0


def test_the_wall_clock_has_a_tolerance_of_its_own(tmp_path: Path) -> None:
    assert gate(tmp_path, {"clock": "wall", "tok_per_s": 95}, clock="wall") == 0
    assert gate(tmp_path, {"clock": "wall", "tok_per_s": 85}, clock="wall") == 1


def test_a_profile_under_its_former_name_is_the_same(tmp_path: Path) -> None:
    old, new = record("a", hardware="a100-5gbps"), record("a", hardware="a100-5GBps")
    old["config"]["moecache"]["hardware"]["name"] = "a100-5gbps"
    [before] = load_runs(write(tmp_path / "old", old))
    [after] = load_runs(write(tmp_path / "new", new))
    assert (before.model_args, before.moecache) == (after.model_args, after.moecache)
    assert compare([before], [after], Rules()).differing == {}


def test_a_missing_task_fails_by_name_and_a_new_one_passes(
    tmp_path: Path, capsys: Captured
) -> None:
    assert gate(tmp_path, {"tasks": ("quiz",)}, tasks=("quiz", "exam")) == 1
    assert "missing  exam" in capsys.readouterr().out
    assert gate(tmp_path, {"tasks": ("quiz", "exam")}) == 0


def test_a_missing_run_fails(tmp_path: Path, capsys: Captured) -> None:
    write(tmp_path / "old", record("b", capacity="50%"))
    assert gate(tmp_path, {}) == 1
    assert "capacity=50%" in capsys.readouterr().out


def test_unusable_input_exits_with_2(tmp_path: Path, capsys: Captured) -> None:
    write(tmp_path / "old", record("b", capacity="50%"))
    assert gate(tmp_path, {"capacity": "7%"}) == 2
    assert "no configuration in common" in capsys.readouterr().err
    assert gate(tmp_path, {}, "--metrics=mis_rate") == 2
    assert gate(tmp_path, {}, "--tolerance=much") == 2
    assert gate(tmp_path, {}, "--floor=nan") == 2
    write(tmp_path / "new", record("b"))
    assert gate(tmp_path, {}) == 2
    assert "two runs" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "nothing")]) == 2


def test_two_single_runs_are_compared_whatever_their_arguments(
    tmp_path: Path, capsys: Captured
) -> None:
    assert gate(tmp_path, {"capacity": "7%", "miss_rate": 0.5, "seed": "1"}) == 1
    out = capsys.readouterr().out
    assert "argument differs: capacity: 25% -> 7%" in out
    assert "argument differs: seed: (not given) -> 1" in out
    assert "policy" not in out.partition("worse")[0]
    assert "worse    quiz miss_rate: 0.25 -> 0.5" in out


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("batch_size", {"config": {"batch_size": 1}}, {"config": {"batch_size": 4}}),
        ("chat_template", {}, {"chat_template_sha": "5" * 64}),
        (
            "gen_kwargs",
            {"config": {"gen_kwargs": {}}},
            {"config": {"gen_kwargs": {"max_gen_toks": 9}}},
        ),
        ("limit", {"config": {"limit": 8}}, {"config": {"limit": 40}}),
        ("num_fewshot", {"n-shot": {"quiz": 0}}, {"n-shot": {"quiz": 5}}),
        ("task_versions", {"versions": {"quiz": 1}}, {"versions": {"quiz": 2}}),
        ("model_sha", {"config": {"model_sha": "a"}}, {"config": {"model_sha": "b"}}),
        ("emulate", {}, {"config": {"moecache": {"emulate": {"name": "Mixtral-8x7B"}}}}),
        ("seed", {}, {"config": {"moecache": {"seed": 3}}}),
        ("hardware", {}, {"config": {"moecache": {"hardware": {"name": "h200"}}}}),
    ],
)
def test_runs_of_different_identity_are_refused_by_the_keys_that_differ(
    tmp_path: Path, capsys: Captured, key: str, old: dict[str, Any], new: dict[str, Any]
) -> None:
    for name, change, speed in (("old", old, 2914.0), ("new", new, 1007.0)):
        made = record("a", answers=ANSWERS, tok_per_s=speed)
        moecache = change.get("config", {}).get("moecache", {})
        config = {**made["config"], **change.get("config", {})}
        config["moecache"] = {**made["config"]["moecache"], **moecache}
        write(tmp_path / name, {**made, **change, "config": config})
    places = [str(tmp_path / "old"), str(tmp_path / "new")]
    assert main(["compare", *places]) == 2
    assert f"different identity on quiz: {key} (" in capsys.readouterr().err
    assert main(["compare", *places, f"--ignore={key}"]) == 1


@pytest.mark.parametrize(
    "metric", [*METRICS, "decode_miss_rate", "prefill_hit_rate", "ttft_ms.p99", "tok_per_s@quiz"]
)
def test_every_metric_that_tables_know_is_compared(
    tmp_path: Path, capsys: Captured, metric: str
) -> None:
    def with_figure(value: float) -> dict[str, Any]:
        made = record("a", answers=ANSWERS)
        name, _, percentile = metric.partition("@")[0].partition(".")
        figures = made["config"]["moecache"]["tasks"]["quiz"]
        figures[name] = {percentile: value} if percentile else value
        return made

    write(tmp_path / "old", with_figure(100.0))
    write(tmp_path / "new", with_figure(150.0))
    places = [str(tmp_path / "old"), str(tmp_path / "new"), f"--metrics={metric}"]
    direction = metric_column(metric).higher_is_better
    assert main(["compare", *places]) == (direction is not True)
    verdict = {True: "better", False: "worse", None: "changed"}[direction]
    assert f"{verdict:8s} quiz {metric.partition('@')[0]}: 100 -> 150" in capsys.readouterr().out
    assert main(["compare", *places[1::-1], places[2]]) == (direction is not False)
    assert main(["compare", *places, "--tolerance=50%"]) == 0


def test_machine_readable_and_markdown_forms(tmp_path: Path, capsys: Captured) -> None:
    assert gate(tmp_path, {"miss_rate": 0.5}, "--format=json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "regression"
    worse = [row for row in data["rows"] if row["verdict"] == "worse"]
    assert [(row["task"], row["metric"], row["change"]) for row in worse] == [
        ("quiz", "miss_rate", 0.25)
    ]
    assert gate(tmp_path, {"miss_rate": 0.5}, "--format=md") == 1
    out = capsys.readouterr().out
    assert out.startswith("### moecache: REGRESSION: 4 figures: 3 same, 1 worse")
    assert "| **worse** | `moecache,capacity=25%,policy=specmd` | quiz | miss_rate |" in out


def test_perplexity_is_judged_by_its_log_likelihoods() -> None:
    def score(value: float) -> Score:
        return Score(
            metric="word_perplexity",
            filter="none",
            value=value,
            stderr=None,
            higher_is_better=False,
        )

    words = (10.0, 20.0, 30.0, 40.0, 50.0)
    old = {str(i): [-2.0 * w, w] for i, w in enumerate(words)}
    # Every document loses the same per word: of 32 patterns of signs, this is the worst.
    new = {str(i): [-2.1 * w, w] for i, w in enumerate(words)}
    test = score_test(score(math.exp(2)), score(math.exp(2.1)), old, new)
    assert test is not None
    assert (test.p, test.least_p, test.least_possible) == (1 / 32, 1 / 32, 1 / 32)
    # +1, -5, +1, +1, +1 is a sum of -1: 16 patterns have +5, and one with -5 comes as high.
    losses = (1, -5, 1, 1, 1)
    mixed = {str(i): [-2.0 * w - d, w] for i, (w, d) in enumerate(zip(words, losses, strict=True))}
    test = score_test(score(math.exp(2)), score(2.0), old, mixed)
    assert test is not None
    assert test.p == 17 / 32


def test_without_samples_the_standard_errors_decide() -> None:
    def score(value: float, stderr: float | None) -> Score:
        return Score(metric="acc", filter="none", value=value, stderr=stderr, higher_is_better=True)

    test = score_test(score(0.8, 0.03), score(0.7, 0.04), {}, {})
    assert test is not None
    assert test.p == pytest.approx(0.02275, abs=1e-5)  # two standard errors of 0.05
    assert score_test(score(0.8, None), score(0.7, 0.04), {}, {}) is None


def test_a_score_among_the_figures_of_speed_is_explained() -> None:
    with pytest.raises(ValueError, match="every score of every task is compared as it is"):
        Rules(metrics=("tiny_arc:acc_norm",))
