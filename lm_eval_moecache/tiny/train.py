"""Trains `tiny` from nothing: tokenizer, model, and the record of how.

`python -m lm_eval_moecache.tiny.train --out DIR --seed 0` writes a folder that AutoModelForCausalLM
and AutoTokenizer load. A run that was stopped goes on from its last checkpoint and ends with the
same weights. The rate is constant after warm-up and falls linearly over the last fifth.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn
from tqdm import tqdm
from transformers import OlmoeForCausalLM, PreTrainedTokenizerFast

from lm_eval_moecache.tiny import record
from lm_eval_moecache.tiny.batches import Batch, step_batches
from lm_eval_moecache.tiny.evaluate import accuracies
from lm_eval_moecache.tiny.exchange import all_sum
from lm_eval_moecache.tiny.muon import Muon
from lm_eval_moecache.tiny.network import MAX_LENGTH, balance_loss, build_config, build_model
from lm_eval_moecache.tiny.tokenizer import END, train_tokenizer

logger = logging.getLogger(__name__)
CHECKPOINT = "checkpoint.pt"
STORE = "workers.store"
NUM_CHECKED = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What decides the weights, besides the code."""

    seed: int = 0
    steps: int = 2500
    num_tokens: int = 4096
    workers: int = 2
    rate: float = 3e-3
    warmup: int = 100
    decay_share: float = 0.2
    weight_decay: float = 0.05
    balance_weight: float = 0.01
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.num_tokens < 1:
            raise ValueError(f"steps and num_tokens must be at least 1, got {self}")

    def rate_at(self, step: int) -> float:
        left = (self.steps - step) / max(1.0, self.decay_share * self.steps)
        return self.rate * min(1.0, (step + 1) / self.warmup, left)


