"""The wall clock on a CUDA device: the same bits as transformers' kernels there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lm_eval_moecache.engine.engine import Setting
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.model.wall.assemble import assemble
from lm_eval_moecache.model.wall.loading import ExpertLoader
from lm_eval_moecache.model.wrap import WrappedModel
from lm_eval_moecache.records.sizes import parse_capacity
from tests.models import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def logits(model: Any, decode_kernel: str | None = None) -> list[torch.Tensor]:
    """A prefill and three decode steps; generation changes to another kernel for the steps."""
    prompt = torch.arange(2, 50, device="cuda")[None]
    with torch.no_grad():
        output = model(prompt, use_cache=True)
        found = [output.logits]
        if decode_kernel is not None:
            model.set_experts_implementation(decode_kernel)
        for _ in range(3):
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
            found.append(output.logits)
    return found


@pytest.mark.parametrize("capacity", ["100%", "25%", "4", "2/layer"])
@pytest.mark.parametrize("policy", ["on_demand", "specmd"])
def test_logits_are_identical_on_a_gpu(policy: str, capacity: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    plain = random_model("olmoe", **sizes).cuda()
    expected = logits(plain, decode_kernel="batched_mm")
    model = random_model("olmoe", **sizes)
    loader = ExpertLoader("ram", None, model)
    loader.take_experts(model, torch.device("cuda"))
    layers = find_moe_layers(model)
    geometry = describe(model, layers, "gpu")
    config = read_config({"policy": policy, "capacity": capacity})
    setting = Setting(
        policy=config.policy,
        capacity=parse_capacity(capacity, geometry),
        hardware=config.hardware,
    )
    engine, store = assemble(model, geometry, setting, loader)
    wrapped = WrappedModel(model, layers, engine, store)
    for _ in range(5):
        found = logits(model)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    engine.check_integrity()
    wrapped.unwrap()
