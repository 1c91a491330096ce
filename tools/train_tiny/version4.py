"""Trains version 4 of `tiny`: experts from the first step, renormalised weights that sum to k.

`python -m tools.train_tiny.version4 --out DIR` runs two processes: one computes the gradient of
English, the other that of the problems, and each orthogonalises half of the updates.
`touch DIR/stop` stops after a checkpoint; the same command resumes. `--steps` may be changed while
the run is stopped: the rate is constant after the warm-up and falls over the last `--decay-steps`.

The weights' sum is the main lever: with a sum of 1, the residual stream hardly needs the routed
experts. The saved model is an ordinary OLMoE, whose `down_proj` is k times as large.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import asdict, dataclass
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
from tools.train_tiny.record import Curve, write_folder
from tools.train_tiny.text import Text
from tools.train_tiny.tokenizer import END, train_tokenizer
from tools.train_tiny.train import Plan, micro_loss, optimizers_of, read_command, update

logger = logging.getLogger(__name__)
CHECKPOINT = "checkpoint.pt"


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
            params = group["params"]
            for index, weight in enumerate(params):
                if index % world == rank:
                    update = self._update(weight, group)
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.sub_(update, alpha=group["lr"] * 0.2 * max(weight.shape[-2:]) ** 0.5)
            flats = []
            for owner in range(world):
                mine = [w for i, w in enumerate(params) if i % world == owner]
                flat = torch.cat([w.reshape(-1) for w in mine])
                flats.append((mine, flat))
            for owner, (mine, flat) in enumerate(flats):
                dist.broadcast(flat, owner)
                if owner != rank:
                    start = 0
                    for w in mine:
                        w.copy_(flat[start : start + w.numel()].view_as(w))
                        start += w.numel()


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
    optimizers = [muon, adam]
    curve, step, num_tokens, seconds = Curve(), 0, 0, 0.0
    mine = out / f"{rank}.{CHECKPOINT}"
    if (out / f"1.{CHECKPOINT}").exists():
        state = torch.load(mine, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        curve.rows = [tuple(row) for row in state["curve"]]
        step, num_tokens, seconds = state["step"], state["num_tokens"], state["seconds"]
    counter = torch.tensor([step])
    dist.all_reduce(counter)
    assert int(counter) == 2 * step, "the two checkpoints are of different steps"
    started = time.monotonic() - seconds
    params = list(model.parameters())

    def save() -> None:
        part = mine.with_suffix(".part")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "curve": [list(row) for row in curve.rows],
                "step": step,
                "num_tokens": num_tokens,
                "seconds": time.monotonic() - started,
            },
            part,
        )
        dist.barrier()
        os.replace(part, mine)

    while step < plan.steps:
        rng = Random(f"batch/{plan.seed}/{step}/{rank}")
        if rank == 0:
            batch = text_batch(text, rng)
        else:
            batch = skill_batch(tokenizer, rng, plan.mixture_at(step))
        loss, logits = micro_loss(model, batch)
        balance, sharp = balance_loss(list(logits), TOP_K), sharpness(list(logits), TOP_K)
        weight = 1.0 if rank == 0 else plan.skill_weight
        regular = plan.balance_weight * balance + plan.sharpness_weight * sharp
        total = weight * loss + 0.5 * regular
        total.backward()
        flat = torch.cat([p.grad.reshape(-1) for p in params])
        dist.all_reduce(flat)
        start = 0
        for p in params:
            p.grad.copy_(flat[start : start + p.numel()].view_as(p))
            start += p.numel()
        share = update(params, optimizers, plan, step)
        row = torch.zeros(4)
        row[rank], row[2], row[3] = loss.item(), balance.item() / 2, batch.ids_BS.numel()
        stop = float((out / "stop").exists()) if rank == 0 else 0.0
        row = torch.cat([row, torch.tensor([stop])])
        dist.all_reduce(row)
        num_tokens += int(row[3])
        curve.add(step, float(row[0]), float(row[1]), float(row[2]), share)
        step += 1
        if rank == 0 and step % 20 == 0:
            speed = num_tokens / (time.monotonic() - started)
            logger.info("%s tokens %d tokens/s %.0f", curve.told(20), num_tokens, speed)
        if step % save_every == 0 or row[4] > 0 or step == plan.steps:
            save()
        if row[4] > 0:
            if rank == 0:
                (out / "stop").unlink()
            return
    if rank == 0:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("experts.down_proj"):
                    p.mul_(TOP_K)
        wall_s = round(time.monotonic() - started, 1)
        facts = asdict(plan) | {"num_tokens": num_tokens, "wall_s": wall_s}
        write_folder(out / "model", model, tokenizer, curve, facts)


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
