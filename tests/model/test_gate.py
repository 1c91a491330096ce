"""`Gate` calls a router: its arguments, its device, its number of logits, the model it is of."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import dispatch_model
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from lm_eval_moecache.harness.preflight import check_arguments
from lm_eval_moecache.model.moe_layers import find_moe_layers, router_digest
from lm_eval_moecache.model.weighting import check_rules, find_rule, softmax_chosen_scaled
from tests.conftest import Checkpoint
from tests.families.configs import small_model
from tests.model.wrapped import assert_same, logits_of, wrap_virtual
from tests.models import FAMILIES, byte_tokenizer, config_of, random_model

CPU = {"device": "cpu"}


def offloaded(model: Any, folder: Path) -> Any:
    """Keep a model's layers on disk between calls, as `device_map` does when memory runs out."""
    places = {name: "cpu" for name, _ in model.named_children() if name != "model"}
    for name, _ in model.model.named_children():
        places[f"model.{name}"] = "disk" if name == "layers" else "cpu"
    model.tie_weights()
    return dispatch_model(
        model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True
    )


@pytest.mark.parametrize("policy", ["specmd", "pruning"])
def test_a_model_that_accelerate_offloads_runs_under_any_policy(
    policy: str, tmp_path: Path
) -> None:
    model = random_model("qwen3_moe")
    digest = router_digest(find_moe_layers(model))
    wrapped = wrap_virtual(model, policy, "25%")
    expected = logits_of(model)
    counts = [p.misses for p in wrapped.engine.ledger.passes]
    wrapped.unwrap()
    model = offloaded(model, tmp_path)
    layers = find_moe_layers(model)
    assert all(p.is_meta for layer in layers for p in layer.router.parameters())
    assert router_digest(layers) == digest
    wrapped = wrap_virtual(model, policy, "25%")
    assert_same(expected, logits_of(model), padding=True)
    assert [p.misses for p in wrapped.engine.ledger.passes] == counts
    wrapped.unwrap()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_without_weights_is_known_by_its_stand_in(family: str) -> None:
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config_of(family))
    gate = find_moe_layers(empty)[0].gate
    real = find_rule(find_moe_layers(random_model(family))[0].gate)
    found = find_rule(gate.stand_in())
    assert real is not None and found is not None and found.raw is real.raw
    check_rules([gate])


def test_a_scale_of_each_expert_is_found_without_weights_too() -> None:
    model = small_model("gemma4_text").to("meta")
    rule = find_rule(find_moe_layers(model)[0].gate.stand_in())
    assert rule is not None and rule.raw is softmax_chosen_scaled
    scale, logits = torch.tensor([1.0, 2.0, 3.0]), torch.log(torch.tensor([[1.0, 1.0, 2.0]]))
    weights = softmax_chosen_scaled(logits, torch.tensor([[2, 1]]), scale)
    torch.testing.assert_close(weights, torch.tensor([[2.0, 2 / 3]]))


def choice_of(family: str) -> tuple[Any, Any, Any]:
    """Return a family's first gate, the hidden states of five tokens, and its choice for them."""
    gate = find_moe_layers(small_model(family))[0].gate
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    return gate, hidden, gate.ask(hidden)


def test_a_routers_bias_comes_from_the_block_around_it() -> None:
    gate, hidden, choice = choice_of("afmoe")
    assert choice.experts.shape == (5, 3)
    with torch.no_grad():
        gate._block.expert_bias[6] = 100.0
    assert (gate.ask(hidden).experts == 6).any(-1).all()


def test_logits_of_a_skipping_class_are_no_experts_and_probabilities_become_logits() -> None:
    assert choice_of("zaya")[2].logits.shape == (5, 8)
    logits = choice_of("gemma4_text")[2].logits
    assert float(logits.max()) <= 0
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(5), rtol=0.02, atol=0.02)


def test_where_the_token_decides_its_experts_are_predicted() -> None:
    layers = find_moe_layers(small_model("deepseek_v4"))
    gate = next(layer.gate for layer in layers if layer.gate.by_token)
    gate.input_ids = torch.tensor([[5, 6]])
    logits = gate.predict(torch.randn(1, 2, 32).bfloat16())
    assert [set(row) for row in logits.topk(3).indices.tolist()] == [{5, 6, 7}, {6, 7, 0}]


@pytest.mark.parametrize(
    ("method", "kind"),
    [("fp8", FineGrainedFP8HfQuantizer), ("mxfp4", Mxfp4HfQuantizer)],
)
def test_experts_of_a_quantiser_are_refused_before_loading(
    method: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    # The quantiser's own check passes, as on a machine with its kernels.
    monkeypatch.setattr(kind, "validate_environment", lambda *args, **kwargs: None)
    for dequantize in (False, True):
        settings = {"quant_method": method, "dequantize": dequantize}
        config_of("olmoe", quantization_config=settings).save_pretrained(tmp_path)
        words = rf"quant_method='{method}'.*Allowed: a checkpoint in bf16"
        with nullcontext() if dequantize else pytest.raises(ValueError, match=words):
            check_arguments(str(tmp_path), CPU)


def test_an_adapter_of_experts_is_refused_before_loading(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = str(checkpoint("olmoe"))
    adapter = tmp_path / "adapter_config.json"
    adapter.write_text(json.dumps({"target_modules": ["q_proj"]}))
    check_arguments(path, {**CPU, "peft": str(tmp_path)})
    adapter.write_text(json.dumps({"target_parameters": ["mlp.experts.gate_up_proj"]}))
    with pytest.raises(ValueError, match=r"peft=.* changes mlp.experts.gate_up_proj"):
        check_arguments(path, {**CPU, "peft": str(tmp_path)})


def test_a_subfolder_is_looked_into(tmp_path: Path) -> None:
    config_of("mixtral").save_pretrained(tmp_path / "inside")
    with pytest.raises((OSError, ValueError)):
        check_arguments(str(tmp_path), CPU)
    check_arguments(str(tmp_path), {**CPU, "subfolder": "inside"})


def test_a_type_without_a_causal_model_is_refused_by_name(tmp_path: Path) -> None:
    transformers.AutoConfig.for_model("openai_privacy_filter").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no causal language model.*'openai_privacy_filter'"):
        check_arguments(str(tmp_path), CPU)


def test_an_unknown_rule_is_refused_before_loading(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(checkpoint("olmoe"))
    check_arguments(path, {**CPU, "policy": "pruning"})
    monkeypatch.setattr("lm_eval_moecache.model.weighting.RULES", {})
    check_arguments(path, {**CPU, "policy": "specmd"})
    with pytest.raises(ValueError, match="OlmoeTopKRouter weighs its experts by a rule"):
        check_arguments(path, {**CPU, "policy": "pruning"})


def test_a_digest_tells_models_apart_and_not_their_dtypes(checkpoint: Checkpoint) -> None:
    def layers_of(dtype: torch.dtype) -> Any:
        path = checkpoint("olmoe")
        return find_moe_layers(AutoModelForCausalLM.from_pretrained(path, dtype=dtype))

    layers = layers_of(torch.float32)
    digest = router_digest(layers)
    assert digest == router_digest(layers_of(torch.bfloat16))
    with torch.no_grad():
        next(layers[-1].router.parameters())[0, 0] += 1
    assert router_digest(layers) != digest
