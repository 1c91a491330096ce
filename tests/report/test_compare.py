"""The regression gate: what passes, what fails, and how both are reported."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.report.compare import CompareOptions, as_text, compare, paired, score_test
from lm_eval_moecache.report.metrics import METRICS, metric_column
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.report.runs.run import Run, Score
from lm_eval_moecache.report.statistics import answers_interval
from tests.report.runs import record, write

Captured = pytest.CaptureFixture[str]
Gate = Callable[..., tuple[int, str]]
ANSWERS = (1.0,) * 9 + (0.0,)


def lost(count: int) -> tuple[float, ...]:
    """`ANSWERS` with `count` more answers wrong."""
    return (1.0,) * (9 - count) + (0.0,) * (1 + count)


@pytest.fixture
def compared(tmp_path: Path, capsys: Captured) -> Gate:
    """Compare an old and a new record; return the exit code and the printed text."""

    def run(old: dict[str, Any], new: dict[str, Any], *options: str) -> tuple[int, str]:
        places = [str(write(tmp_path / name, r)) for name, r in (("old", old), ("new", new))]
        code = main(["compare", *places, *options])
        return code, "".join(capsys.readouterr())

    return run


@pytest.fixture
def gate(compared: Gate) -> Gate:
    """Compare two runs of `ANSWERS`, given what is different in each."""

    def run(new: dict[str, Any], *options: str, **old: Any) -> tuple[int, str]:
        before, after = (record("a", **{"answers": ANSWERS, **side}) for side in (old, new))
        return compared(before, after, *options)

    return run


def verdicts(compared: Gate, *sides: dict[str, Any], metric: str) -> tuple[int, set[str]]:
    """Return the exit code, and the verdicts of a metric's rows."""
    code, printed = compared(*sides, "--format=json")
    return code, {row["verdict"] for row in json.loads(printed)["rows"] if row["metric"] == metric}


def test_lower_accuracy_fails_naming_task_metric_and_test(gate: Gate) -> None:
    code, printed = gate({"answers": lost(7)})
    assert code == 1
    assert "worse    quiz acc,none: 0.9 -> 0.2" in printed
    assert "No run was made on the baseline's kind of CPU" in printed
    assert "McNemar: 7 lost, 0 won of 10 documents, one-sided p 0.0078)" in printed
    assert "1 figures are tested; without a real change, this comparison fails" in printed
    assert "at most 1% (Holm, Tarone)" in printed
    assert "found in four cases of five: 76 on 10 documents" in printed


@pytest.mark.parametrize(
    ("options", "code"), [((), 0), (("--alpha=25%",), 1), (("--alpha=25%", "--floor=20%"), 0)]
)
def test_what_chance_does_passes_and_alpha_decides(
    gate: Gate, options: tuple[str, ...], code: int
) -> None:
    assert gate({"answers": lost(2)}, *options)[0] == code


def test_tests_are_corrected_for_their_number(compared: Gate) -> None:
    """Seven lost answers are significant in a single task, not in one of two (and their sum)."""
    old, new = (record("a", answers=ANSWERS, tasks=("quiz", "exam")) for _ in range(2))
    for key in ("results", "scores"):
        new[key]["quiz"] = record("a", answers=lost(7))[key]["quiz"]
    code, printed = compared(old, new)
    assert code == 0 and "within   quiz acc,none" in printed


def test_small_losses_in_every_task_are_one_loss(gate: Gate) -> None:
    tasks = tuple(f"quiz{i}" for i in range(5))
    code, printed = gate({"answers": lost(2), "tasks": tasks}, tasks=tasks)
    [worse] = [line for line in printed.splitlines() if line.startswith("worse")]
    assert code == 1 and worse.startswith("worse    (all) accuracy: 0.9 -> 0.7 ")
    assert "10 lost, 0 won of 50 documents" in worse


