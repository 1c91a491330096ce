"""The `moecache` command: what it lists, and what it answers to a slip of the pen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lm_eval_moecache.cli.main import command_names, main
from lm_eval_moecache.policy import policy_names
from lm_eval_moecache.registry import AXES, algorithm_names

Captured = pytest.CaptureFixture[str]


def test_policies_as_json_has_the_form_of_the_design(capsys: Captured) -> None:
    assert main(["policies", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert {"task_configs", "compositions", "algorithms"} <= set(listing)
    assert Path(listing["task_configs"]).is_dir()
    assert [c["name"] for c in listing["compositions"]] == policy_names()
    for composition in listing["compositions"]:
        assert set(AXES) <= set(composition)
        for axis in AXES:
            assert composition[axis]["name"] in algorithm_names(axis)
    assert set(listing["algorithms"]) == set(AXES)
    for axis in AXES:
        found = listing["algorithms"][axis]
        assert [algorithm["name"] for algorithm in found] == algorithm_names(axis)
        for algorithm in found:
            assert {"name", "parameters", "source"} <= set(algorithm)
            assert algorithm["source"]


def test_policies_as_text_names_everything_with_defaults_and_sources(capsys: Captured) -> None:
    assert main(["policies"]) == 0
    text = capsys.readouterr().out
    for name in (*policy_names(), *(n for axis in AXES for n in algorithm_names(axis))):
        assert name in text
    assert "overfetch=1.0" in text
    assert "SpecMD section 4.2" in text
    assert "--include_path" in text
    assert "a100-5gbps" in text


def test_policies_of_one_axis(capsys: Captured) -> None:
    assert main(["policies", "--axis", "eviction"]) == 0
    text = capsys.readouterr().out
    assert "least_stale" in text
    assert "next_gate" not in text
    assert "Compositions" not in text


def test_options_may_come_from_a_file(capsys: Captured, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("axis: miss\n")
    assert main(["policies", "--config", str(path)]) == 0
    text = capsys.readouterr().out
    assert "fetch" in text
    assert "least_stale" not in text


def test_an_unknown_command_is_answered_with_the_nearest_and_exit_code_two(
    capsys: Captured,
) -> None:
    assert main(["polices"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "command='polices' is not known. Did you mean 'policies'?" in captured.err
    assert len(captured.err.strip().split("\n")) == 1


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command_with_its_summary(capsys: Captured, arguments: list[str]) -> None:
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for name in command_names():
        (line,) = [line for line in text.split("\n") if line.split()[:1] == [name]]
        assert len(line.split()) > 1


def test_an_unknown_option_is_an_error(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["policies", "--jsno"])
    assert caught.value.code == 2
    assert "--jsno" in capsys.readouterr().err
