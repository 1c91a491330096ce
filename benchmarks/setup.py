"""Shared by the wall clock's benchmarks: random models of realistic size, and timed runs.

Shapes: `nano` is for tests of these scripts; `narrow` has OLMoE's layers, experts and top-k with
matrices too small to matter; `cpu` has experts of 3 MB and fits any machine; `olmoe2` and `olmoe4`
are two and four layers of OLMoE-1B-7B (0.8 GB each); `olmoe` (all layers) and `mixtral`
(Mixtral-8x7B with half its layers) are for a GPU; `OLMoE-1B-7B` also has that model's vocabulary.
Weights are random, so nothing is downloaded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from grid import setting_of

from lm_eval_moecache.algorithms.learned.buddies import PAIRS, WEIGHTED
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.setting import TOGETHER
from lm_eval_moecache.model.device import best_device, synchronize
from lm_eval_moecache.model.hook import WrappedModel
from lm_eval_moecache.model.moe_layers import MoELayer, describe, find_moe_layers, router_digest
from lm_eval_moecache.model.wall.loading import ExpertLoader, assemble
from lm_eval_moecache.records.artifact import write_artifact
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.testing.streams import artifact_folder, artifact_for

COMMON = {"shape": "cpu", "device": "auto", "policy": "on_demand", "tokens": 16}
"""Options shared by most scripts."""
FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_experts", "num_experts_per_tok", "vocab_size"),
)
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(FIELDS, sizes, strict=True))
    for name, sizes in {
        "nano": (64, 64, 3, 4, 8, 2, 4096),
        "narrow": (64, 32, 16, 4, 64, 8, 4096),
        "cpu": (512, 1024, 4, 8, 16, 4, 4096),
        "olmoe2": (2048, 1024, 2, 16, 64, 8, 4096),
        "olmoe4": (2048, 1024, 4, 16, 64, 8, 4096),
        "olmoe": (2048, 1024, 16, 16, 64, 8, 4096),
        "OLMoE-1B-7B": (2048, 1024, 16, 16, 64, 8, 50304),
        "mixtral": (4096, 14336, 16, 32, 8, 2, 4096),
    }.items()
}


def random_model(shape: str | Mapping[str, int]) -> Any:
    """Build a bf16 OLMoE-architecture model whose routing differs from token to token."""
    torch.manual_seed(0)
    fields = SHAPES[shape] if isinstance(shape, str) else shape
    config = transformers.OlmoeConfig(**{"pad_token_id": 0, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for layer in find_moe_layers(model):
        torch.nn.init.normal_(next(layer.router.parameters()), std=0.5)
    return model.eval().requires_grad_(False)


def device_of(name: str) -> torch.device:
    return torch.device(best_device() if name == "auto" else name)


def take(model: Any, device: torch.device) -> ExpertLoader:
    """Move a model's experts into a host memory tier and the rest to the device."""
    loader = ExpertLoader("ram", None, model)
    loader.take_experts(model, device)
    return loader


def described(model: Any) -> tuple[list[MoELayer], Geometry]:
    layers = find_moe_layers(model)
    return layers, describe(model, layers, "benchmark")


def drawn(policy: str, layers: list[MoELayer], geometry: Geometry) -> dict[str, str]:
    """Return the key of each artifact that a policy needs, drawn at random for this model."""
    keys, composed = {}, load_policy(policy)
    for axis in AXES:
        kind = getattr(getattr(composed, axis).algorithm, "artifact_kind", None)
        if kind is not None:
            artifact = replace(artifact_for(kind, geometry), router_digest=router_digest(layers))
            for name in (PAIRS, WEIGHTED):
                if name in artifact.arrays:
                    artifact.arrays[name][:] += 1  # every expert has been activated with others
            path = Path(artifact_folder().name) / f"{policy}-{axis}.safetensors"
            write_artifact(path, artifact)
            keys[f"{axis}.profile"] = str(path)
    return keys


def wall(
    model: Any, loader: ExpertLoader, policy: str, capacity: str, rate: float | None = None
) -> WrappedModel:
    layers, geometry = described(model)
    setting = setting_of(geometry, capacity, policy=policy, hardware="h200")
    setting = replace(setting, throttle_bytes_per_s=rate)
    return WrappedModel(model, layers, *assemble(model, geometry, setting, loader))


def virtual(
    model: Any,
    policy: str,
    capacity: str,
    hardware: Hardware | None = None,
    execute: str = TOGETHER,
) -> WrappedModel:
    layers, geometry = described(model)
    setting = setting_of(geometry, capacity, drawn(policy, layers, geometry), policy=policy)
    setting = replace(setting, hardware=hardware or setting.hardware, execute=execute)
    return WrappedModel(model, layers, Engine(geometry, setting))


def prompts(count: int, length: int, vocabulary: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (count, 1, length)
    return list(torch.randint(2, vocabulary, shape, generator=generator).to(device))


def run(model: Any, prompt: torch.Tensor, tokens: int) -> tuple[float, float]:
    """Return the seconds of a prefill and the mean seconds of the greedy decode steps after it.

    The steps run with the kernel to which `generate` switches for decoding on a device.
    """
    with torch.no_grad():
        synchronize(prompt.device)
        start = time.perf_counter()
        output = model(prompt, use_cache=True)
        token = output.logits[:, -1:].argmax(-1)
        synchronize(prompt.device)
        first = time.perf_counter()
        with model._optimize_model_for_decode():
            for _ in range(tokens):
                output = model(token, past_key_values=output.past_key_values, use_cache=True)
                token = output.logits[:, -1:].argmax(-1)
            synchronize(prompt.device)
            return first - start, (time.perf_counter() - first) / max(tokens, 1)


def spread(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"median {statistics.median(values):.3f} (lowest {low:.3f}, highest {high:.3f})"
