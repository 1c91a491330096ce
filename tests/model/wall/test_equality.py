"""Lossless means identical under the wall clock, too: late transfers, waves, padding."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.wall.worker import TransferError
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.wall import store
from tests.model.wall.models import BrokenPools, LatePools, assert_same, counts, wrap_wall
from tests.models import FAMILIES, FAMILY_CASES, family_case, random_model
from tests.test_equality import (
    COMBINATIONS,
    LOSSLESS,
    logits_of,
    traces_left_on,
    wrap_virtual,
)

# A trained predictor needs an artifact of its model, which random models have none of.
TRAINED = [name for name in LOSSLESS if load_policy(name).prefetch.algorithm.artifact_kind]
PAIRS = [pair for pair in COMBINATIONS if pair[0] not in TRAINED]


# Each family takes its own third of the compositions and capacities; together they take all.
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*(family_case(f, torch.bfloat16) for f in FAMILIES), ("olmoe", torch.float32)],
    ids=str,
)
def test_logits_are_identical_whatever_the_policy_and_the_capacity(
    family: str, dtype: torch.dtype
) -> None:
    model = random_model(family).to(dtype)
    expected, before = logits_of(model), traces_left_on(model)
    share = PAIRS[list(FAMILIES).index(family) % 3 :: 3]
    for policy, capacity in share:
        wrapped = wrap_wall(model, policy, capacity, LatePools, longest_s=0.0005)
        assert_same(expected, logits_of(model, wrapped), f"{policy} at {capacity}")
        assert sum(p.misses for p in wrapped.engine.ledger.passes) > 0
        assert traces_left_on(model) == before


@pytest.mark.parametrize("capacity", ["100%", "25%", "2"])
def test_the_batched_kernel_runs_from_slots(capacity: str) -> None:
    model = random_model("olmoe")
    model.set_experts_implementation("batched_mm")
    expected = logits_of(model)
    wrapped = wrap_wall(model, "specmd", capacity, LatePools, longest_s=0.0005)
    assert_same(expected, logits_of(model, wrapped))


def test_a_whole_layer_in_slots_runs_as_one_grouped_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prefill that finds every expert resident costs what it costs transformers."""
    model = random_model("olmoe")
    prompt = torch.arange(2, 34)[None]
    with torch.no_grad():
        expected = model(prompt).logits
        wrapped = wrap_wall(model, "on_demand", "100%")
        model(prompt)
        monkeypatch.setattr(store, "GroupedCall", None)
        found = model(prompt).logits
    wrapped.unwrap()
    assert torch.equal(found, expected)


TIMELESS: list[dict[str, str]] = [
    {"capacity": "25%"},
    {"miss": "drop", "miss.h": "1"},
    {"miss": "substitute_score"},
    {"miss": "substitute_random"},
    {"routing": "cache_prior"},
    # These keep two experts of a token: they change nothing where a router chooses two.
    {"policy": "pruning"},
    {"policy": "mixture_cache"},
    {"miss": "drop"},
]


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_answers_and_counts_are_the_virtual_clocks_where_nothing_depends_on_time(
    family: str,
) -> None:
    """Dropped experts keep their index with weight 0: slots have to pass over them."""
    model = random_model(family)
    for changes in TIMELESS if family == "olmoe" else TIMELESS[:5]:
        given = {"policy": "on_demand", "capacity": "5/layer", **changes}
        policy, capacity = given.pop("policy"), given.pop("capacity")
        wrapped = wrap_virtual(model, policy, capacity, **given)
        expected, told = logits_of(model, wrapped), wrapped.engine.ledger.passes
        changed = sum(p.dropped + p.substituted + p.unfaithful for p in told)
        assert (changed > 0) == (changes != TIMELESS[0])
        for seed in range(2):
            late = {"changes": given, "seed": seed, "longest_s": 0.0001}
            wrapped = wrap_wall(model, policy, capacity, LatePools, **late)
            assert_same(expected, logits_of(model, wrapped), f"{changes}, {seed}")
            assert counts(wrapped.engine.ledger.passes) == counts(told)


@pytest.mark.parametrize("error", [OSError("I/O error"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [0, 7])
def test_a_failing_copy_ends_the_pass_with_an_error(error: BaseException, at: int) -> None:
    model = random_model("olmoe")
    wrapped = wrap_wall(model, "specmd", "25%", BrokenPools, error=error, at=at)
    with pytest.raises(TransferError, match=type(error).__name__):
        logits_of(model)
    wrapped.unwrap()
    assert not [t for t in threading.enumerate() if t is wrapped.engine.link._worker._thread]


def test_an_interrupted_pass_leaves_no_thread_and_the_model_answers_as_before() -> None:
    model = random_model("olmoe")
    expected = logits_of(model)
    wrapped = wrap_wall(model, "specmd", "25%", LatePools, longest_s=0.002)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = find_moe_layers(model)[1].experts.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits_of(model)
    handle.remove()
    assert_same(expected, logits_of(model), "the same wrapper again")
    wrapped.unwrap()
    assert_same(expected, logits_of(model), "unwrapped")
    del wrapped
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name == "moecache-link"]
