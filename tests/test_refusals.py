"""What cannot run is refused before the model is loaded, and said alone on the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest

from lm_eval_moecache.harness import errors
from lm_eval_moecache.harness.errors import ArgumentsError
from lm_eval_moecache.harness.evaluation_options import check_command, check_generation
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.plugin import register
from lm_eval_moecache.records.paths import task_configs_dir
from lm_eval_moecache.sweep.spec import Cell
from lm_eval_moecache.sweep.validation import check_cell
from tests.harness import generations, make_instance

ROOT = Path(__file__).resolve().parent.parent


TASK = ("--tasks", "tiny_arc", "--include_path", str(task_configs_dir()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model_args", "polic=specmd"], "key 'polic' (with value 'specmd') is not known. Did"),
        (["--model_args", "policy=specmdd"], "policy='specmdd' is not known. Did you mean 'specmd"),
        (["--model_args", "capacity=lots,batchsize=2"], "the key 'batchsize'"),
        (["--use_cache", "stored"], "--use_cache='stored': stored outputs come without"),
        (["--limit", "-1"], "limit=-1 must be a whole number of documents above 0"),
        (["--limit", "2.5"], "limit=2.5 must be"),
        (["--limit", "nan"], "limit=nan must be"),
        (["--num_fewshot", "-1"], "num_fewshot=-1 must be a whole number"),
        (["--gen_kwargs", "assistant_model=x"], "assistant_model='x' would change what drafts"),
        (["--output_path", f"{__file__}/out"], "/out' cannot be written: Not a directory"),
    ],
    ids=str,
)
def test_a_command_line_is_refused_before_torch_is_imported(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentsError) as caught:
        check_command(["run", "--model", "moecache", *TASK, *arguments])
    assert said in str(caught.value)
    # The same without `run`, as lm-eval takes it, and with the model named in a file.
    (tmp_path / "run.yaml").write_text("model: moecache\n")
    with pytest.raises(ArgumentsError):
        check_command(["--config", str(tmp_path / "run.yaml"), *TASK, *arguments])


def test_a_good_command_line_and_those_of_other_models_pass(tmp_path: Path) -> None:
    check_command(["run", "--model", "hf", "--model_args", "polic=x", *TASK])
    out = ["--output_path", str(tmp_path / "new/folder"), "--limit", "4"]
    check_command(["--model", "moecache", "--model_args", "policy=specmd,dtype=float32", *out])
    assert not (tmp_path / "new").exists()
    check_command(["ls", "tasks"])


def test_lm_eval_ends_in_our_message_alone_and_without_torch(tmp_path: Path) -> None:
    """Through the start-up file, as installed: a fresh interpreter, lm-eval's own main."""
    code = (
        "import sys, runpy, lm_eval_moecache_startup; lm_eval_moecache_startup.arm()\n"
        "import atexit; atexit.register(lambda: print('torch' in sys.modules))\n"
        "sys.argv = ['lm_eval', *sys.argv[1:]]\n"
        "runpy.run_module('lm_eval', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", code, "run", "--model", "moecache", *TASK]
    paths = os.pathsep.join([str(ROOT / "startup"), str(ROOT)])
    done = subprocess.run(
        [*command, "--model_args", "polic=specmd"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    last = done.stderr.strip().split("\n")[-1]
    assert last.startswith("moecache: model_args: the key 'polic'")
    assert done.stdout.strip() == "False"


def test_only_lm_evals_command_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentsError, match="polciy"):
        MoECacheLM.create_from_arg_string("polciy=specmd")
    monkeypatch.setattr(errors, "is_lm_eval_command", lambda: True)
    with pytest.raises(SystemExit):
        MoECacheLM.create_from_arg_string("polciy=specmd")


def run(model: str, model_args: str = "pretrained=no/such", **options: Any) -> None:
    register()
    lm_eval.simple_evaluate(model=model, model_args=model_args, tasks=["tiny_gsm8k"], **options)


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
    given = options if isinstance(options, dict) else dict([options.split("=")])
    words = [f"{key}={value}" for key, value in given.items()]
    with pytest.raises(ArgumentsError, match=said):
        check_command(["--model", "moecache-spec", *TASK, "--gen_kwargs", ",".join(words)])
    asked = {"gen_kwargs": given}
    cell = Cell(model="moecache-spec", model_args={}, tasks=("tiny_arc",), options=asked)
    with pytest.raises(ArgumentsError, match=next(iter(given))):
        check_cell(cell)


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


def test_a_tasks_own_options_are_checked_before_its_first_request(checkpoint: Any) -> None:
    lm = MoECacheLM(pretrained=str(checkpoint("olmoe")))
    drafted = make_instance("generate_until", "t", 9, "x", {"prompt_lookup_num_tokens": 2})
    with pytest.raises(ArgumentsError, match="prompt_lookup_num_tokens=2"):
        lm.generate_until([*generations(2), drafted], disable_tqdm=True)
    assert lm.engine.ledger.passes == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ArgumentsError, match="Permission denied"):
        check_command(["--model", "moecache", *TASK, "--output_path", str(tmp_path / "out")])


def test_model_args_may_name_the_device_and_the_batch_size(checkpoint: Any) -> None:
    options = {"device": "cuda:0", "batch_size": 1, "max_batch_size": None}
    text = f"pretrained={checkpoint('olmoe')},device=cpu,batch_size=3"
    lm = MoECacheLM.create_from_arg_string(text, options)
    assert (str(lm.device), lm.batch_size) == ("cpu", 3)
