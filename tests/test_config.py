"""Bad input is refused before the weights are loaded, with advice on what to do instead."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from lm_eval.loggers.evaluation_tracker import EvaluationTracker, GeneralConfigTracker
from lm_eval.utils import simple_parse_args_string

import lm_eval_moecache
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.harness import arguments
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.evaluation_options import check_command
from lm_eval_moecache.harness.generation import check_generation
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.preflight import check_arguments, resolve_device
from lm_eval_moecache.harness.saving import Unsaved, check_output
from lm_eval_moecache.records.errors import ArgumentsError
from lm_eval_moecache.records.files import task_configs_dir
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.schemas.keys import KEYS
from lm_eval_moecache.sweep.run import check_cell
from lm_eval_moecache.sweep.spec import Cell
from tests.engine.scripted import OldestFirst, make_geometry
from tests.harness import refusal, says
from tests.models import byte_tokenizer

GOOD_POLICY = {"routing": "standard", "prefetch": "none", "eviction": "lru", "miss": "fetch"}


BARE = ("experts interface", "Mixture-of-Experts", "use_experts_implementation")
FFN = {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}
ATTENTION = {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": None}


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        ("Llama", {"num_attention_heads": 2}, ("LlamaForCausalLM is a dense model", "--model hf")),
        ("Dbrx", {"d_model": 16, "n_heads": 2, "ffn_config": FFN, "attn_config": ATTENTION}, BARE),
        ("JetMoe", {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4}, BARE),
    ],
)
def test_a_model_without_experts_or_without_their_interface_is_refused(
    kind: str, sizes: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small = {"n_layers": 1, "max_seq_len": 64} if kind == "Dbrx" else small
    getattr(transformers, f"{kind}Config")(vocab_size=300, **small, **sizes).save_pretrained(
        tmp_path
    )
    byte_tokenizer().save_pretrained(tmp_path)
    says(refusal(pretrained=str(tmp_path)), *words)


def test_a_policy_may_be_a_mapping_of_the_form_of_its_file() -> None:
    mapping = {"name": "mine", **GOOD_POLICY, "eviction": {"class_path": SIZED, "size": 3}}
    policy = read_config({"policy": mapping}).policy
    assert policy.name == "mine"
    assert policy.eviction.parameters == {"size": 3, "slack": 0}
    assert read_config({"policy": GOOD_POLICY}).policy.name == "custom"
    says(refusal(policy={**GOOD_POLICY, "evictoin": "lru"}), "policy mapping", "'evictoin'")
    says(refusal(policy={"eviction": "lru"}), "policy mapping lacks 'routing'")
    says(refusal(policy="on_demand", eviction={"order": 1}), "eviction={'order': 1}", "`name`")


def test_a_policy_is_named_after_what_runs() -> None:
    def name(**overrides: Any) -> str:
        return load_policy("on_demand", overrides).name

    assert name() == "on_demand"
    assert name(routing="standard") == "on_demand"
    assert name(routing="pruning") == "on_demand + routing=pruning"
    assert name(miss="drop", routing="pruning") == "on_demand + routing=pruning + miss=drop"
    # The composition keeps no expert by rank, the algorithm's own parameters one.
    changed = load_policy("specmd_4", {"routing": "cache_prior"})
    assert changed.routing.parameters["top_j"] == 1
    assert (changed.name, changed.composition) == ("specmd_4 + routing=cache_prior", "specmd_4")
    assert (
        load_policy("specmd_4", {"routing": "cache_prior", "routing.top_j": 0}).name == "specmd_4"
    )
    replaced = load_policy("on_demand", {"eviction": "lfu"}).as_dict()
    assert (replaced["name"], replaced["composition"]) == ("on_demand + eviction=lfu", "on_demand")
    assert "composition" not in load_policy("on_demand").as_dict()


class Sized(OldestFirst):
    """An outside algorithm with a parameter that has no default, and one that has no type."""

    def __init__(
        self, geometry: Geometry, *, size: int, slack=0, seed: int = 0, **more: Any
    ) -> None:
        super().__init__(geometry)
        self.size, self.slack = size, slack


SIZED = "tests.test_config.Sized"


def sized(folder: Path, **fields: Any) -> str:
    """Write a policy with `Sized` for its eviction and return its path."""
    path = folder / "mine.yaml"
    eviction = {"class_path": SIZED, **fields}
    path.write_text(yaml.safe_dump({**GOOD_POLICY, "eviction": eviction}))
    return str(path)


@pytest.mark.parametrize("form", [{"size": 3}, {"init_args": {"size": 3}}], ids=str)
def test_a_required_parameter_reaches_the_outside_algorithm(
    tmp_path: Path, form: dict[str, Any]
) -> None:
    policy = load_policy(sized(tmp_path, **form))
    assert policy.name == "mine"
    assert policy.as_dict()["eviction"] == {"class_path": SIZED, "size": 3, "slack": 0}
    built = policy.eviction.build(make_geometry(), 0)
    assert (built.size, built.slack) == (3, 0)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({}, ["eviction.size must be given", SIZED]),
        ({"size": "big"}, ["eviction.size='big'", "does not fit"]),
        ({"size": 3, "more": 1}, ["eviction.more=1", "is not used"]),
    ],
    ids=str,
)
def test_an_outside_algorithm_given_wrongly_is_refused(
    tmp_path: Path, fields: dict[str, Any], parts: list[str]
) -> None:
    says(refusal(policy=sized(tmp_path, **fields)), *parts)


def test_none_is_the_name_of_no_prefetching_and_for_any_other_key_not_given() -> None:
    model_args = simple_parse_args_string("policy=specmd,prefetch=none")
    assert model_args["prefetch"] is None
    assert read_config(model_args).policy.prefetch.name == "none"
    for key in set(KEYS) - set(AXES):
        assert read_config({key: None}) == read_config({}), key
    model_args = {"policy": "on_demand", "eviction": "least_stale"}
    assert read_config({**model_args, "eviction.order": None}) == read_config(model_args)


def test_an_override_goes_before_init_args_and_drops_what_another_algorithm_had(
    tmp_path: Path,
) -> None:
    path = sized(tmp_path, init_args={"size": 3})
    policy = load_policy(path, {"eviction.size": 4, "eviction.slack": 2})
    assert policy.as_dict()["eviction"] == {"class_path": SIZED, "size": 4, "slack": 2}
    composition = load_policy("specmd", {"prefetch": "next_gate", "prefetch.depth": 2}).as_dict()
    assert "percentile" in load_policy("specmd").as_dict()["prefetch"]
    assert composition["prefetch"].items() >= {"name": "next_gate", "depth": 2}.items()
    assert "percentile" not in composition["prefetch"]
    overrides = {"eviction.order": "fifo", "eviction": "least_stale"}
    reverse = dict(reversed(overrides.items()))
    assert load_policy("on_demand", overrides) == load_policy("on_demand", reverse)


ROOT = Path(__file__).resolve().parent.parent


TASK = ("--tasks", "tiny_arc", "--include_path", str(task_configs_dir()))


def test_a_command_line_is_refused_with_and_without_run_and_by_its_file(tmp_path: Path) -> None:
    """For other refusals before torch is imported see `tests/soak/commands.txt`."""
    bad = [*TASK, "--use_cache", "stored"]
    (tmp_path / "run.yaml").write_text("model: moecache\n")
    model, file = ["--model", "moecache"], ["--config", str(tmp_path / "run.yaml")]
    for words in (["run", *model], model, file):
        with pytest.raises(ArgumentsError, match="--use_cache='stored': stored outputs come"):
            check_command([*words, *bad])


def test_a_good_command_line_and_those_of_other_models_pass(tmp_path: Path) -> None:
    check_command(["run", "--model", "hf", "--model_args", "polic=x", *TASK])
    out = ["--output_path", str(tmp_path / "new/folder"), "--limit", "4"]
    check_command(["--model", "moecache", "--model_args", "policy=specmd,dtype=float32", *out])
    assert not (tmp_path / "new").exists()
    check_command(["ls", "tasks"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "tiny_gsm8"], "tasks='tiny_gsm8' is not known. Did you mean 'tiny_gsm8k'?"),
        (["--tasks", "tiny_gsm8k", "--include_path", "policies"], "Give --include_path"),
        (["--model_args", "load_in_4bit=True"], "Did you mean 'precision=int4'?"),
        (["--wandb_args", "project=x"], "--wandb_args needs the package 'wandb'"),
        (["--trackio_args", "project=x"], "`pip install trackio`"),
    ],
)
def test_what_lm_eval_would_stumble_over_is_said_before_the_run(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task's name after indexing them all, a logger's package as an UnboundLocalError."""
    find_spec = importlib.util.find_spec
    absent = ("wandb", "trackio")
    there = lambda name: None if name in absent else find_spec(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", there)
    with pytest.raises(ArgumentsError, match=re.escape(message)):
        check_command(["--model", "moecache", *TASK, *words])


def test_a_task_in_a_configuration_may_be_no_text(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: moecache\ntasks: 987654321\n")
    with pytest.raises(ArgumentsError, match="tasks='987654321' is not known"):
        check_command(["run", "--config", str(file)])


@pytest.mark.parametrize(
    ("pretrained", "output", "tasks"),
    [
        ("models/" * 40, "out", "tiny_arc"),
        ("tiny", f"out/{'x' * 240}.json", "tiny_arc"),
        ("tiny", "out", "a" * 240),
    ],
)
def test_names_too_long_to_be_saved_are_refused_before_the_run(
    pretrained: str, output: str, tasks: str, tmp_path: Path
) -> None:
    model_args = {"pretrained": pretrained}
    given = {"output_path": str(tmp_path / output), "model_args": model_args, "tasks": [tasks]}
    with pytest.raises(ArgumentsError, match=r"cannot be written: .*: File name too long\."):
        check_output({**given, "log_samples": True})
    assert not any(tmp_path.iterdir())


def test_what_lm_eval_could_not_save_ends_its_command_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    for output, code in ((tmp_path / "out", 0), (tmp_path / "file", 1)):
        unsaved, tracker = Unsaved(), EvaluationTracker(output_path=str(output))
        tracker.general_config_tracker.model_name_sanitized = "tiny"
        tracker.save_results_aggregated({})
        assert unsaved.exit_code() == code
    assert "could not save results aggregated: [Errno 20]" in capsys.readouterr().err


def test_lm_eval_names_the_folder_of_the_shipped_model_after_it() -> None:
    class Bare(MoECacheLM):
        def __init__(self, **given: Any) -> None:
            assert given == {"policy": "on_demand", "pretrained": "tiny"}

    arguments = {"policy": "on_demand"}
    Bare.create_from_arg_obj(arguments)
    assert GeneralConfigTracker._get_model_name(arguments) == "tiny"


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
    process = subprocess.run(
        [*command, "--model_args", "polic=specmd"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert process.returncode == 1 and "Traceback" not in process.stderr
    last = process.stderr.strip().split("\n")[-1]
    assert last.startswith("moecache: model_args: the key 'polic'")
    assert process.stdout.strip() == "False"


def test_only_lm_evals_command_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentsError, match="polciy"):
        MoECacheLM.create_from_arg_string("polciy=specmd")
    monkeypatch.setattr(arguments, "is_lm_eval_command", lambda: True)
    with pytest.raises(SystemExit):
        MoECacheLM.create_from_arg_string("polciy=specmd")


def test_generation_options_that_cannot_be_followed_are_refused_before_a_sweep() -> None:
    """For all others see `tests/soak/commands.txt`."""
    asked = {"gen_kwargs": {"until": [1]}}
    cell = Cell(model="moecache", model_args={}, tasks=("tiny_arc",), options=asked)
    with pytest.raises(ArgumentsError, match=r"gen_kwargs: until=\[1\] must be a text or a list"):
        check_cell(cell)


def test_every_generation_option_of_lm_evals_tasks_is_allowed_and_sampling_but_with_a_draft() -> (
    None
):
    check_generation({"until": "x", "max_gen_toks": 8, "max_new_tokens": 8}, speculative=False)
    check_generation({"num_beams": 10, "top_p": 0.95, "top_k": 0}, speculative=False)
    check_generation({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, speculative=False)
    check_generation({"do_sample": False, "temperature": 0.0, "top_p": 1}, speculative=True)


def test_model_args_may_name_the_device_and_the_batch_size(checkpoint: Any) -> None:
    options = {"device": "cuda:0", "batch_size": 1, "max_batch_size": None}
    text = f"pretrained={checkpoint('olmoe')},device=cpu,batch_size=3"
    lm = MoECacheLM.create_from_arg_string(text, options)
    assert (str(lm.device), lm.batch_size) == ("cpu", 3)


def has(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    """Make torch report `count` devices of `kind`."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    device = torch.device(kind) if count else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "cuda", 0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_without_an_accelerator_lm_evals_own_default_is_the_cpu_and_others_are_refused() -> None:
    for device in (None, "cuda", "cuda:0", "cpu"):
        assert resolve_device({"device": device}) == "cpu"
    for device in ("cuda:1", "mps", "mps:0", "xpu", "privateuseone", "gpu"):
        why = "is not the name of a device" if device == "gpu" else ".*no such device"
        with pytest.raises(ValueError, match=f"device='{device}'.*{why}.*Allowed here: cpu"):
            resolve_device({"device": device})


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps", "privateuseone"])
def test_of_two_devices_the_one_that_is_asked_for_is_taken(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # An earlier test of this process may have renamed the out-of-tree device.
    kind = torch.device(kind).type
    has(monkeypatch, kind, 2)
    assert resolve_device({"device": None}) == kind
    for device in ("cpu", kind, f"{kind}:1"):
        assert resolve_device({"device": device}) == device
    with pytest.raises(ValueError, match=f"Allowed here: cpu, {kind}, {kind}:0, {kind}:1."):
        resolve_device({"device": f"{kind}:2"})


def test_lm_evals_own_default_is_the_accelerator_that_is_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has(monkeypatch, "xpu", 1)
    assert resolve_device({"device": "cuda:0"}) == "xpu"
    assert "device='cuda:0' is not here; the run uses xpu" in caplog.text
    # With several processes only the type is resolved.
    has(monkeypatch, "cuda", 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert resolve_device({"device": "cuda:0"}) == "cuda"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert resolve_device({"device": "cuda:0"}) == "cpu"


def test_one_module_knows_a_vendor() -> None:
    """Devices go through torch's generic interface; CUDA-only code is in `model/device.py`."""
    root = Path(lm_eval_moecache.__file__).parent
    vendor = re.compile(
        r"torch\.(cuda|xpu|mps|npu)|is_cuda|cudart|(type|device) [!=]= .cuda|_on_cuda"
    )
    lines = [
        f"{path.relative_to(root.parent)}: {line.strip()}"
        for folder in (root, root.parent / "benchmarks")
        for path in sorted(folder.rglob("*.py"))
        for line in path.read_text().splitlines()
        if vendor.search(line) and path != root / "model" / "device.py"
    ]
    assert not lines


@pytest.mark.parametrize("given", [{"device": "cuda:0"}, {}], ids=str)
def test_a_precision_and_a_draft_are_checked_for_the_device_of_the_run(given: Any) -> None:
    for model_args in ({"precision": "int8", **given}, given):
        _, hflm_args = check_arguments("tiny", model_args, speculative=model_args is given)
        assert hflm_args["device"] == "cpu"


def test_a_cell_is_the_same_on_a_machine_with_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def identity(**arguments: str) -> str:
        cell = Cell(
            model="moecache", model_args=arguments, tasks=("tiny_arc",), options={}, include_path=()
        )
        return check_cell(cell).configuration_hash

    default, on_cpu = identity(), identity(device="cpu")
    has(monkeypatch, "cuda", 1)
    assert identity() == default != on_cpu
    assert identity(device="cpu") == on_cpu