def test_tests_on_too_few_documents_are_named(gate: Gate) -> None:
    code, printed = gate({"answers": (0.0,) * 4}, answers=(1.0,) * 4)
    assert code == 0
    assert "1 of them have too few documents to fail at all: quiz acc,none" in printed
    assert "Smallest loss" not in printed


RANK = {"better": "worse", "within": "within"}


@pytest.mark.parametrize(
    ("metric", "old", "new", "verdict"),
    [
        # 0.375 -> 0.625 of eight documents, two won: chance. Seven of ten won: no chance.
        ("acc,none", (1,) * 3 + (0,) * 5, (1,) * 5 + (0,) * 3, "within"),
        ("acc,none", lost(7), ANSWERS, "better"),
        # 2% is allowed either way on another machine.
        ("tok_per_s", 100.0, 100.000004, "within"),
        ("tok_per_s", 100.0, 101.9, "within"),
        ("tok_per_s", 100.0, 102.1, "better"),
        ("miss_rate", 0.25, 0.2499, "within"),
        ("miss_rate", 0.25, 0.24, "better"),
    ],
)
def test_a_gain_is_held_to_the_rules_of_a_loss(
    compared: Gate, metric: str, old: Any, new: Any, verdict: str
) -> None:
    """Whichever side is the baseline, the verdict is the same but for its direction."""
    field = "answers" if metric == "acc,none" else metric
    sides = [record("a", **{field: value}) for value in (old, new)]
    for records, expected in ((sides, verdict), (sides[::-1], RANK[verdict])):
        assert verdicts(compared, *records, metric=metric) == (expected == "worse", {expected})
        for form in ("text", "md"):
            text = compared(*records, f"--format={form}")[1]
            assert f"{expected:8s} quiz {metric}" in text
            assert not {"better", "worse"} - {expected} & set(text.replace("*", " ").split())


def test_answers_of_other_settings_are_tested_on_one_machine_too(gate: Gate) -> None:
    """Another capacity repeats no answer: two of ten that turn right or wrong are chance."""
    for new, old in ((lost(2), ANSWERS), (ANSWERS, lost(2))):
        changed = {"answers": new, "capacity": "7%", "environment": MACHINE}
        code, printed = gate(changed, answers=old, environment=MACHINE)
        assert code == 0 and "within   quiz acc,none" in printed and "p 0.25" in printed
        assert "repeat every digit" not in printed
    changed = {"answers": lost(8), "policy": "lfu", "environment": MACHINE}
    code, printed = gate(changed, "--ignore=policy", environment=MACHINE)
    assert code == 1 and "kind of CPU" not in printed


MACHINE = {
    "machine": {"cpu": "x86_64", "cpu_model": "Some 6 85 7", "instructions": "AVX2", "threads": 1},
    "versions": {"torch": "2.9", "transformers": "5.1", "numpy": "2.4"},
}


def test_on_the_baselines_machine_figures_repeat_to_the_digit(gate: Gate) -> None:
    def judged(new: dict[str, Any], *options: str, **figures: Any) -> tuple[int, str]:
        new_fields = {"answers": lost(1), "environment": new, **figures}
        return gate(new_fields, *options, environment=MACHINE, **figures)

    code, printed = judged(MACHINE)
    assert code == 1 and "allowed 0, exactly" in printed
    assert "1 runs were made on the baseline's machine" in printed
    assert judged(MACHINE, "--same_machine=no")[0] == 0
    assert judged(MACHINE, "--floor=20%")[0] == 0
    for part, change in (
        ("machine", {"cpu_model": "Other 6 85 7"}),
        ("machine", {"instructions": "AVX512"}),
        ("machine", {"cores": 64}),
        ("versions", {"torch": "3.0"}),
    ):
        other = MACHINE | {part: {**MACHINE[part], **change}}
        assert judged(other)[0] == ("cores" in change)
        assert judged(other, "--same_machine=yes")[0] == 1
    # Measured times never repeat, and lossy policies depend on them.
    assert judged(MACHINE, clock="wall")[0] == 0


