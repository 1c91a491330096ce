"""Decode against accelerate's offloading, with the same bytes of experts resident.

Accelerate keeps as many whole MoE layers resident as the capacity holds and loads the others when
they are called: from files (`disk`), and on a GPU from host memory (`cpu`). Ours caches experts
under the policy, from the same tier. On a CPU accelerate only maps the file: where the page cache
holds it, nothing is copied, and times say little about a device. The bytes that a step loads do: on
a GPU accelerate copies whole layers, and holds one layer more than the capacity while computing it.

    python benchmarks/vs_accelerate.py [--shape cpu|olmoe|mixtral] [--device auto] [--capacity 25%]
"""

from __future__ import annotations

import tempfile
from statistics import mean
from typing import Any

import torch
from grid import arguments
from setup import COMMON, described, device_of, prompts, random_model, run, spread, wall
from torch import nn
from transformers import AutoModelForCausalLM

from lm_eval_moecache.model.checkpoint import skeleton, weights_files
from lm_eval_moecache.model.hook import WrappedModel
from lm_eval_moecache.model.wall.loading import ExpertLoader
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.sizes import parse_capacity


def offloaded(folder: str, capacity: str, device: torch.device, tier: str) -> Any:
    """Load the checkpoint with accelerate: whole layers resident, the others in the tier."""
    bare = skeleton(folder, {})
    layers, geometry = described(bare)
    layer_bytes = geometry.total_expert_bytes // geometry.num_layers
    near = parse_capacity(capacity, geometry).total_bytes // layer_bytes
    places = device_map(bare, {layer.path for layer in layers[near:]}, str(device), tier)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=places, offload_folder=f"{folder}/offload"
    ).eval()


def device_map(model: nn.Module, far: set[str], device: str, tier: str) -> dict[str, str]:
    """Map every part of a model to a place: the tier for the modules `far`, the device for others.

    Accelerate puts everything under a name in one place, so parents of `far` modules are split up.
    """

    def is_split(name: str) -> bool:
        return any(path.startswith(f"{name}." if name else "") and path != name for path in far)

    places: dict[str, str] = {}
    for name, module in model.named_modules():
        if is_split(name):
            tensors = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
            places.update({f"{name}.{tensor}".lstrip("."): device for tensor, _ in tensors})
        elif not name or is_split(name.rpartition(".")[0]):
            places[name] = tier if name in far else device
    return places


def ours(folder: str, policy: str, capacity: str, device: torch.device, store: str) -> WrappedModel:
    files = weights_files(folder, {})
    loader = ExpertLoader(store, f"{folder}/store", skeleton(folder, {}), files=files)
    with loader.loading():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, **loader.arguments
        ).eval()
        loader.take_experts(model, device)
    return wall(model, loader, policy, capacity)


def main() -> None:
    defaults = {"policy": "specmd", "capacity": "25%", "prompt": 32, "rounds": 7}
    options = arguments(__doc__, **COMMON | defaults)
    device = device_of(options.device)
    with tempfile.TemporaryDirectory() as folder:
        random_model(options.shape).save_pretrained(folder)
        for tier in ("cpu", "disk") if device.type != "cpu" else ("disk",):
            model = offloaded(folder, options.capacity, device, tier)
            store = "ram" if tier == "cpu" else "disk"
            wrapped = ours(folder, options.policy, options.capacity, device, store)
            texts = prompts(options.rounds + 1, options.prompt, model.config.vocab_size, device)
            pairs = [
                (run(model, text, options.tokens), run(wrapped.model, text, options.tokens))
                for text in texts
            ][1:]
            wrapped.unwrap()
            print(f"{options.shape} on {device}, {options.policy} at {options.capacity}, {tier}")
            print(f"accelerate: {spread([1e3 * a[1] for a, _ in pairs])} ms a token")
            print(f"moecache:   {spread([1e3 * m[1] for _, m in pairs])} ms a token")
            geometry = wrapped.engine.geometry
            num_far = sum(place == tier for place in model.hf_device_map.values())
            far_bytes = num_far * geometry.total_expert_bytes // geometry.num_layers
            # The first text warmed the cache.
            warm = wrapped.engine.ledger.passes[1 + options.tokens :]
            moved = mean(record.bytes_moved for record in warm if record.phase != PREFILL)
            print(
                f"bytes brought near a step: {far_bytes / 1e6:.1f} MB in whole layers, "
                f"{moved / 1e6:.1f} MB by moecache: {far_bytes / moved:.2f} times fewer"
            )
            for phase, i in (("prefill", 0), ("decode", 1)):
                ratios = spread([a[i] / m[i] for a, m in pairs])
                print(f"speed of moecache / accelerate, {phase}: {ratios}")
            # Freed now: the next tier's models are as large.
            del model, wrapped


if __name__ == "__main__":
    main()
