"""Trains version 3 of `tiny` from version 2: clusters, a shared expert, unnormalised weights.

`python -m tools.train_tiny.version3 --out DIR` reads version 2's shipped folder, makes the new
model from it (clusters.py) and continues its training mixture from its last step. A stopped run
(`touch DIR/stop`) resumes from its last checkpoint and ends with the same weights.

A locality loss is added to version 2's losses: it rewards a token's router for choosing the experts
of the previous token. Its weight is steered so that an LRU cache of two cycles hits as often as in
real models; topics alone would not achieve that in so small a model.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer

from lm_eval_moecache.tiny import MODEL_DIR
from tools.train_tiny.batches import ROW_LENGTH, Batch, step_batches
from tools.train_tiny.clusters import (
    NUM_CLUSTERS,
    NUM_EXPERTS,
    TOP_K,
    build_clustered,
    cluster,
    cluster_config,
    pull_to_clusters,
    query_sizes,
    swapping,
)
from tools.train_tiny.network import balance_loss, sharpness
from tools.train_tiny.train import Plan, Training, micro_loss, start

logger = logging.getLogger(__name__)
# Where version 2 ended: earlier batches are not read again.
FIRST_STEP = 2020
# From this step on training makes substitution hurt, and stretches of a text are balanced more
# strongly: before, experts of other clusters replaced one another without loss.
SECOND = 2100
# From this step on balance is stronger still, and locality as strong as necessary: before, the
# tokens of a text stayed with experts that the whole text used, which an LFU cache serves best.
THIRD = 2318
# From this step on tokens are not rewarded for keeping more than enough of their experts: those of
# word problems kept four of five.
FOURTH = 2518
# At this step the routers are sharpened, since a token's experts had nearly equal weights; from it
# on locality is steered separately for text and for each task, also below 0.
FIFTH = 2860
# The last step: more steps, or steps with more balance, lost answers.
LAST = 3102
TEXT = -1
STEER_EVERY = 10
CYCLES = 2
LEAST_LOCALITY, MOST_LOCALITY, LAST_MOST_LOCALITY = 1e-3, 1.0, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan(Plan):
    """`target_hits` is LRU's target hit rate at two cycles; `steer` is the gain of the control."""

    dense_steps: int = FIRST_STEP
    steps: int = LAST
    rate: float = 3e-3
    adam_rate: float = 2e-3
    warmup: int = 20
    decay_steps: int = 400
    expert_pull: float = 3e-3
    router_pull: float = 5e-3
    cluster_push: float = 1.5e-3
    row_balance_weight: float = 0.03
    late_row_balance_weight: float = 0.15
    last_row_balance_weight: float = 0.5
    swap_share: float = 0.5
    swap_margin: float = 1.0
    swap_weight: float = 0.3
    sharpness_weight: float = 0.05
    locality: float = 0.05
    target_hits: float = 0.55
    last_target_hits: float = 0.5
    enough_kept: float = 0.3
    steer: float = 2.0
    sharp_rate: float = 0.6
    sharp_decay_steps: int = 400
    best_share: float = 0.25
    target_best_share: float = 0.3
    best_share_weight: float = 5.0
    sharp_row_balance_weight: float = 0.08
    sharp_locality: float = 0.02
    sharp_steer: float = 0.15

    def rate_at(self, step: int) -> float:
        """Rise and fall once before the routers are sharpened and once after."""
        if step < FIFTH:
            up, down = (step - FIRST_STEP + 1) / self.warmup, (FIFTH - step) / self.decay_steps
            return min(1.0, up, down)
        down = 1 - (step - FIFTH) / self.sharp_decay_steps
        return self.sharp_rate * min((step - FIFTH + 1) / self.warmup, down)

    def row_balance_at(self, step: int) -> float:
        if step >= FIFTH:
            return self.sharp_row_balance_weight
        if step >= THIRD:
            return self.last_row_balance_weight
        return self.late_row_balance_weight if step >= SECOND else self.row_balance_weight


def kept_mass(router_logits: tuple[Tensor, ...], enough: float = 1.0) -> Tensor:
    """Mean probability that a token's router gives to the previous token's experts.

    Each token's value is capped at `enough`.
    """
    masses = list[Tensor]()
    for logits_TE in router_logits:
        previous = logits_TE.detach()[:-1].topk(TOP_K, dim=-1).indices
        kept_T = logits_TE[1:].softmax(-1).gather(1, previous).sum(-1)
        masses.append(kept_T.clamp(max=enough).mean())
    return torch.stack(masses).mean()


def lru_share(router_logits: tuple[Tensor, ...], length: int) -> float:
    """Hit rate of an LRU cache of two cycles in each layer over the first `length` tokens."""
    hits = requests = 0
    for logits_TE in router_logits:
        cache = OrderedDict[int, None]()
        for experts in logits_TE.detach()[:length].topk(TOP_K, dim=-1).indices.tolist():
            hits += sum(expert in cache for expert in experts)
            requests += len(experts)
            for expert in experts:
                cache[expert] = None
                cache.move_to_end(expert)
            while len(cache) > CYCLES * TOP_K:
                cache.popitem(last=False)
    return hits / requests