def micro_loss(model: OlmoeForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Weighted sum of token losses and the balance loss of one micro-batch."""
    out = model.model(input_ids=batch.ids_BS, use_cache=False, output_router_logits=True)
    scored_BS = batch.weights_BS[:, 1:] > 0
    logits = model.lm_head(out.last_hidden_state[:, :-1][scored_BS])
    losses = torch.nn.functional.cross_entropy(
        logits, batch.ids_BS[:, 1:][scored_BS], reduction="none"
    )
    answer = (losses * batch.weights_BS[:, 1:][scored_BS]).sum()
    top_k = int(model.config.num_experts_per_tok)
    return answer, balance_loss(out.router_logits, batch.real_BS.reshape(-1), top_k)


def train_step(
    model: OlmoeForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    batches: list[Batch],
    plan: Plan,
    rank: int,
) -> tuple[float, float]:
    """One optimizer step; returns the mean answer loss and the balance loss.

    Each worker takes its share of the batches, the sums of gradients are exchanged, and every
    worker makes the same step.
    """
    weight = sum(float(batch.weights_BS.sum()) for batch in batches)
    sums = torch.zeros(2)
    for batch in batches[rank :: plan.workers]:
        answer, balance = micro_loss(model, batch)
        loss = answer / weight + plan.balance_weight * balance / len(batches)
        loss.backward()  # type: ignore[no-untyped-call]
        sums += torch.stack((answer.detach() / weight, balance.detach() / len(batches)))
    share_gradients(list(model.parameters()), sums)
    torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(sums[0]), float(sums[1])


def share_gradients(weights: list[torch.nn.Parameter], sums: Tensor) -> None:
    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in weights]
    *shared, total = all_sum([*grads, sums])
    for one, grad in zip(weights, shared, strict=True):
        one.grad = grad
    sums.copy_(total)


def build(
    plan: Plan, rank: int
) -> tuple[OlmoeForCausalLM, PreTrainedTokenizerFast, list[torch.optim.Optimizer]]:
    tokenizer = train_tokenizer(plan.seed, MAX_LENGTH)
    pad_id, end_id = tokenizer.convert_tokens_to_ids([str(tokenizer.pad_token), END])
    torch.manual_seed(plan.seed)
    model = build_model(build_config(pad_id=pad_id, end_id=end_id))
    stacks = list[torch.nn.Parameter]()
    matrices = list[torch.nn.Parameter]()
    vectors = list[torch.nn.Parameter]()
    for name, weight in model.named_parameters():
        inner = "experts" in name or "_proj" in name
        (vectors if weight.dim() == 1 else stacks if inner else matrices).append(weight)
    groups: list[dict[str, object]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(
        groups, lr=plan.rate, betas=(0.9, 0.98), weight_decay=plan.weight_decay
    )
    decay, workers = plan.weight_decay, plan.workers
    muon = Muon(stacks, lr=plan.rate, weight_decay=decay, rank=rank, workers=workers)
    return model, tokenizer, [muon, adam]


class Training:
    """One worker of a run: model, optimizer and how far they are. Rank 0 writes the files."""

    def __init__(self, plan: Plan, out: Path, rank: int) -> None:
        self.plan, self.out, self.rank = plan, out, rank
        self.model, self.tokenizer, self.optimizers = build(plan, rank)
        self.curve, self.step, self.num_tokens, self.seconds = record.Curve(), 0, 0, 0.0
        if (out / CHECKPOINT).exists():
            state = torch.load(out / CHECKPOINT, weights_only=False)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.curve, self.step = state["curve"], state["step"]
            self.num_tokens, self.seconds = state["num_tokens"], state["seconds"]
        self.started = time.monotonic() - self.seconds

    def advance(self) -> None:
        rate = self.plan.rate_at(self.step)
        for group in (one for optimizer in self.optimizers for one in optimizer.param_groups):
            group["lr"] = rate
        batches = step_batches(
            self.tokenizer,
            seed=self.plan.seed,
            step=self.step,
            num_tokens=self.plan.num_tokens,
            num_batches=2 * self.plan.workers,
        )
        loss, balance = train_step(self.model, self.optimizers, batches, self.plan, self.rank)
        self.num_tokens += sum(int(batch.real_BS.sum()) for batch in batches)
        self.curve.add(step=self.step, loss=loss, balance=balance, rate=rate)
        self.step += 1

    def check(self) -> None:
        scores = accuracies(self.model, self.tokenizer, count=NUM_CHECKED, seed=1)
        logger.info("step %d loss %.3f %s", self.step, self.curve.recent(), scores)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "curve": self.curve,
            "step": self.step,
            "num_tokens": self.num_tokens,
            "seconds": time.monotonic() - self.started,
        }
        part = (self.out / CHECKPOINT).with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.out / CHECKPOINT)

    def finish(self) -> None:
        summary = {
            "num_tokens": self.num_tokens,
            "wall_s": round(time.monotonic() - self.started, 1),
        }
        facts = asdict(self.plan) | summary
        record.write_folder(self.out, self.model, self.tokenizer, self.curve, facts)
        (self.out / CHECKPOINT).unlink(missing_ok=True)


def work(rank: int, plan: Plan, out: Path, check_every: int) -> None:
    """One worker from start to end; one thread each, since two share small products badly."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    store = f"file://{(out / STORE).resolve()}"
    distributed.init_process_group("gloo", store, rank=rank, world_size=plan.workers)
    training = Training(plan, out, rank)
    steps = range(training.step, plan.steps)
    bar = tqdm(steps, initial=training.step, total=plan.steps, mininterval=10, disable=rank > 0)
    for _ in bar:
        training.advance()
        bar.set_postfix_str(f"loss {training.curve.recent():.3f}", refresh=False)
        if rank == 0 and training.step % check_every == 0:
            training.check()
    if rank == 0:
        training.finish()
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--check-every", type=int, default=200)
    for item in fields(Plan):
        kind = float if isinstance(item.default, float) else int
        parser.add_argument(f"--{item.name.replace('_', '-')}", type=kind, default=item.default)
    values = vars(parser.parse_args())
    out, check_every = values.pop("out"), values.pop("check_every")
    plan = Plan(**values)
    out.mkdir(parents=True, exist_ok=True)
    (out / STORE).unlink(missing_ok=True)
    spawn(work, (plan, out, check_every), nprocs=plan.workers)  # type: ignore[no-untyped-call]
    (out / STORE).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
