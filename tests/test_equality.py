"""Lossless means identical: a wrapped model's answers and logits are the unwrapped model's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from lm_eval_moecache.algorithms.policy import check_cache_form, load_policy, policy_names
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.model.precision.codecs import Codec, Encoded, encode, expert_matrices
from lm_eval_moecache.model.precision.ladder import codecs_of
from lm_eval_moecache.model.store import LadderStore, implementation_of
from lm_eval_moecache.model.wrap import WrappedModel
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.sizes import is_per_layer, parse_capacity
from lm_eval_moecache.tiny import MODEL_DIR
from tests.artifacts import predictor_of
from tests.conftest import Checkpoint
from tests.harness import answers
from tests.models import FAMILIES, FAMILY_CASES, family_case, random_model

# Compositions that need a draft are compared in tests/model/speculative.
LOSSLESS = [
    name
    for name in policy_names()
    if load_policy(name).is_lossless and not load_policy(name).prefetch.algorithm.needs_draft
]
CAPACITIES = ("100%", "25%", "1", "2/layer")


assert {"on_demand", "mixtral_offloading", "specmd"} <= set(LOSSLESS)


def goes_together(policy: str, capacity: str) -> bool:
    """Cross-layer evictions refuse per-layer caches, and those need an expert for each layer."""
    composition = load_policy(policy)
    try:
        check_cache_form(composition, is_per_layer(capacity))
    except ValueError:
        return False
    return not (composition.per_layer and capacity == "1")


COMBINATIONS = [pair for pair in product(LOSSLESS, CAPACITIES) if goes_together(*pair)]
LM_ARGUMENTS: dict[str, Any] = {"device": "cpu", "max_length": 48}


def make_setting(geometry: Geometry, **given: str) -> Setting:
    """Return an engine's setting, for a policy that takes either form of capacity."""
    config = read_config(given)
    size = parse_capacity(config.capacity, geometry)
    return Setting(policy=config.policy, capacity=size, hardware=config.hardware)


def make_engine(policy: str, capacity: str, geometry: Geometry, **changes: str) -> VirtualEngine:
    return VirtualEngine(
        geometry, make_setting(geometry, policy=policy, capacity=capacity, **changes)
    )


def wrap_virtual(model: Any, policy: str, capacity: str, **changes: str) -> WrappedModel:
    """Put a model behind a cache under the virtual clock; with `precision`, its experts encoded."""
    layers, ladder = find_moe_layers(model), read_config({"policy": policy, **changes}).ladder
    engine = make_engine(policy, capacity, describe(model, layers, "x", ladder), **changes)
    if ladder is None:
        return WrappedModel(model, layers, engine)
    codecs = codecs_of(ladder)
    stored = [store_experts(layer.experts, codecs) for layer in layers]
    store = LadderStore(stored, codecs, implementation_of(model), "cpu")
    return WrappedModel(model, layers, engine, store)


def store_experts(experts: Any, codecs: Sequence[Codec]) -> dict[str, Encoded]:
    """Return a module's matrices, encoded; the module is left unchanged."""
    return {name: encode(experts, m, codecs) for name, m in expert_matrices(experts).items()}


def logits_of(model: Any, wrapped: WrappedModel | None = None) -> list[torch.Tensor]:
    """Logits of a text, a left-padded batch and its three decode steps; unwraps `wrapped`."""
    generator = torch.Generator().manual_seed(1)
    single = torch.randint(2, 300, (1, 17), generator=generator)
    batch = torch.randint(2, 300, (3, 9), generator=generator)
    mask = torch.ones_like(batch)
    mask[1, :4] = 0
    batch[1, :4] = 0
    with torch.no_grad():
        logits = [model(single).logits]
        output = model(batch, attention_mask=mask, use_cache=True)
        logits.append(output.logits)
        for _ in range(3):
            step = output.logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, torch.ones_like(step)], -1)
            output = model(
                step, attention_mask=mask, past_key_values=output.past_key_values, use_cache=True
            )
            logits.append(output.logits)
    if wrapped is not None:
        wrapped.engine.check_integrity()
        wrapped.unwrap()
    return logits


