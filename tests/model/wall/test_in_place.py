"""Experts that a checkpoint has as they are executed are read from it: nothing is converted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from lm_eval_moecache.model import sources
from lm_eval_moecache.model.checkpoint import skeleton, weights_files
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.wall.loading import find_in_place
from lm_eval_moecache.model.wall.pools import expert_parameters
from lm_eval_moecache.model.wall.tiers import DiskTier, joined, tensors_in
from tests.conftest import Checkpoint
from tests.harness import answers
from tests.model.wall.models import HOST, on_disk, read_experts
from tests.models import FAMILY_CASES, byte_tokenizer, random_model


def places(path: Path, **given: Any) -> Any:
    return find_in_place(skeleton(str(path), given), weights_files(str(path), given))


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_every_family_is_read_where_it_lies(
    family: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(family)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16")
    read = read_experts(monkeypatch)
    lm = on_disk(path, tmp_path / "store")
    assert read == []
    assert not (tmp_path / "store").exists()
    loader: Any = lm.loader._experts
    for index, layer in enumerate(find_moe_layers(whole)):
        for name, tensor in expert_parameters(layer.experts).items():
            assert torch.equal(loader.copy_of(index)[name], tensor)
    lm.wrapped.unwrap()


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
    found = tensors_in(tmp_path / "x.safetensors")
    spans = [joined([found[f"{e}.a"], found[f"{e}.b"]]) for e in range(2)]
    # 0.a and 0.b are neighbours in the file, and 1.a and 1.b, but for what lies between.
    assert [len(each) for each in spans] == [1, 1]
    assert len(joined([found["0.b"], found["0.a"]])) == 2
    target = torch.empty(4, 3)
    DiskTier([{"w": spans}]).fill(0, 1, {"w": target})
    assert torch.equal(target, torch.ones(4, 3))


def test_what_would_have_to_be_converted_is_not_read_in_place(tmp_path: Path) -> None:
    path, model = tmp_path / "model", random_model("olmoe")
    model.save_pretrained(path)
    assert places(path) is not None
    assert places(path, dtype="float32") is None
    assert find_in_place(skeleton(str(path), {}), []) is None
    settings = json.loads((path / "config.json").read_text())
    quantised = {**settings, "quantization_config": {"quant_method": "fp8"}}
    bare = skeleton(str(path), {})
    bare.config.quantization_config = quantised["quantization_config"]
    assert find_in_place(bare, weights_files(str(path), {})) is None


@pytest.mark.parametrize("missing", ["experts.1.up_proj", "layers.2.mlp.experts.7.down_proj"])
def test_a_checkpoint_that_lacks_an_expert_is_left_to_transformers(
    missing: str, tmp_path: Path
) -> None:
    """It says what is missing, or fills it, as ever."""
    from safetensors.torch import load_file

    path = tmp_path / "model"
    random_model("olmoe").save_pretrained(path)
    file = path / "model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if missing not in k}
    save_file(tensors, file, metadata={"format": "pt"})
    assert places(path) is None


def test_a_release_that_loads_in_another_way_converts(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("olmoe")
    monkeypatch.setattr(sources, "can_leave_out", lambda: False)
    monkeypatch.setattr("lm_eval_moecache.model.wall.loading.can_leave_out", lambda: False)
    expected = answers(HFLM(pretrained=str(path), dtype="bfloat16", **HOST))
    lm = on_disk(path, tmp_path / "store")
    assert (tmp_path / "store").exists() and answers(lm) == expected
    lm.wrapped.unwrap()


def test_transformers_loads_as_ever_afterwards(checkpoint: Checkpoint, tmp_path: Path) -> None:
    usual = PreTrainedModel._load_pretrained_model
    lm = on_disk(checkpoint("olmoe"), tmp_path)
    assert PreTrainedModel._load_pretrained_model is usual
    lm.wrapped.unwrap()
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint("olmoe"), broken)
    (broken / "config.json").write_text("{}")
    with pytest.raises((ValueError, OSError)):
        on_disk(broken, tmp_path)
    assert PreTrainedModel._load_pretrained_model is usual


def test_the_checkpoint_may_go_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model"
    random_model("olmoe").save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    lm = on_disk(path, tmp_path / "store", policy="on_demand", capacity="10%")
    expected = answers(lm)
    shutil.rmtree(path)
    lm.reset()
    assert answers(lm) == expected
    lm.wrapped.unwrap()
