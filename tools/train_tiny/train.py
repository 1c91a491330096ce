"""Trained version 2 of `tiny` from scratch; version4.py and draft.py use its parts.

`python -m tools.train_tiny.train --out DIR` writes `DIR/model`, which AutoModelForCausalLM and
AutoTokenizer load. A dense stage comes first; its MLP is then copied into the experts (upcycle.py).
A stopped run (`touch DIR/stop`) resumes from its last checkpoint and ends with the same weights.
The learning rate is constant after the warm-up of each stage and falls linearly at the end, so the
number of steps can be chosen while the run is under way.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from tools.train_tiny.batches import LAST, LATE, Batch, step_batches
from tools.train_tiny.muon import Muon
from tools.train_tiny.network import balance_loss, build_config, build_model, sharpness
from tools.train_tiny.record import Curve, write_folder
from tools.train_tiny.text import Text
from tools.train_tiny.tokenizer import END, train_tokenizer
from tools.train_tiny.upcycle import upcycle

logger = logging.getLogger(__name__)
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything besides the code that determines the weights."""

    seed: int = 0
    dense_steps: int = 1000
    steps: int = 3000
    rate: float = 4e-3
    adam_rate: float = 3e-3
    warmup: int = 60
    decay_steps: int = 500
    weight_decay: float = 0.05
    early_balance_weight: float = 0.003
    early_balance_steps: int = 200
    balance_weight: float = 0.01
    late_balance_weight: float = 0.03
    late_pull: float = 1e-3
    last_pull: float = 2e-3
    sharpness_weight: float = 0.3
    skill_weight: float = 0.6
    clip: float = 1.0

    def balance_at(self, step: int) -> float:
        """Weight of the balance loss: low while the experts find their topics."""
        if step >= LATE:
            return self.late_balance_weight
        early = step - self.dense_steps < self.early_balance_steps
        return self.early_balance_weight if early else self.balance_weight

    def pull_at(self, step: int) -> float:
        """Pull of the experts towards their mean; from LAST on it does not fall with the rate."""
        return self.last_pull if step >= LAST else self.late_pull * self.rate_at(step)

    def rate_at(self, step: int) -> float:
        """Share of the full learning rate: rises at the start of each stage, falls at the end."""
        since = step - self.dense_steps if step >= self.dense_steps else step
        return min(1.0, (since + 1) / self.warmup, (self.steps - step) / self.decay_steps)


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


@torch.no_grad()
def pull_together(model: PreTrainedModel, share: float) -> None:
    """Move the experts of a layer towards their mean, or they drift apart for good.

    Weight decay towards their mean instead of 0.
    """
    for name, weight in model.named_parameters():
        if "experts" in name:
            weight.lerp_(weight.mean(0, keepdim=True).expand_as(weight), share)


