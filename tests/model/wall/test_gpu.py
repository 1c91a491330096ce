"""The wall clock on a CUDA device: the same bits as transformers' kernels there.

`MOECACHE_TEST_DEVICE=cpu` runs the same tests with the store of a CPU (`benchmarks/gpu_check.py`).
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_eval_moecache.engine.engine import Engine, Setting
from lm_eval_moecache.engine.wall.worker import Transfer
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.model.precision.ladder import codecs_of
from lm_eval_moecache.model.precision.registry import ALIASES, codec_names
from lm_eval_moecache.model.wall.assemble import assemble
from lm_eval_moecache.model.wall.loading import ExpertLoader
from lm_eval_moecache.model.wall.mover import DeviceMover
from lm_eval_moecache.model.wall.tiers import DiskTier, find_stored
from lm_eval_moecache.model.wrap import WrappedModel
from lm_eval_moecache.records.sizes import parse_capacity
from tests.model.precision.test_live import replaced
from tests.models import random_model

DEVICE = os.environ.get("MOECACHE_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
]
SIZES = {"hidden_size": 64, "intermediate_size": 64}


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay every transfer at random, before its copy and after it."""
    drawn, begin = random.Random(0), DeviceMover.begin

    def begin_late(self: DeviceMover, transfer: Transfer) -> object:
        time.sleep(drawn.choice((0.0, 0.0, 0.0002, 0.0005)))
        token = begin(self, transfer)
        time.sleep(drawn.choice((0.0, 0.0, 0.0002)))
        return token

    monkeypatch.setattr(DeviceMover, "begin", begin_late)


def logits(model: Any, decode_kernel: str | None = None) -> list[torch.Tensor]:
    """A prefill and three decode steps; generation changes to another kernel for the steps."""
    prompt = torch.arange(2, 50, device=DEVICE)[None]
    with torch.no_grad():
        output = model(prompt, use_cache=True)
        found = [output.logits]
        if decode_kernel is not None and DEVICE == "cuda":
            model.set_experts_implementation(decode_kernel)
        for _ in range(3):
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
            found.append(output.logits)
    return found


def wrap(model: Any, policy: str, capacity: str, **changes: str) -> WrappedModel:
    """Bring a model on the CPU to the device, its experts behind the cache."""
    config = read_config({"policy": policy, "capacity": capacity, **changes})
    codecs = None if config.ladder is None else codecs_of(config.ladder)
    loader = ExpertLoader("ram", None, model, codecs)
    loader.take_experts(model, torch.device(DEVICE))
    return _wrapped(model, loader, policy, capacity, **changes)


def _wrapped(
    model: Any, loader: ExpertLoader, policy: str, capacity: str, **changes: str
) -> WrappedModel:
    config = read_config({"policy": policy, "capacity": capacity, **changes})
    layers = find_moe_layers(model)
    geometry = describe(model, layers, "gpu", config.ladder)
    size = parse_capacity(capacity, geometry)
    setting = Setting(policy=config.policy, capacity=size, hardware=config.hardware)
    return WrappedModel(model, layers, *assemble(model, geometry, setting, loader))


def assert_exact(wrapped: WrappedModel, expected: list[torch.Tensor], repetitions: int) -> None:
    engine: Engine = wrapped.engine
    for repetition in range(repetitions):
        found = logits(wrapped.model)
        same = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
        assert all(same), f"repetition {repetition}: {same}"
        engine.check_integrity()
    wrapped.unwrap()


@pytest.mark.parametrize("capacity", ["100%", "25%", "4", "2/layer"])
@pytest.mark.parametrize("policy", ["on_demand", "specmd", "mixtral_offloading"])
def test_logits_are_identical_twenty_times_over(policy: str, capacity: str) -> None:
    expected = logits(random_model("olmoe", **SIZES).to(DEVICE), decode_kernel="batched_mm")
    wrapped = wrap(random_model("olmoe", **SIZES), policy, capacity)
    assert_exact(wrapped, expected, 20)


@pytest.mark.parametrize("name", [n for n in codec_names() if n not in ALIASES])
def test_every_codec_computes_what_its_decoded_weights_say(name: str) -> None:
    plain = replaced(random_model("olmoe", **SIZES), name).to(DEVICE)
    expected = logits(plain, decode_kernel="batched_mm")
    wrapped = wrap(random_model("olmoe", **SIZES), "on_demand", "4", precision=name)
    assert_exact(wrapped, expected, 3)


def test_more_slots_than_one_grouped_product_takes() -> None:
    """16 layers of 128 experts: 60% are 1,228 slots, two windows of a prefill."""
    sizes = {"num_hidden_layers": 16, "num_experts": 128, **SIZES}
    expected = logits(random_model("olmoe", **sizes).to(DEVICE), decode_kernel="batched_mm")
    wrapped = wrap(random_model("olmoe", **sizes), "on_demand", "60%")
    assert_exact(wrapped, expected, 2)


def test_experts_are_staged_from_files(tmp_path: Path) -> None:
    """Without memory that a device could copy from: read into pinned buffers, which come round."""
    from safetensors.torch import save_file

    expected = logits(random_model("olmoe", **SIZES).to(DEVICE), decode_kernel="batched_mm")
    model = random_model("olmoe", **SIZES)
    rows = []
    for index, layer in enumerate(find_moe_layers(model)):
        file = tmp_path / f"{index}.safetensors"
        tensors = dict(layer.experts.named_parameters())
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, file)
        rows.append({name: find_stored(file, name) for name in tensors})
    loader = ExpertLoader("ram", None, model)
    loader.take_experts(model, torch.device(DEVICE))
    loader.tiers = [DiskTier(rows)]
    assert_exact(_wrapped(model, loader, "specmd", "25%"), expected, 5)


def test_dropping_and_levels_end_with_finite_answers() -> None:
    for changes in (
        {"miss": "drop"},
        {"precision": "int8:int4:int2", "miss": "fetch_priority", "prefetch": "next_gate"},
    ):
        wrapped = wrap(random_model("olmoe", **SIZES), "on_demand", "30%", **changes)
        assert all(found.isfinite().all() for found in logits(wrapped.model))
        wrapped.engine.check_integrity()
        wrapped.unwrap()


def test_the_host_computes_what_the_device_would_up_to_rounding() -> None:
    expected = logits(random_model("olmoe", **SIZES).to(DEVICE), decode_kernel="batched_mm")
    changes = {"miss": "host", "miss.rule": "always"}
    wrapped = wrap(random_model("olmoe", **SIZES), "on_demand", "30%", **changes)
    found = logits(wrapped.model)
    wrapped.unwrap()
    assert torch.allclose(found[0].float(), expected[0].float(), atol=0.05, rtol=0.05)
