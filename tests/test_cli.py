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


NAMES = (*policy_names(), *(name for axis in AXES for name in algorithm_names(axis)))


def said(capsys: Captured, *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("axes", [AXES, ("eviction",)])
def test_policies_as_json_has_the_form_of_the_design(
    axes: tuple[str, ...], capsys: Captured
) -> None:
    chosen = [] if axes == AXES else ["--axis", *axes]
    listing = json.loads(said(capsys, "policies", "--json", *chosen))
    assert {"task_configs", "compositions", "algorithms"} <= set(listing)
    assert Path(listing["task_configs"]).is_dir()
    assert [c["name"] for c in listing["compositions"]] == policy_names()
    for composition in listing["compositions"]:
        assert all(composition[axis]["name"] in algorithm_names(axis) for axis in AXES)
    assert tuple(listing["algorithms"]) == axes
    for axis, found in listing["algorithms"].items():
        assert [algorithm["name"] for algorithm in found] == algorithm_names(axis)
        for algorithm in found:
            assert {"name", "parameters", "source"} <= set(algorithm) and algorithm["source"]


def test_policies_as_text_names_everything_with_defaults_and_sources(capsys: Captured) -> None:
    text = said(capsys, "policies")
    assert "--include_path" in text
    assert "a100-5GBps" in text and "a100-5gbps" not in text
    assert all(name in text for name in NAMES)
    text = " ".join(said(capsys, "policies", "--all").split())
    assert all(name in text for name in (*NAMES, "overfetch=1.0", "SpecMD section 4.2"))


def test_policies_of_one_axis_may_be_asked_for_in_a_file(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("axis: eviction\n")
    text = said(capsys, "policies", "--axis", "eviction")
    assert "least_stale" in text and "next_gate" not in text and "Compositions" not in text
    assert said(capsys, "policies", "--config", str(tmp_path / "options.yaml")) == text


@pytest.mark.parametrize("axis", AXES)
def test_every_parameter_of_every_algorithm_is_explained(axis: str, capsys: Captured) -> None:
    for name in algorithm_names(axis):
        found = json.loads(said(capsys, "policies", name, "--axis", axis, "--json"))
        for parameter in found["algorithms"][0]["parameters"]:
            assert len(parameter["meaning"].split()) > 2, (name, parameter["name"])
            assert parameter["type"]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hobbit", ("policy=hobbit: HOBBIT", "miss=cascade", "`upgrade` an important expert")),
        ("specmd", ("prefetch.percentile=80.0",)),
        ("score", ("prefetch=score", "eviction=score")),
    ],
)
def test_a_name_is_explained_with_what_it_sets_on_every_axis(
    name: str, parts: tuple[str, ...], capsys: Captured
) -> None:
    text = " ".join(said(capsys, "policies", name).split())
    assert all(part in text for part in parts)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command_with_its_summary(capsys: Captured, arguments: list[str]) -> None:
    lines = [line.split() for line in said(capsys, *arguments).split("\n")]
    for name in command_names():
        (words,) = [words for words in lines if words[:1] == [name]]
        assert len(words) > 1


def test_an_unknown_option_is_an_error(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["policies", "--jsno"])
    assert caught.value.code == 2
    assert "--jsno" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: Captured) -> None:
    assert said(capsys, "--version") == f"moecache {version('lm-eval-moecache')}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_command_and_its_options(
    capsys: Captured, shell: str, tmp_path: Path
) -> None:
    script = said(capsys, "completion", shell)
    for word in (*command_names(), "model_args", "capacity", "buddies", "include_path", "rerun"):
        assert word in script, word
    if shell == "bash":
        (tmp_path / "complete.sh").write_text(script)
        ask = 'COMP_WORDS=(moecache re); COMP_CWORD=1; _shtab_moecache; echo "${COMPREPLY[@]}"'
        command = ["bash", "-c", f"source {tmp_path / 'complete.sh'}; {ask}"]
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
