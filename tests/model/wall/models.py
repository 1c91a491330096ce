"""Models behind the wall clock, and movers that are late or break."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import core_model_loading

from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.model.precision.codecs import Codec, Encoded, encode, expert_matrices
from lm_eval_moecache.model.precision.ladder import codecs_of
from lm_eval_moecache.model.wall.loading import assemble
from lm_eval_moecache.model.wall.pools import RamTier, expert_parameters, stored_parameters
from lm_eval_moecache.model.wrap import WrappedModel
from lm_eval_moecache.records.ledger import PassRecord
from tests.test_equality import make_setting


def late(begin: Callable[..., object], longest_s: float, seed: int = 0) -> Callable[..., object]:
    """Delay each transfer at random, before its copy or after it."""
    drawn = random.Random(seed)

    def begin_late(*transfer: Any) -> object:
        time.sleep(drawn.random() * longest_s * drawn.randint(0, 1))
        token = begin(*transfer)
        time.sleep(drawn.random() * longest_s * drawn.randint(0, 1))
        return token

    return begin_late


COUNTED = (
    *("requests", "misses", "late", "collisions", "token_misses", "bytes_moved", "evictions"),
    *("low_precision", "dropped", "substituted", "unfaithful", "num_tokens"),
)
HOST: dict[str, Any] = {"device": "cpu", "max_length": 48, "batch_size": 2}


def counts(passes: list[PassRecord]) -> list[list[int]]:
    return [[getattr(record, name) for name in COUNTED] for record in passes]


def of_tokens(found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Leave out the four tokens of padding in the batch of `logits_of`: they need no experts."""
    single, batch, *steps = found
    return [single, batch[0], batch[1, 4:], batch[2], *steps]


def assert_same(expected: list[torch.Tensor], found: list[torch.Tensor], what: str = "") -> None:
    pairs = zip(of_tokens(expected), of_tokens(found), strict=True)
    same = [torch.equal(a, b) for a, b in pairs]
    assert all(same), f"{what}: {same}"


def read_experts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the experts' matrices that transformers reads from here on."""
    found: list[str] = []
    add = core_model_loading.WeightTransform.add_tensor

    def noted(self: Any, target: str, key: str, *given: Any) -> None:
        if "experts" in target and "shared" not in target and "bias" not in target:
            found.append(target)
        add(self, target, key, *given)

    monkeypatch.setattr(core_model_loading.WeightTransform, "add_tensor", noted)
    return found


def on_disk(path: Path, folder: Path, **changes: Any) -> MoECacheLM:
    """Load a checkpoint behind the wall clock, its experts on disk."""
    wall = {"clock": "wall", "policy": "specmd", "capacity": "25%", "store": "disk"}
    return MoECacheLM(pretrained=str(path), store_dir=str(folder), **HOST, **{**wall, **changes})


def store_experts(experts: Any, codecs: Sequence[Codec]) -> dict[str, Encoded]:
    """Return a module's matrices, encoded; the module stays as it is."""
    return {name: encode(experts, m, codecs) for name, m in expert_matrices(experts).items()}


def replaced(model: Any, precision: str) -> Any:
    """Copy a model and put into its experts what the codec makes of them."""
    other = copy.deepcopy(model)
    (codec,) = codecs_of((precision,))
    for layer in find_moe_layers(other):
        for stacked in expert_matrices(layer.experts).values():
            for expert in stacked:
                matrix = expert.t() if layer.experts.is_transposed else expert
                decoded = codec.decode(codec.encode(matrix), matrix.shape, matrix.dtype)
                expert.copy_(decoded.t() if layer.experts.is_transposed else decoded)
    return other


def wrap_wall(
    model: Any,
    policy: str,
    capacity: str,
    *,
    throttle_bytes_per_s: float | None = None,
    changes: dict[str, str] | None = None,
    longest_s: float = 0.0,
    seed: int = 0,
) -> WrappedModel:
    """Put a model on the CPU behind the wall clock; with `precision`, its experts encoded."""
    given = {"policy": policy, "capacity": capacity, **(changes or {})}
    layers, ladder = find_moe_layers(model), read_config(given).ladder
    geometry, codecs = describe(model, layers, "wall", ladder), codecs_of(ladder or ())
    setting = make_setting(geometry, **given)
    setting = replace(setting, throttle_bytes_per_s=throttle_bytes_per_s)
    parameters = [expert_parameters(layer.experts) for layer in layers]
    tiers = [RamTier(parameters)]
    if codecs:
        stored = [(x.experts, store_experts(x.experts, codecs)) for x in layers]
        tiers = [
            RamTier([stored_parameters(experts, own, level) for experts, own in stored])
            for level in range(len(codecs))
        ]
    loader: Any = SimpleNamespace(codecs=codecs, parameters=parameters, tiers=tiers)
    engine, store = assemble(model, geometry, setting, loader)
    store.pools.begin = late(store.pools.begin, longest_s, seed)  # type: ignore[method-assign]
    return WrappedModel(model, layers, engine, store)
