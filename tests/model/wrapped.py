"""Models behind a cache under either clock, what they answer, and movers that are late."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import core_model_loading

from lm_eval_moecache.engine.engine import Engine as VirtualEngine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.hook import WrappedModel
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.model.precision.codecs import (
    Codec,
    Encoded,
    encode,
    expert_matrices,
    plain_parameters,
)
from lm_eval_moecache.model.precision.ladder import codecs_of, parse_ladder
from lm_eval_moecache.model.store import LadderStore, implementation_of
from lm_eval_moecache.model.wall.loading import ExpertLoader, assemble
from lm_eval_moecache.model.wall.pools import RamTier
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.sizes import parse_capacity


def late(begin: Callable[..., object], longest_s: float, seed: int = 0) -> Callable[..., object]:
    """Delay each transfer at random, before its copy or after it."""
    rng = random.Random(seed)

    def begin_late(*transfer: Any) -> object:
        time.sleep(rng.random() * longest_s * rng.randint(0, 1))
        token = begin(*transfer)
        time.sleep(rng.random() * longest_s * rng.randint(0, 1))
        return token

    return begin_late


COUNTED = (
    *("requests", "misses", "late", "collisions", "token_misses", "bytes_moved", "evictions"),
    *("low_precision", "dropped", "substituted", "unfaithful", "num_tokens"),
)
HOST: dict[str, Any] = {"device": "cpu", "max_length": 48}


def counts(passes: list[PassRecord]) -> list[list[int]]:
    return [[getattr(record, name) for name in COUNTED] for record in passes]


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


def of_tokens(found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Leave out the four tokens of padding in the batch of `logits_of`: they need no experts."""
    single, batch, *steps = found
    return [single, batch[0], batch[1, 4:], batch[2], *steps]


def assert_same(
    expected: list[torch.Tensor],
    found: list[torch.Tensor],
    what: object = "",
    *,
    padding: bool = False,
) -> None:
    """Check results of `logits_of` bit for bit, those of padding only if asked for."""
    sides = (expected, found) if padding else map(of_tokens, (expected, found))
    same = [torch.equal(a, b) for a, b in zip(*sides, strict=True)]
    assert all(same), f"{what}: {same}"


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


def read_experts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the expert matrices which transformers reads from here on."""
    matrices: list[str] = []
    add = core_model_loading.WeightTransform.add_tensor

    def noted(self: Any, target: str, key: str, *given: Any) -> None:
        if "experts" in target and "shared" not in target and "bias" not in target:
            matrices.append(target)
        add(self, target, key, *given)

    monkeypatch.setattr(core_model_loading.WeightTransform, "add_tensor", noted)
    return matrices


def on_disk(path: Path, folder: Path, **changes: Any) -> MoECacheLM:
    """Load a checkpoint behind the wall clock, its experts on disk."""
    wall = {"clock": "wall", "policy": "specmd", "capacity": "25%", "store": "disk"}
    return MoECacheLM(pretrained=str(path), store_dir=str(folder), **HOST, **{**wall, **changes})


def replaced(model: Any, precision: str) -> Any:
    """Copy a model, its experts' weights encoded and decoded by a codec."""
    other = copy.deepcopy(model)
    (codec,) = codecs_of((precision,))
    for layer in find_moe_layers(other):
        for stacked in expert_matrices(layer.experts).values():
            for expert in stacked:
                matrix = expert.t() if layer.experts.is_transposed else expert
                decoded = codec.decode(codec.encode(matrix), matrix.shape, matrix.dtype)
                expert.copy_(decoded.t() if layer.experts.is_transposed else decoded)
    return other


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


def store_experts(experts: Any, codecs: Sequence[Codec]) -> Encoded:
    """Return a module's matrices, encoded; the module is left unchanged."""
    levels: Encoded = [{} for _ in codecs]
    for name, stacked in expert_matrices(experts).items():
        for level, parts in zip(levels, encode(experts, name, stacked, codecs), strict=True):
            level.update(parts)
    return levels


def loader_of(model: Any, device: str = "cpu", precision: str | None = None) -> ExpertLoader:
    """Take a model's experts out of it; all else goes to the device."""
    codecs = None if precision is None else codecs_of(parse_ladder(precision))
    loader = ExpertLoader("ram", None, model, codecs)
    loader.take_experts(model, torch.device(device))
    return loader


def wrap_wall(
    model: Any,
    policy: str,
    capacity: str,
    *,
    loader: ExpertLoader | None = None,
    throttle_bytes_per_s: float | None = None,
    longest_s: float = 0.0,
    seed: int = 0,
    **changes: str,
) -> WrappedModel:
    """Put a model behind the wall clock; with `precision`, its experts encoded.

    Without a loader the model stays on the CPU unchanged, so that it can be wrapped again.
    """
    arguments = {"policy": policy, "capacity": capacity, **changes}
    layers, ladder = find_moe_layers(model), read_config(arguments).ladder
    geometry, codecs = describe(model, layers, "wall", ladder), codecs_of(ladder or ())
    setting = make_setting(geometry, **arguments)
    setting = replace(setting, throttle_bytes_per_s=throttle_bytes_per_s)
    if loader is None:
        loader = loader_of(model)
    if codecs and not loader.codecs:
        loader.codecs = codecs
        rows = [
            [level | plain_parameters(x.experts) for level in store_experts(x.experts, codecs)]
            for x in layers
        ]
        loader.tiers = [RamTier(level) for level in zip(*rows, strict=True)]
    engine, store = assemble(model, geometry, setting, loader)
    if longest_s:
        store.pools.begin = late(store.pools.begin, longest_s, seed)  # type: ignore[method-assign]
    return WrappedModel(model, layers, engine, store)


WRAP: dict[str, Callable[..., WrappedModel]] = {
    "virtual": wrap_virtual,
    "wall": partial(wrap_wall, longest_s=0.0003),
}
"""By clock; under the wall clock with late transfers."""