def best_share(logits_TE: Tensor, scale: float = 1.0) -> Tensor:
    """Mean share of the best expert in a token's chosen weight, with logits times `scale`."""
    weights_TK = (scale * logits_TE.topk(TOP_K, dim=-1).values).softmax(-1)
    return weights_TK[:, 0].mean()


@torch.no_grad()
def sharpen(model: PreTrainedModel, router_logits: tuple[Tensor, ...], share: float) -> None:
    """Scale each router so that the best expert has this share of a token's weight.

    No choice changes. The experts' outputs are scaled down as the mean chosen weight grows.
    """
    for layer, logits_TE in zip(model.model.layers, router_logits, strict=True):
        low, high = 1.0, 64.0
        for _ in range(30):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if best_share(logits_TE, middle) < share else (low, middle)
        masses = [
            float((scale * logits_TE).softmax(-1).topk(TOP_K, dim=-1).values.sum(-1).mean())
            for scale in (1.0, low)
        ]
        layer.mlp.gate.weight.mul_(low)
        layer.mlp.experts.down_proj.mul_(masses[0] / masses[1])
        logger.info("routers times %.2f, chosen weight %.3f to %.3f", low, *masses)


def together(router_logits: tuple[Tensor, ...]) -> float:
    """Share of pairs of a token's chosen experts that are in one cluster (0.11 by chance)."""
    size, shares = NUM_EXPERTS // NUM_CLUSTERS, list[float]()
    for logits_TE in router_logits:
        label_TK = logits_TE.detach().topk(TOP_K, dim=-1).indices // size
        same = (label_TK[:, :, None] == label_TK[:, None, :]).sum((1, 2)) - TOP_K
        shares.append(float(same.float().mean()) / (TOP_K * (TOP_K - 1)))
    return sum(shares) / len(shares)


