"""What the training of the model (version4.py) and that of its draft (draft.py) have in common.

The trainer of version 2 is in git: `git archive fb4ef76 tools/train_tiny`.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tools.train_tiny.batches import Batch
from tools.train_tiny.muon import Muon
from tools.train_tiny.record import Curve, write_folder

logger = logging.getLogger(__name__)
CHECKPOINT = "checkpoint.pt"


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


class Run:
    """A training's model, optimizers and progress; a stopped one goes on from its checkpoint."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizers: list[torch.optim.Optimizer],
        file: Path,
        step: int = 0,
    ) -> None:
        self.model, self.optimizers, self.file, self.step = model, optimizers, file, step
        self.curve, self.num_tokens, self.started = Curve(), 0, time.monotonic()

    def resume(self) -> None:
        """Go on from the checkpoint."""
        state = torch.load(self.file, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.curve.rows = [tuple(row) for row in state["curve"]]
        self.step, self.num_tokens = state["step"], state["num_tokens"]
        self.started = time.monotonic() - state["seconds"]

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "curve": [list(row) for row in self.curve.rows],
            "step": self.step,
            "num_tokens": self.num_tokens,
            "seconds": time.monotonic() - self.started,
        }
        part = self.file.with_suffix(".part")
        torch.save(state, part)
        if dist.is_initialized():
            dist.barrier()
        os.replace(part, self.file)

    def log(self) -> None:
        """Log the last 20 steps, at every 20th."""
        if self.step % 20 == 0:
            speed = self.num_tokens / (time.monotonic() - self.started)
            logger.info("%s tokens %d tokens/s %.0f", self.curve.told(20), self.num_tokens, speed)

    def finish(
        self,
        out: Path,
        tokenizer: PreTrainedTokenizerFast,
        plan: Plan,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        """Write the model's folder, with the facts and the plan in its `training.json`."""
        wall_s = round(time.monotonic() - self.started, 1)
        told = {**(facts or {}), **asdict(plan), "num_tokens": self.num_tokens, "wall_s": wall_s}
        write_folder(out / "model", self.model, tokenizer, self.curve, told)