@pytest.mark.parametrize(
    ("miss_rate", "option", "code"),
    [
        *((0.26, "--all", 1), (0.2525, "--all", 0), (0.2525, "--same_machine=yes", 1)),
        *((0.26, "--tolerance=0.05", 0), (0.26, "--tolerance=5%", 0), (0.26, "--tolerance=3%", 1)),
        (0.26, "--tolerance=miss_rate=0.05", 0),
        (0.26, "--tolerance=tok_per_s=0.05", 1),
        (0.24, "--all", 0),
    ],
)
def test_a_higher_miss_rate_fails_and_passes_by_tolerance(
    gate: Gate, miss_rate: float, option: str, code: int
) -> None:
    exit_code, printed = gate({"miss_rate": miss_rate}, option)
    assert exit_code == code
    assert (f"worse    quiz miss_rate: 0.25 -> {miss_rate}" in printed) == bool(code)


def test_the_wall_clock_has_a_tolerance_of_its_own(gate: Gate) -> None:
    assert gate({"clock": "wall", "tok_per_s": 95}, clock="wall")[0] == 0
    assert gate({"clock": "wall", "tok_per_s": 85}, clock="wall")[0] == 1


def test_a_missing_task_or_run_fails_by_name_and_a_new_one_passes(
    gate: Gate, tmp_path: Path
) -> None:
    code, printed = gate({"tasks": ("quiz",)}, tasks=("quiz", "exam"))
    assert code == 1 and "missing  exam" in printed
    assert gate({"tasks": ("quiz", "exam")})[0] == 0
    write(tmp_path / "old", record("b", capacity="50%"))
    code, printed = gate({})
    assert code == 1 and "capacity=50%" in printed


def test_sides_without_a_common_configuration_or_with_two_of_one_are_refused(
    gate: Gate, tmp_path: Path
) -> None:
    write(tmp_path / "old", record("b", capacity="50%"))
    code, printed = gate({"capacity": "7%"})
    assert code == 2 and "no configuration in common" in printed
    write(tmp_path / "new", record("b"))
    code, printed = gate({})
    assert code == 2 and "two runs" in printed


def test_two_single_runs_are_compared_whatever_their_arguments(gate: Gate) -> None:
    code, printed = gate({"capacity": "7%", "miss_rate": 0.5, "draft_tokens": "1"})
    assert code == 1
    assert "argument differs: capacity: 25% -> 7%" in printed
    assert "argument differs: draft_tokens: (not given) -> 1" in printed
    assert "policy" not in printed.partition("worse")[0]
    assert "worse    quiz miss_rate: 0.25 -> 0.5" in printed


def test_two_rows_of_one_sweep_are_compared(tmp_path: Path, capsys: Captured) -> None:
    rows = [("on demand, LRU", ANSWERS), ("hazard", ANSWERS), ("drop, all", lost(8))]
    records = (
        {**record(f"r{i}", answers=answers, draft_tokens=i), "label": label}
        for i, (label, answers) in enumerate(rows)
    )
    folder = str(write(tmp_path, *records))
    lru, *others = (f"run={label}" for label, _ in rows)
    for new, code in zip(others, (0, 1), strict=True):
        words = ["compare", folder, folder, "--baseline_where", lru, "--new_where", new]
        assert main(words) == code, capsys.readouterr()
    assert main([*words[:-1], "run=drop"]) == 2
    assert "--new_where='run=drop': no run has these settings" in capsys.readouterr().err


def test_how_many_requests_are_computed_together_is_no_setting(tmp_path: Path) -> None:
    for name, batch_size in (("old", 16), ("new", 200)):
        for policy in ("lru", "lfu"):
            run = record(policy, policy=policy, batch_size=batch_size, answers=ANSWERS)
            run["config"]["moecache"]["streams"] = 1
            write(tmp_path / name, run)
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 0


