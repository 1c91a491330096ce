"""What cannot run is refused before the model is loaded, and said alone on the command line."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml

from lm_eval_moecache.harness.caller import check_generation
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.plugin import register
from lm_eval_moecache.harness.refusal import ArgumentsError
from lm_eval_moecache.records.paths import task_configs_dir
from lm_eval_moecache.sweep.spec import Cell, read_sweep
from lm_eval_moecache.sweep.validation import check_cell
from tests.harness import generations, make_instance

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model_args", "policy=specmdd"], "policy='specmdd' is not known. Did you mean 'specmd"),
        (["--model_args", "pretrained=no/such"], "pretrained='no/such' cannot be read: "),
    ],
)
def test_lm_eval_ends_in_our_message_alone(arguments: list[str], said: str) -> None:
    code = "from lm_eval_moecache.harness.plugin import register; register()\n"
    code += "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    command = [sys.executable, "-c", code, "run", "--model", "moecache", "--tasks", "tiny_arc"]
    path = ["--include_path", str(task_configs_dir())]
    done = subprocess.run(
        [*command, *path, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().split("\n")[-1]
    assert last.startswith(f"moecache: {said}")


def test_an_error_of_ours_is_a_value_error_and_others_keep_their_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ArgumentsError, match="polciy") as caught:
        MoECacheLM(polciy="specmd")
    assert isinstance(caught.value, ValueError)
    # Raised from Python, not from a command line: the hook leaves it alone.
    sys.excepthook(type(caught.value), caught.value, caught.value.__traceback__)
    assert "Traceback" in capsys.readouterr().err


def run(
    model: str,
    output: str | None = None,
    model_args: str = "pretrained=no/such",
    **options: Any,
) -> None:
    register()
    tracker = None
    if output is not None:
        from lm_eval.loggers import EvaluationTracker

        tracker = EvaluationTracker(output_path=output)
    lm_eval.simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=["tiny_gsm8k"],
        evaluation_tracker=tracker,
        **options,
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("do_sample=True", "do_sample=True with --model moecache-spec"),
        ("temperature=0.7", "temperature=0.7 with --model moecache-spec"),
        ({"num_beams": 4}, "num_beams=4 with --model moecache-spec"),
        ({"top_k": 5}, "top_k=5 with"),
        ("prompt_lookup_num_tokens=3", "prompt_lookup_num_tokens=3 would change what drafts"),
    ],
    ids=str,
)
def test_sampling_and_another_draft_are_refused_before_loading(options: Any, said: str) -> None:
    # The model cannot be read: who gets as far as that comes too late.
    with pytest.raises(ArgumentsError, match=said):
        run("moecache-spec", gen_kwargs=options)
    given = options if isinstance(options, dict) else dict([options.split("=")])
    cell = Cell(
        model="moecache-spec",
        model_args={},
        tasks=("tiny_arc",),
        options={"gen_kwargs": given},
        include_path=(),
    )
    with pytest.raises(ArgumentsError, match=next(iter(given))):
        check_cell(cell)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit": -1}, "limit=-1 must be a whole number of documents above 0, or a share below 1"),
        ({"limit": math.nan}, "limit=nan must be"),
        ({"limit": 0}, "limit=0 must be"),
        ({"limit": 2.5}, "limit=2.5 must be"),
        ({"num_fewshot": -1}, "num_fewshot=-1 must be a whole number"),
        ({"num_fewshot": 100_000}, "num_fewshot=100000 must be"),
    ],
    ids=str,
)
def test_options_of_the_evaluation_are_refused_in_the_same_words_alone_and_in_a_sweep(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentsError) as alone:
        run("moecache", **options)
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({"tasks": "tiny_arc", "base": options}))
    with pytest.raises(ValueError, match="evaluation options") as in_sweep:
        read_sweep(path).cells()
    assert str(alone.value) == str(in_sweep.value)
    assert said in str(alone.value)


def test_a_batch_size_among_the_models_arguments_is_checked_like_the_option() -> None:
    asked = "pretrained=no/such,batch_size="
    with pytest.raises(ArgumentsError, match="batch_size='x' must be a whole number"):
        run("moecache", model_args=asked + "x")
    with pytest.raises(ArgumentsError, match="pretrained='no/such' cannot be read"):
        run("moecache", model_args=asked + "4", batch_size=2)
    with pytest.raises(ArgumentsError, match="batch_size='x' must be a whole number"):
        run("moecache", batch_size="x")


def test_plain_decoding_may_sample_but_not_draft() -> None:
    check_generation({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, speculative=False)
    check_generation({"do_sample": False, "temperature": 0.0, "top_p": 1}, speculative=True)
    with pytest.raises(ArgumentsError, match="would change what drafts"):
        run("moecache", gen_kwargs="assistant_model=x")


def test_stored_outputs_are_refused_before_loading() -> None:
    with pytest.raises(ArgumentsError, match=r"--use_cache='stored': stored outputs come without"):
        run("moecache", use_cache="stored")


def test_a_tasks_own_options_are_checked_before_its_first_request(checkpoint: Any) -> None:
    lm = MoECacheLM(pretrained=str(checkpoint("olmoe")))
    drafted = make_instance("generate_until", "t", 9, "x", {"prompt_lookup_num_tokens": 2})
    with pytest.raises(ArgumentsError, match="prompt_lookup_num_tokens=2"):
        lm.generate_until([*generations(2), drafted], disable_tqdm=True)
    assert lm.engine.ledger.passes == []


def test_an_output_path_that_cannot_be_written_is_refused_before_loading(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ArgumentsError, match=r"--output_path=.*file/out' cannot.*Not a directory"):
        run("moecache", output=str(file / "out"))
    with pytest.raises(ArgumentsError, match="pretrained='no/such' cannot be read"):
        run("moecache", output=str(tmp_path / "new/folder"))
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ArgumentsError, match="Permission denied"):
        run("moecache", output=str(tmp_path / "out"))


def test_model_args_may_name_the_device_and_the_batch_size(checkpoint: Any) -> None:
    options = {"device": "cuda:0", "batch_size": 1, "max_batch_size": None}
    text = f"pretrained={checkpoint('olmoe')},device=cpu,batch_size=3"
    lm = MoECacheLM.create_from_arg_string(text, options)
    assert (str(lm.device), lm.batch_size) == ("cpu", 3)
