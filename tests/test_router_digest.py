"""An artifact belongs to one model's routers, and a wrapped model holds it to that."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm, Resolution
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.engine import Engine, Setting
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers, router_digest
from lm_eval_moecache.model.wrap import WrappedModel
from lm_eval_moecache.records.artifact import Artifact
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from tests.conftest import Checkpoint


class Carrier(MissAlgorithm):
    """Fetches, and carries an artifact of the routers whose digest it is told."""

    source: ClassVar[str] = "a test"
    is_lossless: ClassVar[bool] = True

    def __init__(self, geometry: Geometry, *, seed: int = 0, digest: str = "") -> None:
        super().__init__(geometry, seed=seed)
        self.artifact = Artifact(
            kind="buddies",
            model="somebody",
            num_layers=geometry.num_layers,
            num_experts=geometry.num_experts,
            top_k=geometry.top_k,
            router_digest=digest,
            made_from={},
            arrays={},
        )

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Container[int]
    ) -> Resolution | None:
        return None


def wrap(model: Any, digest: str, tmp_path: Any) -> WrappedModel:
    file = tmp_path / "carrier.yaml"
    file.write_text(
        "routing: standard\nprefetch: none\neviction: lru\n"
        f"miss: {{class_path: {__name__}.Carrier, digest: '{digest}'}}\n"
    )
    layers = find_moe_layers(model)
    geometry = describe(model, layers, "ours")
    setting = Setting(
        policy=load_policy(str(file)),
        capacity=parse_capacity("50%", geometry),
        hardware=load_hardware("a100-5GBps"),
    )
    return WrappedModel(model, layers, Engine(geometry, setting))


def test_a_digest_tells_models_apart_and_not_their_dtypes(checkpoint: Checkpoint) -> None:
    path = checkpoint("olmoe")
    found = {
        dtype: router_digest(
            find_moe_layers(AutoModelForCausalLM.from_pretrained(path, dtype=dtype))
        )
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert len(set(found.values())) == 1
    model = AutoModelForCausalLM.from_pretrained(path)
    layers = find_moe_layers(model)
    with torch.no_grad():
        next(layers[-1].router.parameters())[0, 0] += 1
    assert router_digest(layers) not in found.values()


def test_a_wrapped_model_refuses_an_artifact_of_other_routers_and_stays_as_it_was(
    checkpoint: Checkpoint, tmp_path: Any
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("olmoe"))
    before = model.get_experts_implementation()
    with pytest.raises(ValueError, match=r"made from 'somebody', whose router weights.*'ours'"):
        wrap(model, "0" * 64, tmp_path)
    assert model.get_experts_implementation() == before
    assert not model._forward_hooks and not model._forward_pre_hooks
    wrap(model, router_digest(find_moe_layers(model)), tmp_path).unwrap()