def in_config(key: str, *sides: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    before, after = ({"config": {key: value}} for value in sides)
    return key, before, after


def in_report(key: str, value: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return key, {}, {"config": {"moecache": {key: value}}}


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        in_config("limit", 8, 40),
        *(in_config("model_sha", "a", "b"), in_config("gen_kwargs", {}, {"max_gen_toks": 9})),
        ("chat_template", {}, {"chat_template_sha": "5" * 64}),
        ("num_fewshot", {"n-shot": {"quiz": 0}}, {"n-shot": {"quiz": 5}}),
        ("task_versions", {"versions": {"quiz": 1}}, {"versions": {"quiz": 2}}),
        *(in_report("emulate", {"name": "Mixtral-8x7B"}), in_report("seed", 3)),
        in_report("streams", 4),
        in_report("hardware", {"name": "h200"}),
    ],
)
def test_runs_of_different_identity_are_refused_by_the_keys_that_differ(
    compared: Gate, key: str, old: dict[str, Any], new: dict[str, Any]
) -> None:
    sides = []
    for change, speed in ((old, 2914.0), (new, 1007.0)):
        base = record("a", answers=ANSWERS, tok_per_s=speed)
        changed = change.get("config", {})
        moecache = {**base["config"]["moecache"], **changed.get("moecache", {})}
        config = {**base["config"], **changed, "moecache": moecache}
        sides.append({**base, **change, "config": config})
    code, printed = compared(*sides)
    assert code == 2 and f"different identity on quiz: {key} (" in printed
    assert compared(*sides, f"--ignore={key}")[0] == 1


@pytest.mark.parametrize(
    "metric", [*METRICS, "decode_miss_rate", "prefill_hit_rate", "ttft_ms.p99", "tok_per_s@quiz"]
)
def test_every_metric_that_tables_know_is_compared(compared: Gate, metric: str) -> None:
    sides = []
    for value in (100.0, 150.0):
        run = record("a", answers=ANSWERS)
        name, _, percentile = metric.partition("@")[0].partition(".")
        figures = run["config"]["moecache"]["tasks"]["quiz"]
        # Hits and misses add up to 1 where a record has both.
        figures.pop({"hit_rate": "miss_rate", "miss_rate": "hit_rate"}.get(name), None)
        figures[name] = {percentile: value} if percentile else value
        sides.append(run)
    option, direction = f"--metrics={metric}", metric_column(metric).higher_is_better
    code, printed = compared(*sides, option)
    assert code == (direction is not True)
    verdict = {True: "better", False: "worse", None: "changed"}[direction]
    assert f"{verdict:8s} quiz {metric.partition('@')[0]}: 100 -> 150" in printed
    assert compared(*sides[::-1], option)[0] == (direction is not False)
    assert compared(*sides, option, "--tolerance=50%")[0] == 0


def test_machine_readable_and_markdown_forms(gate: Gate) -> None:
    code, printed = gate({"miss_rate": 0.5}, "--format=json")
    data = json.loads(printed)
    assert code == 1 and data["verdict"] == "regression"
    worse, whole = [row for row in data["rows"] if row["verdict"] == "worse"]
    assert (whole["task"], whole["metric"], whole["change"]) == (None, "miss_rate", 0.25)
    assert (worse["task"], worse["metric"], worse["change"]) == ("quiz", "miss_rate", 0.25)
    code, printed = gate({"miss_rate": 0.5}, "--format=md")
    assert printed.startswith("### moecache: REGRESSION: 7 figures: 5 same, 2 worse")
    assert "\n- worse    quiz miss_rate: 0.25 -> 0.5 " in printed


