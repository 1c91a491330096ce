"""What the training of the model (version4.py) and that of its draft (draft.py) have in common.

The trainer of version 2 is in git: `git archive fb4ef76 tools/train_tiny`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tools.train_tiny.batches import Batch
from tools.train_tiny.muon import Muon


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything besides the code that determines the weights."""

    seed: int = 0
    steps: int = 5000
    rate: float = 4e-3
    adam_rate: float = 3e-3
    warmup: int = 60
    decay_steps: int = 600
    weight_decay: float = 0.05
    skill_weight: float = 0.6
    clip: float = 1.0

    def rate_at(self, step: int) -> float:
        """Share of the full learning rates."""
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / self.decay_steps)


AnyPlan = TypeVar("AnyPlan", bound=Plan)


def read_command(preset: AnyPlan, description: str | None) -> tuple[AnyPlan, Path, Path, int]:
    """Read the command line, with defaults from `preset`: the plan, out, cache and save-every."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("output/corpus"))
    parser.add_argument("--save-every", type=int, default=100)
    for item in fields(preset):
        value = getattr(preset, item.name)
        parser.add_argument(f"--{item.name.replace('_', '-')}", type=type(value), default=value)
    values = vars(parser.parse_args())
    out, cache, save_every = (values.pop(name) for name in ("out", "cache", "save_every"))
    out.mkdir(parents=True, exist_ok=True)
    return type(preset)(**values), out, cache, save_every


def micro_loss(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the weighted mean token loss and the unpadded tokens' router logits, if any."""
    flags = {"output_router_logits": True} if hasattr(model.config, "num_experts") else {}
    out = model.model(input_ids=batch.ids_BS, attention_mask=batch.mask, use_cache=False, **flags)
    scored_BS = batch.weights_BS[:, 1:] > 0
    logits = model.lm_head(out.last_hidden_state[:, :-1][scored_BS])
    losses = torch.nn.functional.cross_entropy(
        logits, batch.ids_BS[:, 1:][scored_BS], reduction="none"
    )
    weights = batch.weights_BS[:, 1:][scored_BS]
    router_logits = out.router_logits if flags else ()
    if batch.document_BS is not None:
        real_T = (batch.document_BS >= 0).reshape(-1)
        router_logits = tuple(logits_TE[real_T] for logits_TE in router_logits)
    return (losses * weights).sum() / weights.sum(), router_logits


def optimizers_of(model: PreTrainedModel, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, routers and norms."""
    stacks = list[torch.nn.Parameter]()
    matrices = list[torch.nn.Parameter]()
    vectors = list[torch.nn.Parameter]()
    for name, weight in model.named_parameters():
        is_stacked = "experts" in name or "_proj" in name
        (vectors if weight.dim() == 1 else stacks if is_stacked else matrices).append(weight)
    groups: list[dict[str, object]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]
    decay = plan.weight_decay
    adam = torch.optim.AdamW(groups, lr=plan.adam_rate, betas=(0.9, 0.98), weight_decay=decay)
    muon = Muon(stacks, lr=plan.rate, weight_decay=decay)
    return [muon, adam]


def update(
    parameters: Iterable[Tensor],
    optimizers: list[torch.optim.Optimizer],
    plan: Plan,
    step: int,
) -> float:
    """Clip the gradients and take a step; return the share of the full learning rates."""
    share = plan.rate_at(step)
    torch.nn.utils.clip_grad_norm_(parameters, plan.clip)
    for optimizer, full in zip(optimizers, (plan.rate, plan.adam_rate), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = full * share
        optimizer.step()
        optimizer.zero_grad()
    return share
