"""Options of `moecache replay` from files: the same as on the command line, which goes first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.cli.main import main
from tests.engine import traces

Captured = pytest.CaptureFixture[str]
NAMED = "eviction: least_stale\neviction.order: fifo\n"
MAPPED = "eviction: {name: least_stale, order: fifo}\n"


def run(folder: Path, capsys: Captured, text: str, *arguments: str) -> dict[str, Any]:
    path, _ = traces.record(folder)
    file = folder / "options.yaml"
    file.write_text(text)
    code = main(["replay", str(path), "--config", str(file), "--json", *arguments])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    found: dict[str, Any] = json.loads(shown.out)["runs"][0]
    return found


@pytest.mark.parametrize("text", [NAMED, MAPPED])
def test_a_file_may_give_an_algorithm_its_parameters(
    tmp_path: Path, capsys: Captured, text: str
) -> None:
    found = run(tmp_path, capsys, text)
    assert found["composition"]["eviction"] == {"name": "least_stale", "order": "fifo"}


def test_parameters_alone_go_to_the_algorithm_of_the_policy(
    tmp_path: Path, capsys: Captured
) -> None:
    for text in ("prefetch.percentile: 0.001\n", "prefetch: {percentile: 0.001}\n"):
        found = run(tmp_path, capsys, f"policy: specmd\n{text}")
        assert found["composition"]["prefetch"]["percentile"] == 0.001


@pytest.mark.parametrize(
    ("arguments", "eviction"),
    [
        (["--eviction.order=last_use"], {"name": "least_stale", "order": "last_use"}),
        (["--eviction", "lru"], {"name": "lru"}),
        (["--eviction=least_stale"], {"name": "least_stale", "order": "last_use"}),
    ],
)
def test_the_command_line_goes_before_a_file(
    tmp_path: Path, capsys: Captured, arguments: list[str], eviction: dict[str, str]
) -> None:
    found = run(tmp_path, capsys, NAMED + "capacity: 25%\n", *arguments, "--capacity=50%")
    assert found["composition"]["eviction"] == eviction
    assert found["capacity"] == "50%"


def test_values_of_a_file_need_no_quotes(tmp_path: Path, capsys: Captured) -> None:
    found = run(tmp_path, capsys, "capacity: [5, 50%]\nseed: 1\nbound: false\nplot: null\n")
    assert found["capacity"] == "5" and found["belady_miss_rate"] is None


def test_a_file_may_name_the_traces(tmp_path: Path, capsys: Captured) -> None:
    path, _ = traces.record(tmp_path)
    file = tmp_path / "options.yaml"
    file.write_text(f"traces: [{path}]\njson: true\n")
    assert main(["replay", f"--config={file}"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["trace"] == str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evictoin: lru\n", "option='evictoin' is not known. Did you mean 'eviction'?"),
        ("evictoin.order: fifo\n", "option='evictoin.order' is not known"),
        (MAPPED.replace("order", "ordr"), "Did you mean 'order'"),
        ("eviction: least_stal\n", "Did you mean 'least_stale'"),
        ("[lru]\n", "must hold a mapping"),
        ("{", "is not readable YAML"),
    ],
)
def test_what_a_file_gets_wrong_is_said_in_its_first_line(
    tmp_path: Path, capsys: Captured, text: str, message: str
) -> None:
    path, _ = traces.record(tmp_path)
    file = tmp_path / "options.yaml"
    file.write_text(text)
    assert main(["replay", str(path), "--config", str(file)]) == 2
    assert message in capsys.readouterr().err.split("\n")[0]


def test_a_missing_file_is_named(tmp_path: Path, capsys: Captured) -> None:
    assert main(["replay", "x.parquet", "--config", str(tmp_path / "no.yaml")]) == 2
    assert "no.yaml" in capsys.readouterr().err


def test_help_says_what_the_default_policy_is_and_why(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "The policy is `on_demand` unless another is chosen" in text
    assert "needs predictions" in text
