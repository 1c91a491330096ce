"""Models behind the wall clock, and movers that are late or break."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.wall.worker import Transfer
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.model.precision.ladder import codecs_of, parse_ladder
from lm_eval_moecache.model.precision.stored import store_experts
from lm_eval_moecache.model.store import implementation_of
from lm_eval_moecache.model.wall.assemble import prepare_host
from lm_eval_moecache.model.wall.ladder import (
    LadderPools,
    LadderSlotStore,
    shapes_of,
    stored_parameters,
)
from lm_eval_moecache.model.wall.pools import DeviceMover, SlotPools, expert_parameters
from lm_eval_moecache.model.wall.store import SlotStore
from lm_eval_moecache.model.wall.tiers import RamTier, Tier
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


def on_disk(path: Path, folder: Path, **changes: Any) -> MoECacheLM:
    """Load a checkpoint behind the wall clock, its experts on disk."""
    wall = {"clock": "wall", "policy": "specmd", "capacity": "25%", "store": "disk"}
    return MoECacheLM(pretrained=str(path), store_dir=str(folder), **HOST, **{**wall, **changes})


def wrap_wall(
    model: Any,
    policy: str,
    capacity: str,
    pools: type[SlotPools] = SlotPools,
    tier: Tier | None = None,
    throttle_bytes_per_s: float | None = None,
    changes: dict[str, str] | None = None,
    **options: Any,
) -> WrappedModel:
    """Put a model on the CPU behind the wall clock."""
    layers = find_moe_layers(model)
    geometry = describe(model, layers, "wall")
    setting = make_setting(geometry, policy=policy, capacity=capacity, **(changes or {}))
    setting = replace(setting, throttle_bytes_per_s=throttle_bytes_per_s)
    parameters = [expert_parameters(layer.experts) for layer in layers]
    tier, cpu = tier or RamTier(parameters), torch.device("cpu")
    mover = pools(parameters, geometry, setting.capacity, tier, cpu, **options)
    engine = Engine(geometry, setting, mover=mover)
    store = SlotStore(mover, geometry, str(implementation_of(model)), "cpu")
    prepare_host(engine, store, layers[0].experts, torch.device("cpu"))
    return WrappedModel(model, layers, engine, store)


def wrap_ladder(
    model: Any,
    precision: str,
    policy: str,
    capacity: str,
    changes: dict[str, str] | None = None,
    **options: Any,
) -> WrappedModel:
    """Put a model on the CPU behind the wall clock, with its experts encoded."""
    layers, codecs = find_moe_layers(model), codecs_of(parse_ladder(precision))
    geometry = describe(model, layers, "wall", parse_ladder(precision))
    stored = [store_experts(layer.experts, codecs) for layer in layers]
    tiers = [
        RamTier(
            [
                stored_parameters(layer.experts, own, level)
                for layer, own in zip(layers, stored, strict=True)
            ]
        )
        for level in range(len(codecs))
    ]
    shapes = [[shapes_of(layer.experts, codec) for codec in codecs] for layer in layers]
    mover = LateLadder(shapes, tiers, geometry.num_experts, torch.device("cpu"), **options)
    given = {"policy": policy, "capacity": capacity, "precision": precision, **(changes or {})}
    engine = Engine(geometry, make_setting(geometry, **given), mover=mover)
    store = LadderSlotStore(mover, codecs, geometry, str(implementation_of(model)), "cpu")
    prepare_host(engine, store, layers[0].experts, torch.device("cpu"))
    return WrappedModel(model, layers, engine, store)