class ClusterTraining(Training):
    """Continues from the end of version 2 in the new architecture."""

    about: ClassVar[dict[str, str]] = {"from": "version 2 of tiny", "draft": "../draft"}
    plan: ClusterPlan
    swap_cost = 0.0

    def __init__(self, plan: Plan, out: Path, cache: Path) -> None:
        self.locality = getattr(plan, "locality", 0.0)
        self.localities = dict[int, float]()
        super().__init__(plan, out, cache)
        self.step = max(self.step, plan.dense_steps)

    def _tokenizer(self, cache: Path) -> Tokenizer:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
        return tokenizer

    def first_model(self, pad_id: int, end_id: int) -> PreTrainedModel:
        if (self.out / "checkpoint.pt").exists():
            return build_clustered(cluster_config(pad_id=pad_id, end_id=end_id))
        old = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
        text, _ = step_batches(self.tokenizer, self.text, seed=self.plan.seed, step=FIRST_STEP)
        return cluster(old, query_sizes(old, text.ids_BS), self.plan.seed)

    def _load(self, state: dict[str, object]) -> None:
        super()._load(state | {"step": 0})
        self.step, self.locality = int(state["step"]), float(state["locality"])
        self.localities = dict(state.get("localities", {}))

    def state(self) -> dict[str, object]:
        return super().state() | {"locality": self.locality, "localities": self.localities}

    def before_step(self) -> None:
        """Sharpen the routers at step FIFTH; there is no dense stage to upcycle."""
        if self.step == FIFTH:
            batches = step_batches(self.tokenizer, self.text, seed=self.plan.seed, step=FIFTH)
            with torch.no_grad():
                (_, text), (_, skills) = (micro_loss(self.model, batch) for batch in batches)
            router_logits = tuple(torch.cat(pair) for pair in zip(text, skills, strict=True))
            sharpen(self.model, router_logits, self.plan.best_share)
            self._use(self.model)

    def _update(self, batches: tuple[Batch, Batch]) -> tuple[float, float, float]:
        plan = self.plan
        (text, text_logits), (skills, skill_logits) = (
            micro_loss(self.model, batch) for batch in batches
        )
        all_logits = [torch.cat(pair) for pair in zip(text_logits, skill_logits, strict=True)]
        parts = (list(text_logits), list(skill_logits))
        balance = balance_loss(all_logits, TOP_K)
        rows = (
            self._row_balance(list(text_logits))
            + self._task_balance(list(skill_logits), batches[1])
        ) / 2
        loss = text + plan.skill_weight * skills + plan.balance_weight * balance
        loss = loss + plan.row_balance_at(self.step) * rows
        if self.step >= FIFTH:
            groups = {TEXT: text_logits} | self._by_task(skill_logits, batches[1])
            kept_share = torch.stack(
                [self._locality_of(one) * kept_mass(groups[one]) for one in groups]
            )
            shares = torch.stack([best_share(one) for part in parts for one in part])
            penalty = (shares - plan.target_best_share).square().mean()
            loss = loss - kept_share.mean() + plan.best_share_weight * penalty
        else:
            sharp = torch.stack([sharpness(part, TOP_K) for part in parts]).mean()
            enough = plan.enough_kept if self.step >= FOURTH else 1.0
            kept_share = (kept_mass(text_logits, enough) + kept_mass(skill_logits, enough)) / 2
            loss = loss + plan.sharpness_weight * sharp - self.locality * kept_share
        if self.step >= SECOND:
            loss = loss + plan.swap_weight * self._swap_loss(batches[1], skills)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), plan.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pull_to_clusters(self.model, plan.expert_pull, plan.router_pull, plan.cluster_push)
        if self.step % STEER_EVERY == 0 and self.step >= FIFTH:
            self._steer_apart(groups, shares)
        elif self.step % STEER_EVERY == 0:
            self._steer(text_logits, skill_logits, kept_share.item())
        return text.item(), skills.item(), balance.item()

    def _swap_loss(self, batch: Batch, plain: Tensor) -> Tensor:
        """Hinge loss: by how much substitutes of other clusters cost less than the margin.

        On half of the rows, in nats per target token; 0 when they cost enough.
        """
        half = len(batch.ids_BS) // 2
        assert batch.document_BS is not None
        part = Batch(
            ids_BS=batch.ids_BS[:half],
            weights_BS=batch.weights_BS[:half],
            document_BS=batch.document_BS[:half],
        )
        with swapping(self.plan.swap_share, self.step):
            swapped, _ = micro_loss(self.model, part)
        self.swap_cost = float(swapped.detach() - plain.detach())
        return torch.relu(plain.detach() + self.plan.swap_margin - swapped)

    def _row_balance(self, router_logits: list[Tensor]) -> Tensor:
        """Balance over stretches of a row, so that no text relies on a few experts throughout."""
        stretches = zip(*(one.split(ROW_LENGTH) for one in router_logits), strict=True)
        return torch.stack([balance_loss(list(one), TOP_K) for one in stretches]).mean()

    def _task_balance(self, router_logits: list[Tensor], batch: Batch) -> Tensor:
        """Balance over the problems of each task, so that no task keeps favourite experts.

        Mean over tasks weighted by tokens. Before SECOND, rows are balanced like text.
        """
        if self.step < SECOND:
            return self._row_balance(router_logits)
        assert batch.task_BS is not None
        task_T = batch.task_BS[batch.task_BS >= 0]
        losses = [
            balance_loss([logits[task_T == task] for logits in router_logits], TOP_K)
            * (task_T == task).float().mean()
            for task in task_T.unique()
        ]
        return torch.stack(losses).sum()

    def _locality_of(self, task: int) -> float:
        return self.localities.setdefault(task, self.plan.sharp_locality)

    def _by_task(
        self, router_logits: tuple[Tensor, ...], batch: Batch
    ) -> dict[int, tuple[Tensor, ...]]:
        assert batch.task_BS is not None
        task_T = batch.task_BS[batch.task_BS >= 0]
        return {
            int(task): tuple(logits[task_T == task] for logits in router_logits)
            for task in task_T.unique()
        }

    def _steer_apart(self, apart: dict[int, tuple[Tensor, ...]], shares: Tensor) -> None:
        hits = {task: lru_share(part, 512) for task, part in sorted(apart.items())}
        for task, share in hits.items():
            self.localities[task] += self.plan.sharp_steer * (self.plan.last_target_hits - share)
        logger.info(
            "lru %s locality %s best %.3f (%.3f-%.3f) swap %.2f",
            " ".join(f"{task}:{share:.2f}" for task, share in hits.items()),
            " ".join(f"{self.localities[task]:.3f}" for task in hits),
            float(shares.mean()), float(shares.min()), float(shares.max()), self.swap_cost,
        )  # fmt: skip

    def _steer(self, text: tuple[Tensor, ...], skills: tuple[Tensor, ...], kept: float) -> None:
        hits = [lru_share(part, 512) for part in (text, skills)]
        plan = self.plan
        target = plan.last_target_hits if self.step >= FOURTH else plan.target_hits
        shortfall = target - sum(hits) / 2
        self.locality *= math.exp(plan.steer * shortfall)
        most = LAST_MOST_LOCALITY if self.step >= THIRD else MOST_LOCALITY
        self.locality = min(max(self.locality, LEAST_LOCALITY), most)
        logger.info(
            "lru %.3f %.3f kept %.3f locality %.4f together %.3f %.3f swap %.2f",
            *hits, kept, self.locality, together(text), together(skills), self.swap_cost,
        )  # fmt: skip


if __name__ == "__main__":
    start(ClusterTraining, ClusterPlan(), __doc__)