def test_totals_are_compared_and_nothing_in_common_is_unusable(compared: Gate) -> None:
    """A replay has no tasks: what the leaderboard prints of it are its totals."""
    run = record("a", tasks=())
    assert compared(run, run) == (0, "pass: 3 figures: 3 same\n")
    code, printed = compared(run, record("a", tasks=(), tok_per_s=0.001, miss_rate=1.0))
    assert code == 1 and "worse    (whole run) tok_per_s: 100 -> 0.001" in printed
    run["config"]["moecache"]["totals"] = {"requests": 4}
    code, printed = compared(run, run)
    assert code == 2 and "nothing was compared" in printed


def test_other_weights_are_refused_and_other_versions_named(tmp_path: Path) -> None:
    def side(name: str, inputs: str | None, torch: str) -> list[Run]:
        run = record(name, environment={"versions": {"torch": torch}})
        run |= {} if inputs is None else {"inputs": inputs}
        return load_runs(write(tmp_path / name, run))

    old = side("a", "1234", "2.13.0")
    with pytest.raises(ValueError, match="inputs \\(1234 -> abcd\\)"):
        compare(old, side("b", "abcd", "2.13.0"), CompareOptions())
    later = compare(old, side("c", "1234", "2.14.0"), CompareOptions())
    assert later.versions == {"torch": ("2.13.0", "2.14.0")}
    assert "version differs: torch: 2.13.0 -> 2.14.0" in as_text(later)
    # Older records do not say what they read.
    assert not compare(old, side("d", None, "2.13.0"), CompareOptions()).is_regression


def test_many_continuous_scores_that_all_fall_are_a_regression() -> None:
    """201 documents, all worse: no random pattern of signs is as bad, and p is 1 / 20,001."""
    before = {str(i): 0.5 + i / 1000 for i in range(201)}
    after = {doc: value - 0.1 for doc, value in before.items()}
    scores = score("f1", 0.6), score("f1", 0.5)
    test = score_test(*(replace(s, higher_is_better=True) for s in scores), before, after)
    assert test is not None
    assert test.p_loss == test.least_p == test.least_possible == pytest.approx(1 / 20_001)


def score(metric: str, value: float, stderr: float | None = None) -> Score:
    higher = metric == "acc"
    return Score(metric=metric, filter="none", value=value, stderr=stderr, higher_is_better=higher)


def test_perplexity_is_judged_by_its_log_likelihoods() -> None:
    before, after = score("word_perplexity", math.exp(2)), score("word_perplexity", math.exp(2.1))
    words = (10.0, 20.0, 30.0, 40.0, 50.0)
    old = {str(i): [-2.0 * w, w] for i, w in enumerate(words)}
    # Every document loses the same per word: the most extreme of 32 patterns of signs.
    new = {str(i): [-2.1 * w, w] for i, w in enumerate(words)}
    test = score_test(before, after, old, new)
    assert test is not None
    assert (test.p_loss, test.least_p, test.least_possible) == (1 / 32, 1 / 32, 1 / 32)
    # +1, -5, +1, +1, +1 sum to -1: the 16 patterns with +5 reach that, and one with -5.
    losses = (1, -5, 1, 1, 1)
    mixed = {str(i): [-2.0 * w - d, w] for i, (w, d) in enumerate(zip(words, losses, strict=True))}
    test = score_test(before, after, old, mixed)
    assert test is not None and test.p_loss == 17 / 32
    others = {**new, "3": [-2.1 * 41.0, 41.0]}
    with pytest.raises(ValueError, match=r"document 3 has 40 words or bytes .* 41 .* different"):
        score_test(before, after, old, others)


