"""The `moecache` command: what it lists, and what it answers to a slip of the pen."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from lm_eval_moecache.algorithms.policy import policy_names
from lm_eval_moecache.algorithms.registry import AXES, algorithm_names
from lm_eval_moecache.cli.eval import completed
from lm_eval_moecache.cli.main import command_names, main
from lm_eval_moecache.harness.arguments import KEYS
from lm_eval_moecache.records.paths import task_configs_dir

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
    assert "--include_path" in text
    assert "a100-5GBps" in text and "a100-5gbps" not in text
    for name in (*policy_names(), *(n for axis in AXES for n in algorithm_names(axis))):
        assert name in text
    assert main(["policies", "--all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in (*policy_names(), *(n for axis in AXES for n in algorithm_names(axis))):
        assert name in text
    assert "overfetch=1.0" in text
    assert "SpecMD section 4.2" in text


def test_policies_of_one_axis(capsys: Captured) -> None:
    assert main(["policies", "--axis", "eviction"]) == 0
    text = capsys.readouterr().out
    assert "least_stale" in text
    assert "next_gate" not in text
    assert "Compositions" not in text


def test_policies_of_one_axis_as_json(capsys: Captured) -> None:
    assert main(["policies", "--axis", "eviction", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert {"task_configs", "compositions", "algorithms"} <= set(listing)
    assert list(listing["algorithms"]) == ["eviction"]
    names = [algorithm["name"] for algorithm in listing["algorithms"]["eviction"]]
    assert names == algorithm_names("eviction")


@pytest.mark.parametrize("axis", AXES)
def test_every_parameter_of_every_algorithm_is_explained(axis: str, capsys: Captured) -> None:
    for name in algorithm_names(axis):
        assert main(["policies", name, "--axis", axis, "--json"]) == 0
        (found, *_) = json.loads(capsys.readouterr().out)["algorithms"]
        for parameter in found["parameters"]:
            assert len(parameter["meaning"].split()) > 2, (name, parameter["name"])
            assert parameter["type"]


def test_a_policy_is_explained_with_what_it_sets(capsys: Captured) -> None:
    assert main(["policies", "hobbit"]) == 0
    text = capsys.readouterr().out
    assert "policy=hobbit: HOBBIT" in text
    assert "miss=cascade" in text
    assert "`upgrade` an important expert" in " ".join(text.split())
    assert main(["policies", "specmd"]) == 0
    assert "prefetch.percentile=80.0" in capsys.readouterr().out


def test_a_name_of_two_axes_is_explained_on_both(capsys: Captured) -> None:
    assert main(["policies", "score"]) == 0
    text = capsys.readouterr().out
    assert "prefetch=score" in text
    assert "eviction=score" in text
    assert main(["policies", "scroe"]) == 2
    assert "Did you mean 'score'?" in capsys.readouterr().err


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


def test_the_version_is_that_of_the_package(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"moecache {version('lm-eval-moecache')}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_command_and_its_options(capsys: Captured, shell: str) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*command_names(), "model_args", "capacity", "buddies", "include_path", "rerun"):
        assert word in script, word


def test_the_script_for_bash_completes_a_command(capsys: Captured, tmp_path: Path) -> None:
    assert main(["completion", "bash"]) == 0
    path = tmp_path / "complete.sh"
    path.write_text(capsys.readouterr().out)
    ask = 'COMP_WORDS=(moecache re); COMP_CWORD=1; _shtab_moecache; echo "${COMPREPLY[@]}"'
    command = ["bash", "-c", f"source {path}; {ask}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "replay" in done.stdout.split()


def test_eval_help_names_our_keys_below_lm_evals_options(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["eval", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.index("--model_args") < text.index("keys of --model_args")
    for key in KEYS:
        assert f"\n  {key} " in text


MODEL = ["--model", "moecache"]
TASKS = ["--include_path", str(task_configs_dir())]


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        (["--tasks", "tiny_arc"], [*TASKS, *MODEL]),
        (["--model_args", "pretrained=tiny", "policy=specmd"], [*TASKS, *MODEL]),
        (["--model", "hf"], TASKS),
        (["--model=hf"], TASKS),
        (["-M", "hf"], TASKS),
        (["-Mhf"], TASKS),
        (["--include_path", "mine"], MODEL),
        (["--include_path=mine", "--model", "hf"], []),
        (["--config", "nowhere.yaml"], [*TASKS, *MODEL]),
    ],
    ids=str,
)
def test_eval_adds_what_the_arguments_do_not_name(arguments: list[str], added: list[str]) -> None:
    assert completed(arguments) == [*arguments, *added]


@pytest.mark.parametrize("form", ["--config FILE", "--config=FILE", "-C FILE", "-CFILE"])
@pytest.mark.parametrize(
    ("text", "added"),
    [
        ("model: hf\ninclude_path: mine\n", []),
        ("model: hf\n", TASKS),
        ("include_path: mine\n", MODEL),
        ("tasks: [tiny_arc]\nmodel:\n", [*TASKS, *MODEL]),
        ("- a\n- list\n", [*TASKS, *MODEL]),
        ("model: [unclosed", [*TASKS, *MODEL]),
    ],
)
def test_eval_does_not_override_its_config_file(
    tmp_path: Path, form: str, text: str, added: list[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    arguments = form.replace("FILE", str(path)).split()
    assert completed(arguments) == [*arguments, *added]


@pytest.mark.slow
def test_the_models_are_imported_from_the_package_and_torch_only_then() -> None:
    code = (
        "import sys, lm_eval_moecache as ours; assert 'torch' not in sys.modules\n"
        "from lm_eval_moecache import MoECacheLM, MoECacheSpecLM\n"
        "assert issubclass(MoECacheSpecLM, MoECacheLM); assert not hasattr(ours, 'MoECacheM')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
