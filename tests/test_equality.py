"""Lossless means identical: a wrapped model's answers and logits are the unwrapped model's."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import DynamicCache

from lm_eval_moecache.algorithms.policy import check_cache_form, load_policy, policy_names
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.moe_layers import cache_of, find_moe_layers
from lm_eval_moecache.model.store import implementation_of
from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.records.sizes import is_per_layer
from lm_eval_moecache.tiny import MODEL_DIR
from tests.artifacts import predictor_of
from tests.conftest import Checkpoint
from tests.harness import answers
from tests.model.wrapped import WRAP, assert_same, logits_of, traces_left_on, wrap_virtual
from tests.models import FAMILIES, FAMILY_CASES, family_case, random_model

# Compositions that need a draft are compared in tests/model/speculative.
LOSSLESS = [
    name
    for name in policy_names()
    if load_policy(name).is_lossless and not load_policy(name).prefetch.algorithm.needs_draft
]
CAPACITIES = ("100%", "25%", "1experts", "2/layer")


assert {"on_demand", "mixtral_offloading", "specmd"} <= set(LOSSLESS)


def goes_together(policy: str, capacity: str) -> bool:
    """Cross-layer evictions refuse per-layer caches, and those need an expert for each layer."""
    composition = load_policy(policy)
    try:
        check_cache_form(composition, is_per_layer(capacity))
    except ValueError:
        return False
    return not (composition.per_layer and capacity == "1experts")


COMBINATIONS = [pair for pair in product(LOSSLESS, CAPACITIES) if goes_together(*pair)]
LM_ARGUMENTS: dict[str, Any] = {"device": "cpu", "max_length": 48}


@pytest.mark.parametrize("clock", ["virtual", "wall"])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*(family_case(f, torch.bfloat16) for f in FAMILIES), ("olmoe", torch.float32)],
    ids=str,
)
def test_logits_are_identical_under_every_lossless_composition_and_capacity(
    family: str, dtype: torch.dtype, clock: str
) -> None:
    model = random_model(family).to(dtype)
    expected, state = logits_of(model), traces_left_on(model)
    # Real transfers take long: each family takes a third of the pairs; together they cover all.
    share = COMBINATIONS[list(FAMILIES).index(family) % 3 :: 3]
    for policy, capacity in share if clock == "wall" else COMBINATIONS:
        artifacts = predictor_of(model, load_policy(policy))
        wrapped = WRAP[clock](model, policy, capacity, **artifacts)
        logits, what = logits_of(model, wrapped), f"{policy} at {capacity}"
        assert_same(expected, logits, what, padding=clock == "virtual")
        # The cache was at work: it missed, and served all tokens but the four of padding.
        passes = wrapped.engine.ledger.passes
        assert sum(p.misses for p in passes) > 0
        assert [p.num_tokens for p in passes] == [17, 27 - 4, 3, 3, 3]
        assert traces_left_on(model) == state


def test_experts_of_older_transformers_are_found_and_answer_alike() -> None:
    """Releases before 5.23 give experts neither a post norm nor a flag of expert parallelism."""
    model = random_model("olmoe")
    expected = logits_of(model)
    for layer in find_moe_layers(model):
        for name in ("_is_expert_parallel", "has_post_expert_norm"):
            vars(layer.experts).pop(name, None)
    wrapped = WRAP["wall"](model, "on_demand", "25%")
    assert_same(expected, logits_of(model, wrapped))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_step_is_a_decode_step_by_either_name_of_the_cache(name: str) -> None:
    """Transformers 5.24 hands it over as `cache`."""
    past = DynamicCache()
    past.update(torch.ones(1, 1, 5, 8), torch.ones(1, 1, 5, 8), 0)
    assert cache_of({name: past}) is past
    model = random_model("olmoe")
    wrapped = wrap_virtual(model, "on_demand", "25%")
    wrapped._begin_pass(model, (), {"input_ids": torch.ones(1, 1, dtype=torch.long), name: past})
    assert wrapped._pass is not None and wrapped._pass._begun.phase == DECODE
    wrapped.unwrap()


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_unwrapping_twice_is_safe_and_the_model_still_answers_alike(family: str) -> None:
    model = random_model(family)
    expected, state = logits_of(model), traces_left_on(model)
    wrapped = wrap_virtual(model, "specmd", "1experts")
    assert traces_left_on(model) != state
    wrapped.unwrap()
    wrapped.unwrap()
    assert traces_left_on(model) == state
    assert_same(expected, logits_of(model), padding=True)
    model.set_experts_implementation("batched_mm")
    wrapped.unwrap()
    assert implementation_of(model) == "batched_mm", "what was set since then stays"


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_another_experts_kernel_is_kept_and_put_back(implementation: str) -> None:
    model = random_model("qwen3_moe")
    model.set_experts_implementation(implementation)
    expected, state = logits_of(model), traces_left_on(model)
    wrapped = wrap_virtual(model, "specmd", "1experts")
    assert_same(expected, logits_of(model, wrapped), padding=True)
    assert traces_left_on(model) == state


# Each family takes a seventh of the compositions and capacities, the shipped model all.
@pytest.mark.parametrize("family", [*FAMILY_CASES, pytest.param("tiny", marks=pytest.mark.slow)])
def test_answers_are_identical_to_those_of_the_hf_model(
    family: str, checkpoint: Checkpoint
) -> None:
    if family == "tiny":
        path, share = str(MODEL_DIR), COMBINATIONS
    else:
        path = str(checkpoint(family))
        share = COMBINATIONS[(list(FAMILIES).index(family) + 1) % 7 :: 7]
    dtype = "float32" if family == "mixtral" else "bfloat16"
    host: dict[str, Any] = {**LM_ARGUMENTS, "dtype": dtype}
    expected = answers(HFLM(pretrained=path, **host))
    lm = MoECacheLM(pretrained=path, policy="on_demand", **host)
    for policy, capacity in share:
        artifacts = predictor_of(lm.model, load_policy(policy))
        lm.install(read_config({"policy": policy, "capacity": capacity, **artifacts}))
        wrapped_answers = answers(lm)
        lm.engine.check_integrity()
        assert wrapped_answers == expected, f"{policy} at {capacity}"
        assert lm.report()["totals"]["requests"] == 12