@pytest.mark.parametrize(
    ("metric", "higher", "values", "documents"),
    [
        # Log-likelihoods of a word each: all fall, so the perplexity has risen.
        ("perplexity", False, (math.exp(2.0), math.exp(2.5)), ([-2.0] * 10, [-2.5] * 10)),
        # (gold, prediction): only the task's F1 and its standard error are a score.
        ("f1", True, (0.9, 0.5), ([[1, 1]] * 10, [[1, 0]] * 10)),
    ],
)
def test_what_lm_eval_records_of_a_document_is_not_always_its_score(
    compared: Gate, metric: str, higher: bool, values: Any, documents: Any
) -> None:
    sides = []
    for value, by_document in zip(values, documents, strict=True):
        made = scored(metric, value, higher, answers=[1, 0] * 5)
        made["results"]["quiz"][f"{metric}_stderr,none"] = 0.01
        made["scores"] = {"quiz": {f"{metric},none": dict(enumerate(by_document))}}
        sides.append(made)
    assert verdicts(compared, *sides, metric=f"{metric},none") == (1, {"worse"})
    assert verdicts(compared, *sides[::-1], metric=f"{metric},none") == (0, {"better"})
    assert "difference of" not in compared(*sides)[1]


def test_without_samples_the_standard_errors_decide() -> None:
    test = score_test(score("acc", 0.8, 0.03), score("acc", 0.7, 0.04), {}, {})
    assert test is not None
    assert test.p_loss == pytest.approx(0.02275, abs=1e-5)  # two standard errors of 0.05
    assert score_test(score("acc", 0.8), score("acc", 0.7, 0.04), {}, {}) is None


def test_a_difference_comes_with_its_interval_n_and_p_on_one_machine_too(gate: Gate) -> None:
    """By hand: 2 of 10 lost, none won. Two-sided exact p = 2 / 4; Tango's interval."""
    low, high = answers_interval(0, 2, 10)
    expected = f"-20 points, 95% interval {100 * low:+.3g} to {100 * high:+.3g}, n 10, p 0.5 "
    for options in (("--same_machine=yes",), ("--same_machine=no",)):
        _, printed = gate({"answers": lost(2)}, *options)
        assert f"difference of quiz acc,none: {expected}(McNemar" in printed
    code, printed = gate({}, "--same_machine=yes")
    same = printed.splitlines()
    assert code == 0 and same[-1].startswith("pass") and "n 10, p 1 (McNemar" in same[-2]


def test_differences_of_scores_between_0_and_1_are_tested_by_sign_flips() -> None:
    found = paired([0.25, 0.5, 0.125, -0.25]).difference
    assert found is not None
    assert (found.mean, found.documents, found.by) == (-0.15625, 4, "sign flips")
    # Of 16 patterns of signs, 4 sum to 0.625 or more, and 4 to -0.625 or less.
    assert found.p == 2 * 4 / 16
    assert found.low < found.mean < found.high
    unchanged = paired([0.0, 0.0, 0.5]).difference
    assert unchanged is not None and unchanged.p == 1


@pytest.mark.parametrize(
    ("metric", "value", "new", "verdict"),
    [
        # Half a percent of a perplexity, half a point of a share.
        *(("word_perplexity", 20.0, 20.09, "within"), ("word_perplexity", 20.0, 20.11, "worse")),
        *(("word_perplexity", 1.2, 1.2055, "within"), ("word_perplexity", 1.2, 1.2065, "worse")),
        *(("acc", 0.5, 0.4955, "within"), ("acc", 0.5, 0.4945, "worse")),
    ],
)
def test_the_floor_is_a_share_of_a_perplexity_and_points_of_a_share(
    compared: Gate, metric: str, value: float, new: float, verdict: str
) -> None:
    """Without standard errors and documents no test is made: the floor alone decides."""
    sides = [scored(metric, figure, metric == "acc") for figure in (value, new)]
    assert verdicts(compared, *sides, metric=f"{metric},none")[1] == {verdict}


def scored(metric: str, value: float, higher: bool, **fields: Any) -> dict[str, Any]:
    """Return a run with this score alone, and no documents of it."""
    scores = {"results": {"quiz": {f"{metric},none": value}}, "scores": {}}
    return {**record("a", **fields), **scores, "higher_is_better": {"quiz": {metric: higher}}}