def traces_left_on(model: Any) -> dict[str, Any]:
    """All that a wrapper could leave behind: hooks, attributes, settings."""
    modules = dict(model.named_modules())
    configs = [getattr(module, "config", model.config) for module in modules.values()]
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return {
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "hooks": {n: [len(getattr(m, hook)) for hook in hooks] for n, m in modules.items()},
        "implementation": model.get_experts_implementation(),
        "config": model.config.to_dict(),
        "settings": [config._experts_implementation for config in configs],
    }


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*(family_case(f, torch.bfloat16) for f in FAMILIES), ("olmoe", torch.float32)],
    ids=str,
)
def test_logits_are_identical_under_every_lossless_composition_and_capacity(
    family: str, dtype: torch.dtype
) -> None:
    model = random_model(family).to(dtype)
    expected, state = logits_of(model), traces_left_on(model)
    for policy, capacity in COMBINATIONS:
        artifacts = predictor_of(model, load_policy(policy))
        wrapped = wrap_virtual(model, policy, capacity, **artifacts)
        engine = wrapped.engine
        logits = logits_of(model, wrapped)
        same = [torch.equal(a, b) for a, b in zip(expected, logits, strict=True)]
        assert all(same), f"{policy} at {capacity}: {same}"
        # The cache was at work: it missed, and served all tokens but the four of padding.
        assert sum(p.misses for p in engine.ledger.passes) > 0
        assert [p.num_tokens for p in engine.ledger.passes] == [17, 27 - 4, 3, 3, 3]
        assert traces_left_on(model) == state


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_unwrapping_twice_is_safe_and_the_model_still_answers_alike(family: str) -> None:
    model = random_model(family)
    expected, state = logits_of(model), traces_left_on(model)
    wrapped = wrap_virtual(model, "specmd", "1")
    assert traces_left_on(model) != state
    wrapped.unwrap()
    wrapped.unwrap()
    assert traces_left_on(model) == state
    assert all(torch.equal(a, b) for a, b in zip(expected, logits_of(model), strict=True))
    model.set_experts_implementation("batched_mm")
    wrapped.unwrap()
    assert implementation_of(model) == "batched_mm", "what was set since then stays"


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_another_experts_kernel_is_kept_and_put_back(implementation: str) -> None:
    model = random_model("qwen3_moe")
    model.set_experts_implementation(implementation)
    expected, state = logits_of(model), traces_left_on(model)
    wrapped = wrap_virtual(model, "specmd", "1")
    logits = logits_of(model, wrapped)
    assert all(torch.equal(a, b) for a, b in zip(expected, logits, strict=True))
    assert traces_left_on(model) == state


@functools.cache
def hf_answers(path: str, batch_size: int, dtype: str) -> Any:
    lm = HFLM(pretrained=path, batch_size=batch_size, dtype=dtype, **LM_ARGUMENTS)
    return answers(lm)


@pytest.mark.slow
def test_outputs_of_the_shipped_model_are_identical_to_those_of_the_hf_model() -> None:
    expected = hf_answers(str(MODEL_DIR), 1, "bfloat16")
    lm: MoECacheLM | None = None
    for policy, capacity in COMBINATIONS:
        arguments = {"policy": policy, "capacity": capacity}
        if lm is None:
            lm = MoECacheLM(**LM_ARGUMENTS, batch_size=1, dtype="bfloat16", **arguments)
        else:
            lm.install(read_config(arguments))
        assert answers(lm) == expected, f"{policy} at {capacity}"
        lm.engine.check_integrity()


# Each family takes a seventh of the compositions and capacities; together they cover all.
@pytest.mark.parametrize("batch_size", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILY_CASES)
def test_answers_are_identical_to_those_of_the_hf_model(
    family: str, batch_size: int, checkpoint: Checkpoint
) -> None:
    path = str(checkpoint(family))
    dtype = "float32" if family == "mixtral" else "bfloat16"
    expected = hf_answers(path, batch_size, dtype)
    share = COMBINATIONS[(list(FAMILIES).index(family) + batch_size) % 7 :: 7]
    host = {**LM_ARGUMENTS, "batch_size": batch_size, "dtype": dtype}
    lm = MoECacheLM(pretrained=path, policy="on_demand", **host)
    for policy, capacity in share:
        artifacts = predictor_of(lm.model, load_policy(policy))
        lm.install(read_config({"policy": policy, "capacity": capacity, **artifacts}))
        wrapped_answers = answers(lm)
        lm.engine.check_integrity()
        assert wrapped_answers == expected, f"{policy} at {capacity}"
        assert lm.report()["totals"]["requests"] == 12
