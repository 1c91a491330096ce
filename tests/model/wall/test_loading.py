"""Experts go from the checkpoint into the store: equal answers, no files left, clear errors."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from lm_eval_moecache.harness import preflight
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.preflight import check_arguments
from lm_eval_moecache.model import device
from lm_eval_moecache.model.checkpoint import skeleton, weights_files
from lm_eval_moecache.model.device import available_host_bytes
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.model.wall import loading
from lm_eval_moecache.model.wall.loading import find_in_place
from lm_eval_moecache.model.wall.pools import (
    DiskTier,
    SlotPools,
    joined,
    tensors_in,
)
from tests.conftest import Checkpoint
from tests.harness import answers
from tests.model.wrapped import HOST, on_disk, read_experts
from tests.models import FAMILY_CASES, byte_tokenizer, random_model, save_model

MB = 2**20
ROOT = Path(__file__).resolve().parents[3]
WALL: dict[str, Any] = {"clock": "wall", "policy": "specmd", "capacity": "25%"}


@pytest.mark.parametrize("family", FAMILY_CASES)
@pytest.mark.parametrize("store", ["ram", "disk"])
def test_answers_are_those_of_the_hf_model(
    family: str,
    store: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts that the checkpoint stores as they are executed are read in place."""
    path = checkpoint(family)
    dtype = "float32" if family in ("mixtral", "gpt_oss") else "bfloat16"
    expected = answers(HFLM(pretrained=str(path), dtype=dtype, **HOST))
    if store == "disk":
        read = read_experts(monkeypatch)
        lm = on_disk(path, tmp_path, dtype=dtype)
        assert bool(read) == bool(list(tmp_path.iterdir())) == (dtype == "float32")
    else:
        lm = MoECacheLM(pretrained=str(path), dtype=dtype, **HOST, **WALL)
    folder = {"store_dir": str(tmp_path)} if store == "disk" else {}
    # A second time behind a new cache, as a sweep does.
    for _ in range(2):
        assert answers(lm) == expected
        lm.engine.check_integrity()
        lm.install(read_config({**WALL, "store": store, **folder}))
    report = lm.report()
    assert report["clock"] == "wall" and report["store"] == store
    assert report["load"]["seconds"] > 0
    lm.wrapped.unwrap()


def test_a_model_loaded_for_one_clock_is_not_put_behind_the_other(checkpoint: Checkpoint) -> None:
    lm = MoECacheLM(pretrained=str(checkpoint("olmoe")), **HOST, **WALL)
    for other in ({}, {**WALL, "store": "disk"}):
        with pytest.raises(ValueError, match="loaded again"):
            lm.install(read_config(other))
    lm.wrapped.unwrap()


