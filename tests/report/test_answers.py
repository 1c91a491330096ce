"""What an answer costs: tokens, time, right answers an hour, and the share within limits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.report.compare import answers_test
from lm_eval_moecache.report.metrics import metric_column
from lm_eval_moecache.report.runs.answers import costs_of, read_slo
from lm_eval_moecache.report.runs.files import load_runs
from tests.conftest import Moecache
from tests.report.runs import record, write

# Seconds to the first token, milliseconds a token, tokens, right or wrong.
ANSWERS = ((1.0, 100.0, 11, 1), (1.0, 100.0, 31, 0), (2.0, 50.0, 21, 1), (0.5, 50.0, 1, 1))


def served(name: str, answers: Any = ANSWERS, **more: Any) -> dict[str, Any]:
    """Build the record of a generated task, a document a request."""
    times = [1000 * first + (count - 1) * each for first, each, count, _ in answers]
    counts = [count for _, _, count, _ in answers]
    figures = {
        "ttft_ms,speed": [1000 * first for first, *_ in answers],
        "tpot_ms,speed": [each if count > 1 else None for _, each, count, _ in answers],
        "request_tok_per_s,speed": [1000 * n / t for n, t in zip(counts, times, strict=True)],
    }
    rate, mean = 1000 * sum(counts) / sum(times), sum(times) / len(times)
    totals = {"e2el_ms": {"mean": mean}, "tok_per_s": rate}
    run = record(name, answers=[right for *_, right in answers], totals=totals, **more)
    run["scores"]["quiz"] |= {
        metric: {str(i): float(f"{v:.6g}") for i, v in enumerate(values) if v is not None}
        for metric, values in figures.items()
    }
    return run


def test_right_answers_an_hour_tokens_and_goodput_are_those_worked_by_hand(tmp_path: Path) -> None:
    """Times 2, 4, 3 and 0.5 s; 3 right of 4 in 9.5 s; 64 tokens."""
    [run] = load_runs(write(tmp_path, served("a")), read_slo("ttft=1s,itl=100ms,e2el=3.5s"))
    for name in ("right_per_hour", "right_per_hour@quiz"):
        assert run[name].raw == pytest.approx(3 * 3600 / 9.5)
    # Residuals of 3 / 9.5 a second: right less that times the seconds.
    residuals = [right - 3 / 9.5 * s for right, s in ((1, 2), (0, 4), (1, 3), (1, 0.5))]
    error = 3600 * math.sqrt(sum(r * r for r in residuals) * 4 / 3) / 9.5
    assert run["right_per_hour"].stderr == pytest.approx(error)
    assert run["output_tokens"].raw == pytest.approx(16)
    assert list(run.documents("output_tokens").values()) == [11, 31, 21, 1]
    assert list(run.documents("e2el_ms").values()) == pytest.approx([2000, 4000, 3000, 500])
    # The second takes too long, the third's first token comes too late.
    assert list(run.documents("goodput").values()) == [1, 0, 0, 1]
    assert (run["goodput"].raw, run["goodput"].stderr) == (0.5, pytest.approx(math.sqrt(1 / 12)))
    [without] = load_runs(tmp_path)
    assert without["goodput"].raw is None
    # Only latencies have percentiles: under such a name a mean would pass for one.
    assert [run[f"{name}.p99"].raw for name in ("right_per_hour", "tok_per_s")] == [None, None]


def test_a_score_by_overlap_counts_no_right_answers(tmp_path: Path) -> None:
    """TruthfulQA's ROUGE is in percent: one of 0.75 is no three right answers of four."""
    run = served("a")
    for part in (run["results"]["quiz"], run["scores"]["quiz"]):
        for name in [name for name in part if name.startswith("acc")]:
            part[name.replace("acc", "rouge1_max")] = part.pop(name)
    [loaded] = load_runs(write(tmp_path, run))
    assert loaded.score("quiz") is not None and loaded["output_tokens"].raw is not None
    assert loaded["right_per_hour"].raw is None


@given(st.integers(2, 400), st.floats(5, 1000), st.floats(0.5, 100))
def test_the_tokens_and_time_of_an_answer_follow_from_six_digits_or_are_left_out(
    count: int, first: float, each: float
) -> None:
    time = first + (count - 1) * each
    rate = {"0": float(f"{1000 * count / time:.6g}")}
    figures = {"ttft_ms": {"0": float(f"{first:.6g}")}, "tpot_ms": {"0": float(f"{each:.6g}")}}
    found = costs_of({**figures, "request_tok_per_s": rate}, {})
    if abs(first - each) > 0.05 * time:
        assert found["output_tokens"] == {"0": count}
        assert found["e2el_ms"]["0"] == pytest.approx(time, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttf=2s", "slo='ttf' is not known. Did you mean 'ttft'?"),
        *((text, "is no time above 0 with a unit") for text in ("ttft=2", "itl=5h", "e2el=-1s")),
        *((text, "is no time above 0 with a unit") for text in ("ttft=0ms", "ttft")),
        ("", "slo='' is not known"),
    ],
)
def test_an_unknown_word_or_unit_of_a_limit_is_refused(
    tmp_path: Path, moecache: Moecache, text: str, said: str
) -> None:
    folder = write(tmp_path, served("a"))
    for words in (("table", folder), ("compare", folder, folder), ("plot", folder)):
        assert said in moecache(*words, f"--slo={text}", code=2)


