"""Models behind the wall clock, and movers that are late or break."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import core_model_loading

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.wall.link import Transfer
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.model.precision.codecs import Codec, Encoded, encode, expert_matrices
from lm_eval_moecache.model.precision.ladder import codecs_of
from lm_eval_moecache.model.store import implementation_of
from lm_eval_moecache.model.wall.loading import prepare_host
from lm_eval_moecache.model.wall.pools import (
    DeviceMover,
    LadderPools,
    RamTier,
    SlotPools,
    expert_parameters,
    stored_parameters,
)
from lm_eval_moecache.model.wall.store import SlotStore
from lm_eval_moecache.model.wrap import WrappedModel
from lm_eval_moecache.records.ledger import PassRecord
from tests.test_equality import make_setting


class Late(DeviceMover):
    """Takes a random time for each transfer, before the copy or after it."""

    def __init__(self, *args: Any, seed: int = 0, longest_s: float = 0.002) -> None:
        super().__init__(*args)
        self._random, self._longest_s = random.Random(seed), longest_s

    def begin(self, transfer: Transfer) -> object:
        time.sleep(self._random.random() * self._longest_s * self._random.randint(0, 1))
        token = super().begin(transfer)
        time.sleep(self._random.random() * self._longest_s * self._random.randint(0, 1))
        return token


class BrokenPools(SlotPools):
    """Raises at one transfer."""

    def __init__(self, *args: Any, error: BaseException, at: int) -> None:
        super().__init__(*args)
        self._error, self._at = error, at

    def begin(self, transfer: Transfer) -> object:
        self._at -= 1
        if self._at < 0:
            raise self._error
        return super().begin(transfer)


class LatePools(Late, SlotPools):
    """Late copies of experts as they are."""


class LateLadder(Late, LadderPools):
    """Late copies of encoded experts."""


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


def wrap_wall(
    model: Any,
    policy: str,
    capacity: str,
    pools: type[SlotPools] = SlotPools,
    *,
    throttle_bytes_per_s: float | None = None,
    changes: dict[str, str] | None = None,
    **options: Any,
) -> WrappedModel:
    """Put a model on the CPU behind the wall clock; with `precision`, its experts encoded."""
    given = {"policy": policy, "capacity": capacity, **(changes or {})}
    layers, cpu, ladder = find_moe_layers(model), torch.device("cpu"), read_config(given).ladder
    geometry, codecs = describe(model, layers, "wall", ladder), codecs_of(ladder or ())
    setting = make_setting(geometry, **given)
    setting = replace(setting, throttle_bytes_per_s=throttle_bytes_per_s)
    mover: SlotPools | LadderPools
    if codecs:
        stored = [(x.experts, store_experts(x.experts, codecs)) for x in layers]
        tiers = [
            RamTier([stored_parameters(experts, own, level) for experts, own in stored])
            for level in range(len(codecs))
        ]
        mover = LateLadder([x.experts for x in layers], codecs, tiers, cpu, **options)
    else:
        parameters = [expert_parameters(layer.experts) for layer in layers]
        tier = RamTier(parameters)
        mover = pools(parameters, geometry, setting.capacity, tier, cpu, **options)
    engine = Engine(geometry, setting, mover=mover)
    store = SlotStore(mover, geometry, str(implementation_of(model)), "cpu")
    prepare_host(engine, store, layers[0].experts, cpu)
    return WrappedModel(model, layers, engine, store)