class Training:
    """A run: model, optimizers and progress. `about` goes into its training.json."""

    about: ClassVar[dict[str, str]] = {"draft": "../draft"}

    def __init__(self, plan: Plan, out: Path, cache: Path) -> None:
        self.plan, self.out = plan, out
        self.tokenizer = self._tokenizer(cache)
        self.text = Text(self.tokenizer, cache, out / "text")
        pad_id, end_id = self.tokenizer.convert_tokens_to_ids([self.tokenizer.pad_token, END])
        torch.manual_seed(plan.seed)
        self._use(self.first_model(pad_id, end_id))
        self.curve, self.step, self.num_tokens, self.seconds = Curve(), 0, 0, 0.0
        if (out / CHECKPOINT).exists():
            self._load(torch.load(out / CHECKPOINT, weights_only=True))
        self.started = time.monotonic() - self.seconds

    def _tokenizer(self, cache: Path) -> PreTrainedTokenizerFast:
        folder = self.out / "tokenizer"
        if not folder.exists():
            train_tokenizer(self.plan.seed, cache).save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)

    def first_model(self, pad_id: int, end_id: int) -> PreTrainedModel:
        return build_model(build_config(num_experts=1, top_k=1, pad_id=pad_id, end_id=end_id))

    def _use(self, model: PreTrainedModel) -> None:
        self.model = model
        self.optimizers = optimizers_of(model, self.plan)

    def _load(self, state: dict[str, object]) -> None:
        self.step, self.num_tokens = int(state["step"]), int(state["num_tokens"])
        self.seconds = float(state["seconds"])
        if self.step > self.plan.dense_steps:
            self._use(upcycle(self.model, self.plan.seed))
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.curve.rows = [tuple(row) for row in state["curve"]]

    def before_step(self) -> None:
        """Upcycle the dense model into experts when its stage is over."""
        if self.step == self.plan.dense_steps:
            self._use(upcycle(self.model, self.plan.seed))

    def advance(self) -> None:
        plan = self.plan
        self.before_step()
        share = plan.rate_at(self.step)
        for optimizer, full in zip(self.optimizers, (plan.rate, plan.adam_rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full * share
        batches = step_batches(self.tokenizer, self.text, seed=plan.seed, step=self.step)
        losses = self._update(batches)
        self.num_tokens += sum(batch.ids_BS.numel() for batch in batches)
        self.curve.add(self.step, *losses, share)
        self.step += 1

    def _update(self, batches: tuple[Batch, Batch]) -> tuple[float, float, float]:
        """Take one optimizer step; return the losses of English, skills and balance."""
        (text, text_logits), (skills, skill_logits) = (
            micro_loss(self.model, batch) for batch in batches
        )
        loss, balance = text + self.plan.skill_weight * skills, torch.tensor(1.0)
        if self.step >= self.plan.dense_steps:
            balance, sharp = self._routing_losses(text_logits, skill_logits)
            loss = loss + self.plan.balance_at(self.step) * balance + sharp
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self.step >= LATE:
            pull_together(self.model, self.plan.pull_at(self.step))
        return text.item(), skills.item(), balance.item()

    def _routing_losses(
        self, text: tuple[Tensor, ...], skills: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return the balance over the batch, from LAST on by English and problems, and sharpness.

        Balanced together, the experts split between the two, and one text uses few of them.
        """
        top_k = int(self.model.config.num_experts_per_tok)
        if self.step < LAST:
            all_logits = [torch.cat(pair) for pair in zip(text, skills, strict=True)]
            return balance_loss(all_logits, top_k), torch.tensor(0.0)
        parts = (list(text), list(skills))
        balance = torch.stack([balance_loss(part, top_k) for part in parts]).mean()
        sharp = torch.stack([sharpness(part, top_k) for part in parts]).mean()
        return balance, self.plan.sharpness_weight * sharp

    def state(self) -> dict[str, object]:
        """State from which a stopped run resumes."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "curve": [list(row) for row in self.curve.rows],
            "step": self.step,
            "num_tokens": self.num_tokens,
            "seconds": time.monotonic() - self.started,
        }

    def save(self) -> None:
        part = (self.out / CHECKPOINT).with_suffix(".part")
        torch.save(self.state(), part)
        os.replace(part, self.out / CHECKPOINT)

    def finish(self) -> None:
        facts = (
            self.about
            | asdict(self.plan)
            | {
                "num_tokens": self.num_tokens,
                "wall_s": round(time.monotonic() - self.started, 1),
            }
        )
        write_folder(self.out / "model", self.model, self.tokenizer, self.curve, facts)


def run(training: Training, save_every: int) -> None:
    """Train to the end of the plan, or until the file `stop` appears."""
    plan, out = training.plan, training.out
    while training.step < plan.steps:
        training.advance()
        if training.step % 20 == 0:
            speed = training.num_tokens / (time.monotonic() - training.started)
            logger.info("%s tokens/s %.0f", training.curve.told(20), speed)
        if training.step % save_every == 0 or training.step == plan.dense_steps:
            training.save()
        if (out / "stop").exists():
            training.save()
            (out / "stop").unlink()
            return
    training.save()
    training.finish()


def start(kind: type[Training], preset: Plan, description: str | None) -> None:
    """Read the command line, with defaults from `preset`, and run."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
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
    run(kind(type(preset)(**values), out, cache), save_every)


if __name__ == "__main__":
    start(Training, Plan(), __doc__)
