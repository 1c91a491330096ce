"""Slow, obvious versions of each family of rules, written from the papers and not from our code.

Evictions are judged by a cache's whole log; routing and miss handling go token by token through
Python lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


@dataclass(frozen=True)
class Entry:
    """One log entry: `pass`, `insert`, `evict`, `use` (by an event) or `hint` (predicted)."""

    what: str
    key: int = -1
    weights: tuple[float, ...] = ()
    level: int = 0
    prefetched: bool = False
    event: int = -1
    """Number of the event that used the key."""
    places: tuple[int, ...] = (0,)
    """Its positions in the event's [tokens, top_k], in row-major order."""


# --- evictions --------------------------------------------------------------------------------


def ranked(rule: RankedEviction, log: Sequence[Entry], key: int, layer: int, held: int) -> Any:
    """Return a resident's rank, and the key: every feature is found in the log anew.

    `layer` is being served; the key's own layer has `held` residents.
    """
    own = [(i, entry) for i, entry in enumerate(log) if entry.key == key]
    uses = [(i, entry) for i, entry in own if entry.what == "use"]
    came = max(i for i, entry in own if entry.what == "insert")
    last = max([came, *(i for i, _ in uses)])
    last_use: float = last
    if rule.by_token and last > came:
        event = [i for i, entry in enumerate(log) if entry.event == log[last].event]
        last_use = event[0] + log[last].places[-1] / 1000
    stay = [i for i, _ in uses if i > came]
    # The first use in the pass of a demanded load is what it was loaded for.
    demand = not log[came].prefetched and any(pass_of(log, i) == pass_of(log, came) for i in stay)
    fills, growth, now_pass = cold_fills(log), rule.growth, pass_of(log, len(log))
    weight = sum(sum(e.weights) * math.exp(growth * (pass_of(log, i) - now_pass)) for i, e in uses)
    is_current, since = current(log, key, rule.geometry)
    expert: Any = Expert(
        **{"last_use": last_use, "current_since": since},  # fractions, here
        uses=sum(not (rule.only_best and entry.level) for _, entry in uses),
        loaded=came,
        current=now_pass if is_current else -2,
        turn=num_events(log[:last], without=log[last].event),
        accessed=sum(entry.what == "use" for entry in log[: last + 1]),
        hits=len(stay) - demand,
        cold_fill_rank=fills.index(came) + 1 if came in fills else 0,
        served_tokens=sum(len(entry.weights) for _, entry in uses),
        weight=round(math.log(weight) if growth and weight else weight, 9),
    )
    now = Now(
        *(rule.geometry.num_layers, rule.geometry.num_experts, now_pass, layer),
        turns=num_events(log),
        accesses=sum(entry.what == "use" for entry in log),
        cold_fills=len(fills),
        parameter=rule.parameter,
    )
    home = Layer(key // rule.geometry.num_experts, held, slots=rule.num_slots)
    return *rule.plain_rank(expert, home, now), key


def pass_of(log: Sequence[Entry], place: int) -> int:
    return sum(entry.what == "pass" for entry in log[:place]) - 1


def num_events(log: Sequence[Entry], without: int = -1) -> int:
    return len({entry.event for entry in log if entry.what == "use"} - {without})


def cold_fills(log: Sequence[Entry]) -> list[int]:
    """Return the places of loads into an empty cache before its first eviction."""
    held, has_evicted, found = 0, False, list[int]()
    for i, entry in enumerate(log):
        held += (entry.what == "insert") - (entry.what == "evict")
        found += [i] if entry.what == "insert" and not has_evicted else []
        if entry.what == "evict":
            has_evicted, found = held > 0, found if held else []
    return found


def current(log: Sequence[Entry], key: int, geometry: Geometry) -> tuple[bool, float]:
    """Whether the pass in progress has used a key or been told to fetch it, and since when."""
    is_current, since, hinted = False, 0.0, 0
    layer, served = key // geometry.num_experts, -1
    for i, entry in enumerate(log):
        if entry.what == "pass":
            # A hint made after its layer's turn is for the next pass.
            is_current, since = hinted > 0, i + hinted / 1000 if hinted else since
            hinted, served = 0, -1
        served = entry.key // geometry.num_experts if entry.what == "use" else served
        if entry.key == key:
            hinted = 0 if entry.what in ("insert", "evict") else hinted
            if entry.what in ("insert", "use") or (entry.what == "hint" and not is_current):
                is_current, since = True, i
            if (entry.what == "hint" or entry.prefetched) and layer <= served:
                hinted = i
    return is_current, since


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