def test_tables_are_in_order_of_right_answers_an_hour_and_show_goodput(
    tmp_path: Path, moecache: Moecache
) -> None:
    """Twice the tokens a second with answers that are wrong and longer is no better run."""
    wrong = [(first / 2, each / 2, 3 * count, 0) for first, each, count, _ in ANSWERS]
    folder = write(tmp_path, served("a", policy="a"), served("b", wrong, policy="b"))
    header, _, first, second, *_ = moecache("table", folder, "--slo=e2el=3.5s").splitlines()
    assert "| Goodput | Right/h | E2E ms | Tokens | tok/s |" in header
    assert first.startswith("| a |") and " 1137 ±" in first and " 0.750 ±0.250 " in first
    assert second.startswith("| b |") and " 0 ±0 " in second
    printed = moecache("table", folder, "--columns=policy", "--slo=e2el=9s,itl=50ms")
    assert printed.startswith("| Policy | Goodput |")
    assert "Goodput: the share of requests with e2el ≤ 9000 ms, tpot ≤ 50 ms." in printed


def test_limits_are_drawn_and_compared_or_said_to_have_no_effect(
    tmp_path: Path, moecache: Moecache, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = [(2 * first, each, count, right) for first, each, count, right in ANSWERS]
    folder = write(tmp_path / "drawn", served("a"), served("b", slower, policy="b"))
    panels = "panels: [{x: e2el_ms, y: accuracy}]"
    (folder / "sweep.yaml").write_text(f"name: x\ntasks: quiz\nfigures: [{{name: y, {panels}}}]")
    assert "goodput" not in moecache("plot", folder)
    assert "accuracy_goodput.svg" in moecache("plot", folder, "--slo=e2el=3.2s")
    untimed = write(tmp_path / "untimed", record("a"))
    capsys.readouterr()
    assert main(["compare", str(untimed), str(untimed), "--slo=e2el=3s"]) == 0
    assert "--slo has no effect" in capsys.readouterr().err


def test_documents_of_one_batch_are_one_sample_of_a_difference_of_right_answers_an_hour(
    tmp_path: Path,
) -> None:
    """Ten copies of each document, in a batch each, say no more than the document alone."""
    column, errors = metric_column("right_per_hour@quiz"), []
    assert column is not None
    slower = tuple((1.5 * first, each, n, right) for first, each, n, right in ANSWERS)
    for copies in (1, 10):
        sides = []
        for name, answers in (("old", ANSWERS), ("new", slower)):
            run = served(name, answers * copies)
            if copies > 1:
                batches = {str(i): i % len(answers) for i in range(len(answers) * copies)}
                run["scores"]["quiz"]["batch,speed"] = batches
            sides += load_runs(write(tmp_path / f"{name}{copies}", run))
        test = answers_test(column, *sides)
        assert test is not None and test.difference is not None
        errors.append(test.difference.high - test.difference.low)
    assert errors[0] == pytest.approx(errors[1])


def test_a_comparison_tells_a_faster_token_from_a_faster_answer_and_can_fail_by_goodput(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compared(new: Any, *options: str) -> tuple[int, str]:
        folders = [str(tmp_path / name) for name in ("old", "new")]
        for folder, answers in zip(folders, (ANSWERS, new), strict=True):
            write(Path(folder), served("a", answers * 10))
        code = main(["compare", *folders, *options])
        return code, capsys.readouterr().out

    # 64 tokens of four answers in 9.5 s, then 184 in 9.75 s.
    longer = tuple((first / 2, each / 2, 3 * n - 2, right) for first, each, n, right in ANSWERS)
    code, printed = compared(longer)
    assert printed.startswith(
        "quiz: 2.80 times as fast a token (tok/s 6.7 -> 18.9) but 1.03 times as slow an answer "
        "(2375 -> 2438 ms), as answers are 2.88 times as long (tokens 16.0 -> 46.0); right answers "
        "an hour 1137 -> 1108.\n"
    )
    assert code == 1 and "changed  quiz output_tokens: 16 -> 46 " in printed
    assert "sign flips of 40 documents" in printed and "test of a ratio, two-sided" in printed
    slower = tuple((1.5 * first, each, n, right) for first, each, n, right in ANSWERS)
    options = ("--metrics=tok_per_s", "--tolerance=20%", "--floor=90%")
    assert compared(slower, *options)[0] == 0
    code, printed = compared(slower, *options, "--slo=e2el=3.2s")
    assert code == 1 and "worse    quiz goodput: 0.75 -> 0.5 " in printed
    assert "McNemar: 10 lost, 0 won of 40 documents" in printed