def test_the_slots_of_a_cache_are_freed_before_the_next_one_is_built(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[SlotPools] = weakref.WeakSet()
    alive_counts: list[int] = []

    class Counted(SlotPools):
        def __init__(self, *args: Any) -> None:
            alive_counts.append(len(alive))
            super().__init__(*args)
            alive.add(self)

    monkeypatch.setattr(loading, "SlotPools", Counted)
    lm = MoECacheLM(pretrained=str(checkpoint("olmoe")), **HOST, **WALL)
    answers(lm)
    lm.install(read_config(WALL))
    refused = read_config({**WALL, "policy": "commitmoe"})
    with pytest.raises(ValueError, match="routing=commit"):
        lm.install(refused)
    lm.install(read_config(WALL))
    answers(lm)
    assert alive_counts == [0] * len(alive_counts) and len(alive_counts) >= 3
    lm.wrapped.unwrap()


def test_what_memory_cannot_hold_is_refused_before_the_weights_are_loaded(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device holds the capacity; the host what it locks, on a CPU slots and the model, too."""
    path, setting = str(checkpoint("olmoe")), {"clock": "wall", "policy": "on_demand"}
    on_device = {**setting, "device": "cuda:0"}

    def refused(words: str, arguments: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=words):
            check_arguments(path, arguments)

    monkeypatch.setattr(preflight, "devices", lambda: ["cpu", "cuda", "cuda:0"])
    monkeypatch.setattr(loading, "total_memory", lambda device: 60_000)
    whole = {"capacity": "100%"}
    refused(r"capacity: \d+ bytes of experts.*60000 bytes of cuda", {**on_device, **whole})
    check_arguments(path, {**setting, **whole, "device": "cpu"})
    monkeypatch.setattr(loading, "total_memory", lambda device: 2**40)
    monkeypatch.setattr(loading, "available_host_bytes", lambda: 60_000)
    refused(r"store='ram': \d+ bytes.*has 60000 bytes.*store=disk", on_device)
    check_arguments(path, {**on_device, "store": "disk"})
    experts = r"store='ram': \d+ bytes of experts and \d+ bytes of slots and \d+ bytes of the model"
    refused(experts, {**setting, "device": "cpu"})
    slots = r"store='disk': \d+ bytes of slots and .* has 60000 bytes.*a smaller capacity"
    refused(slots, {**setting, "device": "cpu", "store": "disk"})


def test_shapes_stay_behind_and_take_no_memory(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = checkpoint("qwen3_moe")
    lm = on_disk(path, tmp_path)
    whole = skeleton(str(path), {})
    assert describe(lm.model, find_moe_layers(lm.model), "x") == describe(
        whole, find_moe_layers(whole), "x"
    )
    for layer in find_moe_layers(lm.model):
        for parameter in layer.experts.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.element_size()
    assert not any(p.is_meta for p in lm.model.parameters())
    lm.wrapped.unwrap()


def test_too_little_room_for_the_files_is_said_before_they_are_written(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"store='disk'.*1000 bytes free"):
        on_disk(checkpoint("olmoe"), tmp_path, dtype="float32")


def script(begin: str, path: Path, folder: Path, end: str = "") -> Any:
    """Load a model from disk in a process of its own."""
    text = (
        "from lm_eval_moecache.harness.lm import MoECacheLM\n"
        "from tests.harness import answers\n" + begin + f"lm = MoECacheLM({str(path)!r}, "
        f"device='cpu', clock='wall', store='disk', store_dir={str(folder)!r}, dtype='auto', "
        "policy='on_demand', capacity='5%', max_length=48)\n" + end
    )
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_nothing_that_a_later_one_would_trust(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Killed while it writes: no run reads its files, and the next one removes them."""
    path = checkpoint("olmoe")
    text = (
        "import time\n"
        "from lm_eval_moecache.model.wall import loading\n"
        "from lm_eval_moecache.harness.lm import MoECacheLM\n"
        "loading.ExpertLoader.take_experts = lambda *a: time.sleep(60)\n"
        f"MoECacheLM({str(path)!r}, device='cpu', clock='wall', store='disk', "
        f"store_dir={str(tmp_path)!r}, dtype='float32')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stderr=subprocess.DEVNULL)
    end = time.perf_counter() + 60
    while len(list(tmp_path.glob("*/pending-*.safetensors"))) < 3 and time.perf_counter() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    leftovers = list(tmp_path.glob("*/pending-*.safetensors"))
    assert len(leftovers) == 3
    for file in leftovers:
        file.write_bytes(b"\0" * file.stat().st_size)
    expected = answers(HFLM(pretrained=str(path), dtype="float32", **HOST))
    lm = on_disk(path, tmp_path, dtype="float32")
    assert answers(lm) == expected
    assert not list(tmp_path.glob("*/pending-*"))
    lm.wrapped.unwrap()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "preadv"), reason="Linux")
def test_a_model_larger_than_the_memory_granted_runs_to_the_end(tmp_path: Path) -> None:
    """300 MB of experts; 200 MB of memory beyond the libraries and transformers' map of the file.

    The map is private, so the limit counts it, although it takes no memory until it is written.
    """
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6}
    sizes |= {"num_experts": 16, "num_attention_heads": 8}
    path = save_model(tmp_path / "model", "olmoe", **sizes)
    grant = (
        "import resource, re\n"
        "answers(MoECacheLM(device='cpu', clock='wall', store='disk', max_length=48))\n"
        "held = int(re.search(r'VmData:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024\n"
        f"mapped = {(path / 'model.safetensors').stat().st_size}\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (held + mapped + 200 * 2**20,) * 2)\n"
    )
    process = script(grant, path, tmp_path, "print(len(answers(lm)[0]), 'answers')\n")
    assert process.stdout.endswith("4 answers\n"), process.stderr[-2000:]
    in_memory = grant + (
        f"try:\n    MoECacheLM({str(path)!r}, device='cpu', clock='wall', capacity='5%')\n"
        "except ValueError as error:\n    print(error)\n    raise SystemExit\n"
    )
    process = script(in_memory, path, tmp_path)
    assert "store='ram': the model cannot be loaded" in process.stdout, process.stderr[-2000:]


def places(path: Path, **given: Any) -> Any:
    return find_in_place(skeleton(str(path), given), weights_files(str(path), given))


def test_parts_of_an_expert_may_lie_in_several_files(tmp_path: Path) -> None:
    path, model = tmp_path / "model", random_model("olmoe")
    model.save_pretrained(path, max_shard_size="4KB")
    byte_tokenizer().save_pretrained(path)
    assert len(weights_files(str(path), {})) > 10
    first = places(path)[0]["gate_up_proj"]
    assert len({file for spans in first for file, _, _ in spans}) > 1
    lm = on_disk(path, tmp_path / "store")
    assert answers(lm) == answers(HFLM(pretrained=str(path), dtype="bfloat16", **HOST))
    lm.wrapped.unwrap()


