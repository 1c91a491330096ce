"""No knob is dead on the shipped model: the sweep of `tests/policies`, run live on `tiny`."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lm_eval_moecache.algorithms.registry import find_algorithm
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.model.precision.ladder import codecs_of
from lm_eval_moecache.model.precision.store import LadderStore
from lm_eval_moecache.model.precision.stored import Encoded, store_experts
from lm_eval_moecache.model.store import implementation_of
from lm_eval_moecache.model.wrap import WrappedModel
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.testing.streams import policy_of
from lm_eval_moecache.tiny import MODEL_DIR
from tests.algorithms.test_parameters import CASES, moves

LADDER = ("int8", "int4", "int2")
# Offline algorithms need a trace, and tests/engine sweeps those in replays; those that need a draft
# are swept in tests/speculative.
ELSEWHERE = ("is_offline", "needs_draft")
LIVE = [c for c in CASES if not any(getattr(find_algorithm(*c[:2]), e, False) for e in ELSEWHERE)]
# Hundreds of short runs; the fast tests try the same knobs on streams (tests/algorithms).
pytestmark = pytest.mark.slow


@functools.cache
def tiny() -> Any:
    return AutoModelForCausalLM.from_pretrained(str(MODEL_DIR), dtype=torch.bfloat16).eval()


@functools.cache
def stored() -> list[dict[str, Encoded]]:
    codecs = codecs_of(LADDER)
    return [store_experts(layer.experts, codecs) for layer in find_moe_layers(tiny())]


@functools.cache
def measured(choice: str, capacity: str) -> tuple[object, ...]:
    """Read four prompts and decode after each; return every count, every time and the tokens."""
    model = tiny()
    layers = find_moe_layers(model)
    policy = policy_of(json.loads(choice))
    store, ladder = None, None
    if policy.miss.algorithm.uses_ladder:
        ladder, codecs = LADDER, codecs_of(LADDER)
        store = LadderStore(stored(), codecs, implementation_of(model), "cpu")
    geometry = describe(model, layers, "tiny", ladder)
    setting = Setting(
        policy=policy,
        capacity=parse_capacity(capacity, geometry),
        hardware=load_hardware("a100-5GBps"),
    )
    wrapped = WrappedModel(model, layers, Engine(geometry, setting), store)
    generator = torch.Generator().manual_seed(0)
    produced = []
    try:
        for _ in range(4):
            prompt = torch.randint(10, 2000, (1, 12), generator=generator)
            output = model.generate(
                prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0
            )
            produced.append(tuple(output[0].tolist()))
    finally:
        wrapped.unwrap()
    passes = tuple(dataclasses.astuple(record) for record in wrapped.engine.ledger.passes)
    return (*passes, *produced)


def figures(choice: dict[str, Any], capacity: str) -> list[object]:
    return list(measured(json.dumps(choice, sort_keys=True), capacity))


@pytest.mark.parametrize(("axis", "name", "parameter"), LIVE)
def test_a_parameter_moves_some_figure_on_tiny(axis: str, name: str, parameter: str) -> None:
    assert moves(axis, name, parameter, figures), f"{axis}.{parameter} of {name} moves nothing"
