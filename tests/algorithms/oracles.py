"""Slow, obvious versions of each family of rules, written from the papers and not from our code.

Routing and miss handling go token by token through Python lists. Evictions have theirs in
`tests/engine/features.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry

# --- routing: equations 5 to 10 on lists ------------------------------------------------------


def promote(subset: Sequence[int], everything: Sequence[int]) -> list[int]:
    """Equation 5."""
    return [*subset, *(r for r in everything if r not in subset)]


def rank(logits: Sequence[float]) -> list[int]:
    """Equation 2, ties to the smaller expert."""
    return sorted(range(len(logits)), key=lambda e: (-logits[e], e))


def max_rank(
    texts: Sequence[Sequence[float]], cached: Collection[int], top_k: int, M: int, J: int
) -> set[int]:
    """Algorithm 1, for the last of a layer's tokens, as the next two."""
    r = rank(texts[-1])
    promoted = promote([e for e in r[:M] if e in cached], r)
    return set(promote(r[:J], promoted)[:top_k])


def cumsum(
    texts: Sequence[Sequence[float]], cached: Collection[int], top_k: int, p: float, J: int
) -> set[int]:
    """Algorithm 2."""
    mass = [math.exp(z - max(texts[-1])) for z in texts[-1]]
    r, p_cum, M = rank(texts[-1]), 0.0, 0
    while p_cum < p and len(r) > M:
        p_cum += mass[r[M]] / sum(mass)
        M += 1
    return max_rank(texts, cached, top_k, M, J)


def cache_prior(
    texts: Sequence[Sequence[float]],
    cached: Collection[int],
    top_k: int,
    lambda_: float,
    top_j: int,
    delta: str,
) -> set[int]:
    """Equations 9 and 10."""
    ranges = [max(logits) - min(logits) for logits in texts]
    means = [float(np.mean(np.array(logits, dtype=np.float32))) for logits in texts]
    seen = {"range": ranges, "mean": means, "token": ranges[-1:]}[delta]
    prior, r = np.float32(lambda_ * sum(seen) / len(seen)), rank(texts[-1])
    boosted = {e for e in r if e in cached} | set(r[:top_j])
    modified = [np.float32(z) + prior * (e in boosted) for e, z in enumerate(texts[-1])]
    return set(sorted(r, key=lambda e: (-modified[e], r.index(e)))[:top_k])


# --- miss -------------------------------------------------------------------------------------


def replaced(
    experts: Sequence[int],
    resident: Collection[int],
    cost: Callable[[int, int], float],
    *,
    most: int = 99,
    order: str = "heaviest",
    reuse: float = 0.0,
) -> list[int]:
    """One token: each absent expert in turn takes the cheapest resident one that it lacks.

    BuddyMoE algorithm 1 for any cost (missing, other), infinite where forbidden; at most `most`
    are replaced. The cost of one taken before is multiplied by `reuse`, or forbids where that is 0.
    """
    chosen, taken = list(experts), list[int]()
    places = list(enumerate(experts))
    for place, missing in places if order == "heaviest" else places[::-1]:
        if missing in resident or len(taken) == most:
            continue
        free = [e for e in resident if e not in experts and (reuse or e not in taken)]
        costs = {e: cost(missing, e) * (reuse ** taken.count(e) if reuse else 1) for e in free}
        costs = {e: c for e, c in costs.items() if c < math.inf}
        if costs:
            chosen[place] = min(costs, key=lambda e: (costs[e], e))
            taken.append(chosen[place])
    return chosen


def activating_entropy(logits: Sequence[float], temperature: float) -> float:
    """BuddyMoE equation 1 over one token's selected experts."""
    mass = [math.exp((z - max(logits)) / temperature) for z in logits]
    shares = [m / sum(mass) for m in mass]
    return -sum(p * math.log(p) for p in shares if p) / math.log(len(shares))


def buddy_list(q: Sequence[float], alpha: float, k_max: int) -> list[int]:
    """BuddyMoE equations 5 and 6 for one pivot."""
    peers = sorted((j for j in range(len(q)) if q[j] > 0), key=lambda j: (-q[j], j))
    chosen: list[int] = []
    for j in peers:
        if sum(q[c] for c in chosen) >= alpha - 1e-9 or len(chosen) == k_max:
            break
        chosen.append(j)
    return chosen


# --- prefetch ---------------------------------------------------------------------------------


def activation_matrix(geometry: Geometry, events: Sequence[Event]) -> Any:
    matrix = np.zeros((geometry.num_layers, geometry.num_experts))
    for event in events:
        np.add.at(matrix[event.layer], event.experts.ravel(), 1)
    return matrix


def best_match(matrix: Any, past: Sequence[Any]) -> int:
    """Return the past matrix whose rows have the highest mean cosine with the rows reached."""

    def cosine(a: Any, b: Any) -> float:
        lengths = float(np.sqrt((a * a).sum()) * np.sqrt((b * b).sum()))
        return float((a * b).sum()) / lengths if lengths else 0.0

    similarity = [
        sum(cosine(a, b) for a, b in zip(matrix, old, strict=True) if a.any()) for old in past
    ]
    return similarity.index(max(similarity))


class SlowMaps:
    """Keeps every map as a matrix, computes every cosine anew and evicts nothing."""

    def __init__(self, geometry: Geometry, distance: int) -> None:
        self.geometry, self.distance, self.past = geometry, distance, list[np.ndarray]()

    def propose(self, now: np.ndarray, layer: int) -> list[int]:
        if not self.past:
            return []
        rows, (num_layers, num_experts) = now[: layer + 1].ravel(), now.shape
        cosines = [
            float(rows @ (p := old[: layer + 1].ravel()) / np.linalg.norm(rows) / np.linalg.norm(p))
            for old in self.past
        ]
        best, target = int(np.argmax(cosines)), (layer + self.distance) % num_layers
        row, proposal, mass = self.past[best][target], list[int](), 0.0
        for expert in sorted(range(num_experts), key=lambda e: (-round(row[e], 9), e)):
            if len(proposal) >= self.geometry.top_k and mass >= 1 - cosines[best]:
                break
            proposal.append(self.geometry.key(target, expert))
            mass += row[expert]
        return proposal


# --- commit: equations 5 and 6 of CommitMoE on lists ------------------------------------------


def output_weights(
    logits: Sequence[float],
    predicted: Sequence[float],
    top_k: int,
    alpha1: float,
    alpha2: float,
    trigger: Collection[int],
    by_router: bool,
) -> dict[int, float]:
    """One token: expert -> G''_pred, where G is a softmax over all experts."""

    def shares(values: Sequence[float]) -> list[float]:
        mass = [math.exp(v) for v in values]
        return [m / sum(mass) for m in mass]

    g_true = shares(logits)
    g_pred = g_true if by_router else shares(predicted)
    true, pred = rank(logits)[:top_k], rank(predicted)[:top_k]
    correct = [e for e in pred if e in true]
    if len(correct) not in trigger:
        return {e: g_pred[e] for e in pred}
    missed_mass = sum(g_true[j] for j in true if j not in pred)
    correct_mass = sum(g_true[e] for e in correct)
    first = {
        e: g_true[e] * (1 + missed_mass / correct_mass) * alpha1 if e in true else g_pred[e]
        for e in pred
    }
    scale = sum(g_true[j] for j in true) / sum(first.values())
    return {e: weight * scale * alpha2 for e, weight in first.items()}