def test_neighbours_are_read_as_one(tmp_path: Path) -> None:
    parts = {f"{e}.{name}": torch.full((2, 3), float(e)) for e in range(2) for name in "ab"}
    save_file({**parts, "0.c": torch.zeros(1)}, tmp_path / "x.safetensors")
    tensors = tensors_in(tmp_path / "x.safetensors")
    spans = [joined([tensors[f"{e}.a"], tensors[f"{e}.b"]]) for e in range(2)]
    # The file has 0.a, 0.b, 0.c, 1.a, 1.b: an expert's a and b are neighbours.
    assert [len(expert_spans) for expert_spans in spans] == [1, 1]
    assert len(joined([tensors["0.b"], tensors["0.a"]])) == 2
    target = torch.empty(4, 3)
    DiskTier([{"w": spans}]).fill(0, 1, {"w": target})
    assert torch.equal(target, torch.ones(4, 3))


def test_what_would_have_to_be_converted_is_not_read_in_place(tmp_path: Path) -> None:
    path = tmp_path / "model"
    random_model("olmoe").save_pretrained(path)
    assert places(path) is not None
    assert places(path, dtype="float32") is None
    bare, files = skeleton(str(path), {}), weights_files(str(path), {})
    assert find_in_place(bare, []) is None
    bare.config.quantization_config = {"quant_method": "fp8"}
    assert find_in_place(bare, files) is None
    # A checkpoint that lacks an expert is left to transformers, which reports or fills it as ever.
    whole = load_file(path / "model.safetensors")
    for missing in ("experts.1.up_proj", "layers.2.mlp.experts.7.down_proj"):
        tensors = {name: tensor for name, tensor in whole.items() if missing not in name}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        assert places(path) is None


def test_a_release_that_loads_in_another_way_converts(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("olmoe")
    monkeypatch.setattr("lm_eval_moecache.model.checkpoint.can_leave_out", lambda: False)
    monkeypatch.setattr("lm_eval_moecache.model.wall.loading.can_leave_out", lambda: False)
    expected = answers(HFLM(pretrained=str(path), dtype="bfloat16", **HOST))
    lm = on_disk(path, tmp_path / "store")
    assert (tmp_path / "store").exists() and answers(lm) == expected
    lm.wrapped.unwrap()


def test_transformers_loads_as_ever_afterwards(checkpoint: Checkpoint, tmp_path: Path) -> None:
    original = PreTrainedModel._load_pretrained_model
    lm = on_disk(checkpoint("olmoe"), tmp_path)
    assert PreTrainedModel._load_pretrained_model is original
    lm.wrapped.unwrap()
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint("olmoe"), broken)
    (broken / "config.json").write_text("{}")
    with pytest.raises((ValueError, OSError)):
        on_disk(broken, tmp_path)
    assert PreTrainedModel._load_pretrained_model is original


# --- files that are open, and memory that a host has to give -----------------------------------

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")


@linux
def test_a_file_that_ends_before_is_named_and_is_closed_with_its_tier(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(MB))

    def is_open() -> bool:
        folder = Path("/proc/self/fd")
        return any(
            os.path.realpath(folder / descriptor) == str(path) for descriptor in os.listdir(folder)
        )

    tier = DiskTier([{"w": [[(str(path), 0, 4)], [(str(path), MB - 2, 4)]]}])
    tier.fill(0, 0, {"w": torch.empty(1)})
    with pytest.raises(OSError, match=rf"expert 1: .*short ends at byte {MB}: the file is trunc"):
        tier.fill(0, 1, {"w": torch.empty(1)})
    assert is_open()
    del tier
    gc.collect()
    assert not is_open()


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_groups_limit_is_room_too(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of the group or of one above it, less its use; cached files make way."""
    own, groups = tmp_path / "cgroup", tmp_path / "groups"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8000 * 1024))
    monkeypatch.setattr(device, "_OWN_GROUPS", own)
    monkeypatch.setattr(device, "_GROUPS", groups)
    assert available_host_bytes() == 8000 * 1024
    kind, limit, used, cached = {
        1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("", "memory.max", "memory.current", "inactive_file"),
    }[version]
    inner, outer = groups / kind / "a/b", groups / kind / "a"
    inner.mkdir(parents=True)
    line = "4:memory:/a/b" if version == 1 else "0::/a/b"
    own.write_text(f"9:cpu:/elsewhere\n{line}\n")
    (inner / limit).write_text("max\n")
    assert available_host_bytes() == 8000 * 1024
    (outer / limit).write_text("5000000\n")
    (outer / used).write_text("4000000\n")
    assert available_host_bytes() == 1000000
    (outer / "memory.stat").write_text(f"x 1\n{cached} 500000\n")
    assert available_host_bytes() == 1500000
    (inner / limit).write_text("300\n")
    (inner / used).write_text("400\n")
    assert available_host_bytes() == 0
