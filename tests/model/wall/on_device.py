"""Models on a device behind the wall clock, whatever device that is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from lm_eval_moecache.model.hook import WrappedModel
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.wall.pools import DiskTier, tensors_in
from tests.model.wall.races import Judge, Recording
from tests.model.wrapped import loader_of, wrap_wall
from tests.models import random_model, sizes_of

SIZES = sizes_of("olmoe")


def logits(
    model: Any, decode_kernel: str | None = None, tokens: int = 48, rows: int = 1
) -> list[torch.Tensor]:
    """A prefill and three decode steps, for which generation changes to another kernel."""
    prompt = torch.arange(2, 2 + tokens)[None] + torch.arange(rows)[:, None]
    prompt = prompt.to(model.device)
    with torch.no_grad():
        output = model(prompt, use_cache=True)
        logits_by_pass = [output.logits]
        if decode_kernel is not None and model.device.type != "cpu":
            model.set_experts_implementation(decode_kernel)
        for _ in range(3):
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
            logits_by_pass.append(output.logits)
    return logits_by_pass


def plain_logits(
    device: str, tokens: int = 48, sizes: Mapping[str, int] = SIZES, kernel: str = "grouped_mm"
) -> list[torch.Tensor]:
    """Return what transformers alone computes on the device."""
    model = random_model("olmoe", **sizes).to(device)
    model.set_experts_implementation(kernel)
    return logits(model, "batched_mm", tokens)


def wrap(model: Any, device: str, policy: str, capacity: str, **changes: str) -> WrappedModel:
    """Bring a model on the CPU to the device, its experts behind the cache."""
    loader = loader_of(model, device, changes.get("precision"))
    return wrap_wall(model, policy, capacity, loader=loader, **changes)


def wrap_files(model: Any, device: str, folder: Path, policy: str, capacity: str) -> WrappedModel:
    """As `wrap`, without memory that a device could copy from: experts are read from files."""
    rows = []
    for index, layer in enumerate(find_moe_layers(model)):
        file = folder / f"{index}.safetensors"
        tensors = dict(layer.experts.named_parameters())
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, file)
        rows.append({name: stored.by_expert for name, stored in tensors_in(file).items()})
    loader = loader_of(model, device)
    loader.tiers = [DiskTier(rows)]
    return wrap_wall(model, policy, capacity, loader=loader)


def assert_plain(
    device: str,
    policy: str,
    capacity: str,
    repetitions: int,
    tokens: int = 48,
    *,
    kernel: str = "grouped_mm",
    sizes: Mapping[str, int] = SIZES,
    **changes: str,
) -> None:
    """Check that a model behind the cache answers as transformers alone does on the device."""
    expected, model = plain_logits(device, tokens, sizes, kernel), random_model("olmoe", **sizes)
    model.set_experts_implementation(kernel)
    wrapped = wrap(model, device, policy, capacity, **changes)
    assert_exact(wrapped, expected, repetitions, tokens)


def assert_exact(
    wrapped: WrappedModel, expected: list[torch.Tensor], repetitions: int, tokens: int = 48
) -> None:
    for repetition in range(repetitions):
        outputs = logits(wrapped.model, tokens=tokens)
        same = [torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)]
        assert all(same), f"repetition {repetition}: {same}"
        wrapped.engine.check_integrity()
    wrapped.unwrap()


def assert_levels_exact(
    device: str, precision: str, capacity: str, repetitions: int, tokens: int = 48, **changes: str
) -> None:
    """Run a ladder, judged by a plain model with the same experts at the same levels."""
    model = random_model("olmoe", **SIZES)
    # One kernel for all passes, since plans of mixed levels are judged pass by pass.
    model.set_experts_implementation("batched_mm")
    judge, changes = Judge(model), {"miss": "fetch_priority", "precision": precision, **changes}
    wrapped = wrap(model, device, "on_demand", capacity, **changes)
    levels = set()
    for _ in range(repetitions):
        levels |= judged(judge, wrapped, precision, tokens)
    assert levels == set(range(precision.count(":") + 1)), "some level was never executed"
    wrapped.unwrap()


def judged(judge: Judge, wrapped: WrappedModel, precision: str, tokens: int = 48) -> set[int]:
    """Have a judge recompute some passes; return the levels that were executed."""
    model: Any = wrapped.model
    lm: Any = SimpleNamespace(model=model, engine=wrapped.engine, wrapped=wrapped)
    recording = Recording(lm)
    logits(model, tokens=tokens)
    recording.close()
    recomputed = judge.logits(recording.passes, precision, lossless=False, device=str(model.device))
    for record, expected in zip(recording.passes, recomputed, strict=True):
        assert record.logits is not None
        assert torch.equal(record.logits, expected), "levels: not equal"
    wrapped.engine.check_integrity()
    plans = [plan for record in recording.passes for plan in record.levels if plan]
    return {level for plan in plans for level in plan.values()}
