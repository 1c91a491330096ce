"""Clusters of experts: does co-activation find them, and do swaps inside them cost less?

Cluster c of E / C experts is c * E / C and those after it, as tools/train_tiny/clusters.py orders
them. Shapes: E experts, K top-k.
"""

from __future__ import annotations

from random import Random
from statistics import mean

import numpy as np
import torch
from scipy.cluster.vq import kmeans2
from specimen_model import Swap, observe, swapped
from specimen_skills import Scorer
from torch import Tensor
from transformers import PreTrainedModel

NUM_CLUSTERS = 8
RESTARTS = 10


def co_activation(logits: list[Tensor], top_k: int) -> np.ndarray:
    """How often two experts of a layer are chosen for one token (E, E), over texts' logits."""
    total = torch.zeros(())
    for logits_TE in logits:
        used = torch.zeros_like(logits_TE).scatter_(1, logits_TE.topk(top_k).indices, 1.0)
        total = total + (used.t() @ used)
    counts = np.array(total, dtype=float)
    np.fill_diagonal(counts, 0)
    return counts


def spectral(counts: np.ndarray, num_clusters: int) -> np.ndarray:
    """Labels from the leading eigenvectors of the normalised co-activation (Ng et al. 2002)."""
    size = np.sqrt(np.maximum(counts.sum(1), 1))
    _, vectors = np.linalg.eigh(counts / np.outer(size, size))
    rows = vectors[:, -num_clusters:]
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    fits = [kmeans2(rows, num_clusters, minit="++", seed=seed) for seed in range(RESTARTS)]
    return min(fits, key=lambda fit: ((rows - fit[0][fit[1]]) ** 2).sum())[1]


def adjusted_rand(one: np.ndarray, two: np.ndarray) -> float:
    """Agreement of two partitions: 1 if they are equal, 0 on average by chance."""
    table = np.zeros((one.max() + 1, two.max() + 1))
    np.add.at(table, (one, two), 1)

    def pairs(counts: np.ndarray) -> float:
        return float((counts * (counts - 1) / 2).sum())

    both, rows, columns = pairs(table), pairs(table.sum(1)), pairs(table.sum(0))
    expected = rows * columns / pairs(np.array([len(one)]))
    most = (rows + columns) / 2
    return (both - expected) / (most - expected)


def clusters_found(model: PreTrainedModel, texts: list[list[int]]) -> list[float]:
    """Adjusted Rand index of the co-activation's clusters against the true ones, by layer."""
    top_k, num_experts = int(model.config.num_experts_per_tok), int(model.config.num_experts)
    seen = [[logits for _, logits in observe(model, ids)] for ids in texts]
    truth = np.arange(num_experts) // (num_experts // NUM_CLUSTERS)
    return [
        adjusted_rand(truth, spectral(co_activation(list(layer), top_k), NUM_CLUSTERS))
        for layer in zip(*seen, strict=True)
    ]


def cluster_swap(model: PreTrainedModel, share: float, seed: int, *, inside: bool) -> Swap:
    """A share of the chosen experts gives way to one not chosen, of its cluster or of another.

    Only experts whose cluster has one to spare are swapped, in both directions, so that the two
    swaps change the same assignments.
    """
    num_experts = int(model.config.num_experts)
    size, rng = num_experts // NUM_CLUSTERS, Random(seed)

    def swap(_: int, index: Tensor, __: Tensor) -> Tensor:
        rows = index.tolist()
        for row in rows:
            for slot, expert in enumerate(list(row)):
                start = expert - expert % size
                near = [one for one in range(start, start + size) if one not in row]
                if not near or rng.random() >= share:
                    continue
                far = [
                    one
                    for one in range(num_experts)
                    if one not in row and not start <= one < start + size
                ]
                row[slot] = rng.choice(near if inside else far)
        return torch.tensor(rows, dtype=index.dtype)

    return swap


@torch.no_grad()
def text_loss(model: PreTrainedModel, texts: list[list[int]]) -> float:
    losses = [
        model(input_ids=ids, labels=ids).loss for ids in map(torch.tensor, ([t] for t in texts))
    ]
    return mean(float(loss) for loss in losses)


def swap_costs(model: PreTrainedModel, texts: list[list[int]], share: float) -> tuple[float, float]:
    """What the two swaps add to the loss of a token of text, in nats: inside and across."""
    plain, added = text_loss(model, texts), list[float]()
    for inside in (True, False):
        with swapped(model, cluster_swap(model, share, 0, inside=inside)):
            added.append(text_loss(model, texts) - plain)
    return added[0], added[1]


def swapped_clusters(scorer: Scorer, task: str, count: int = 40) -> tuple[float, float, float]:
    """Accuracy of a task as it is, and with all experts swapped inside and across clusters."""
    found = [scorer.accuracy(task, count)]
    for inside in (True, False):
        with swapped(scorer.model, cluster_swap(scorer.model, 1.0, 0, inside=inside)):
            found.append(scorer.accuracy(task, count))
    return found[0], found[1], found[2]
