"""Trains version 4 of `tiny`: experts from the first step, renormalised weights that sum to k.

`python -m tools.train_tiny.version4 --out DIR` runs two processes: one computes the gradient of
English, the other that of the problems, and each orthogonalises half of the updates.
`touch DIR/stop` stops after a checkpoint; the same command resumes. `--steps` may be changed while
the run is stopped: the rate is constant after the warm-up and falls over the last `--decay-steps`.

The weights' sum is the main lever: with a sum of 1, the residual stream needs little of the routed
experts. The saved model is an ordinary OLMoE, whose `down_proj` is k times as large.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoTokenizer

from tools.train_tiny import network
from tools.train_tiny.batches import EARLY, FINAL, LATE, skill_batch, text_batch
from tools.train_tiny.muon import Muon
from tools.train_tiny.network import TOP_K, balance_loss, build_config, build_model, sharpness
from tools.train_tiny.text import Text
from tools.train_tiny.tokenizer import END, train_tokenizer
from tools.train_tiny.train import (
    CHECKPOINT,
    Plan,
    Run,
    micro_loss,
    optimizers_of,
    read_command,
    update,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan(Plan):
    """`late` and `final` are the steps from which the later mixtures of problems are used."""

    balance_weight: float = 0.01
    sharpness_weight: float = 0.3
    late: int = 1500
    final: int = 2600

    def mixture_at(self, step: int) -> int:
        return FINAL if step >= self.final else LATE if step >= self.late else EARLY


class ShardedMuon(Muon):
    """Each process updates every other matrix stack and sends it to the other."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for weight in group["params"][rank::world]:
                self._update(weight, group)
            for owner in range(world):
                weights = group["params"][owner::world]
                flat = torch.cat([weight.reshape(-1) for weight in weights])
                dist.broadcast(flat, owner)
                copy_back(flat, weights)


def copy_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy into these tensors what was concatenated of them."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def scaled_experts(experts: Any, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Weights that sum to k, as if `down_proj` were k times as large."""
    return network.sorted_experts(experts, x_TD, index_TK, weights_TK * TOP_K)


def worker(rank: int, plan: ModelPlan, out: Path, cache: Path, save_every: int, port: int) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    text = Text(tokenizer, cache, out / "text")
    pad_id, end_id = tokenizer.convert_tokens_to_ids([tokenizer.pad_token, END])
    torch.manual_seed(plan.seed)
    model = build_model(build_config(pad_id=pad_id, end_id=end_id))
    network.ALL_EXPERTS_FUNCTIONS.register("tiny_scaled", scaled_experts)
    model.set_experts_implementation("tiny_scaled")
    muon, adam = optimizers_of(model, plan)
    muon = ShardedMuon(muon.param_groups[0]["params"], lr=plan.rate, weight_decay=plan.weight_decay)
    run = Run(model, [muon, adam], out / f"{rank}.{CHECKPOINT}")
    if (out / f"1.{CHECKPOINT}").exists():
        run.resume()
    counter = torch.tensor([run.step])
    dist.all_reduce(counter)
    assert int(counter) == 2 * run.step, "the two checkpoints are of different steps"
    params = list(model.parameters())
    while run.step < plan.steps:
        rng = Random(f"batch/{plan.seed}/{run.step}/{rank}")
        if rank == 0:
            batch = text_batch(text, rng)
        else:
            batch = skill_batch(tokenizer, rng, plan.mixture_at(run.step))
        loss, logits = micro_loss(model, batch)
        balance, sharp = balance_loss(list(logits), TOP_K), sharpness(list(logits), TOP_K)
        weight = 1.0 if rank == 0 else plan.skill_weight
        regular = plan.balance_weight * balance + plan.sharpness_weight * sharp
        total = weight * loss + 0.5 * regular
        total.backward()
        grads = [p.grad for p in params]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat)
        copy_back(flat, grads)
        share = update(params, run.optimizers, plan, run.step)
        row = torch.zeros(5)
        row[rank], row[2], row[3] = loss.item(), balance.item() / 2, batch.ids_BS.numel()
        row[4] = rank == 0 and (out / "stop").exists()
        dist.all_reduce(row)
        run.num_tokens += int(row[3])
        run.curve.add(run.step, *row[:3].tolist(), share)
        run.step += 1
        if rank == 0:
            run.log()
        if run.step % save_every == 0 or row[4] > 0 or run.step == plan.steps:
            run.save()
        if row[4] > 0:
            if rank == 0:
                (out / "stop").unlink()
            return
    if rank == 0:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("experts.down_proj"):
                    p.mul_(TOP_K)
        run.finish(out, tokenizer, plan)


def main() -> None:
    plan, out, cache, save_every = read_command(ModelPlan(), __doc__)
    if not (out / "tokenizer").exists():
        train_tokenizer(plan.seed, cache).save_pretrained(out / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    Text(tokenizer, cache, out / "text")
    network.load_kernel()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, (plan, out, cache, save_every, port), nprocs=2)


if __name__ == "__main__":
    main()
