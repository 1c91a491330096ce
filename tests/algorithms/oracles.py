"""Slow, obvious versions of every algorithm, written from the papers and not from our code.

Evictions recompute the victim from a cache's whole log; routing and miss handling go token by
token through Python lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry


@dataclass(frozen=True)
class Entry:
    """One log entry: `pass`, `insert`, `evict`, `use` (by an event) or `wish` (predicted)."""

    what: str
    key: int = -1
    weights: tuple[float, ...] = ()
    level: int = 0
    prefetched: bool = False
    event: int = -1
    """Number of the event that used the key."""
    places: tuple[int, ...] = (0,)
    """Its positions in the event's [tokens, top_k], in row-major order."""


@dataclass(frozen=True)
class Scene:
    """The state that an oracle sees when a victim is needed."""

    log: Sequence[Entry]
    resident: Collection[int]
    pinned: Collection[int]
    layer: int
    geometry: Geometry

    @property
    def free(self) -> list[int]:
        return sorted(key for key in self.resident if key not in self.pinned)

    def layer_of(self, key: int) -> int:
        return key // self.geometry.num_experts

    def uses(self, key: int) -> int:
        return sum(e.what == "use" and e.key == key for e in self.log)

    def last(self, key: int, *what: str) -> int:
        """Index of the key's last log entry of one of these kinds."""
        i = len(self.log) - 1
        while self.log[i].key != key or self.log[i].what not in what:
            i -= 1
        return i


Oracle = Callable[..., Sequence[float]]
"""(scene, key, parameters) -> the key's rank in the order of eviction, smallest first."""


def lru(scene: Scene, key: int) -> Sequence[float]:
    return (scene.last(key, "insert", "use"),)


def fifo(scene: Scene, key: int) -> Sequence[float]:
    return (scene.last(key, "insert"),)


def lfu(scene: Scene, key: int) -> Sequence[float]:
    return (scene.uses(key), key)


def lhu(scene: Scene, key: int) -> Sequence[float]:
    return (sum(e.what == "use" and e.key == key and e.level == 0 for e in scene.log), key)


def score(
    scene: Scene, key: int, history: str = "sum", decay: float | None = None
) -> Sequence[float]:
    total, served, passes_left = 0.0, 0, sum(e.what == "pass" for e in scene.log)
    for entry in scene.log:
        passes_left -= entry.what == "pass"
        if entry.what == "use" and entry.key == key:
            age = (decay or 0.9) ** passes_left if history == "decayed" else 1.0
            total += age * sum(entry.weights)
            served += len(entry.weights)
    if not served:
        return (-math.inf, key)
    return (round(total / served if history == "mean" else total, 9), key)


def fld(scene: Scene, key: int, distance: str = "absolute") -> Sequence[float]:
    layer = scene.layer_of(key)
    if distance == "absolute":
        return (-abs(layer - scene.layer), layer, *lru(scene, key))
    turns = 0
    while (scene.layer + turns) % scene.geometry.num_layers != layer:
        turns += 1
    return (-turns, *lru(scene, key))


def shallow_first(scene: Scene, key: int) -> Sequence[float]:
    return (-scene.layer_of(key), *lru(scene, key))


def frequency_layer(scene: Scene, key: int, layer: str = "forward") -> Sequence[float]:
    num_layers, away = scene.geometry.num_layers, scene.layer_of(key)
    if layer == "forward":
        away = (away - scene.layer) % num_layers
    return (scene.uses(key) * (num_layers - away), key)


def least_stale(
    scene: Scene, key: int, protect: str = "coming", order: str = "last_use"
) -> Sequence[float]:
    touched = loaded = wished = -1
    current = False
    layer, served = scene.layer_of(key), -1
    for i, entry in enumerate(scene.log):
        if entry.what == "pass":
            # A wish made after its layer's turn counts for this pass.
            current, touched = wished >= 0, max(touched, wished)
            wished = served = -1
        served = scene.layer_of(entry.key) if entry.what == "use" else served
        if entry.key != key:
            continue
        if entry.what == "insert":
            loaded, wished = i, -1
        if entry.what != "wish" or not current:
            # A wish protects a stale expert, and does not refresh a current one.
            touched, current = i, True
        if (entry.what == "wish" or entry.prefetched) and layer <= served:
            wished = i
    # Past layers leave from the first onwards, layers to come from the last backwards.
    to_come = protect == "coming" and layer > scene.layer
    place = (1, -layer) if to_come else (0, layer)
    return (current, *place, loaded if order == "fifo" else touched)


def layered_lru(scene: Scene, key: int) -> Sequence[float]:
    layer, num_layers = scene.layer_of(key), scene.geometry.num_layers
    held = sum(scene.layer_of(k) == layer for k in scene.resident)
    return (-held, -((layer - scene.layer - 1) % num_layers), *lru(scene, key))


def lfru(scene: Scene, key: int) -> Sequence[float]:
    now = last = 1
    last_event = -1
    for entry in scene.log:
        if entry.what == "use" and entry.event != last_event:
            now, last_event = now + 1, entry.event
        if entry.key == key and entry.what in ("use", "insert"):
            # An event counts itself only once it is over.
            last = now - 1 if entry.what == "use" else now
    rank = (scene.uses(key) + 1) / (now + 1 - last)
    return (rank, *lru(scene, key))


def static(scene: Scene, key: int) -> Sequence[float]:
    """Keys inserted before the first eviction stay; the test's cache holds `len(resident)`."""
    arrivals = [i for i, e in enumerate(scene.log) if e.what == "insert"]
    came = scene.last(key, "insert")
    return (came <= arrivals[len(scene.resident) - 1], came)


def heat_lru(scene: Scene, key: int, protect_above: int = 4) -> Sequence[float]:
    def heat(k: int) -> int:
        """Uses since insertion, less the one it was loaded for: the first, if in the same pass."""
        arrival = scene.last(k, "insert")
        since = scene.log[arrival + 1 :]
        hits = sum(e.what == "use" and e.key == k for e in since)
        this_pass = next((i for i, e in enumerate(since) if e.what == "pass"), len(since))
        used_on_arrival = any(e.what == "use" and e.key == k for e in since[:this_pass])
        return hits - (used_on_arrival and not scene.log[arrival].prefetched)

    cool = any(heat(k) <= protect_above for k in scene.free)
    return (cool and heat(key) > protect_above, scene.last(key, "insert", "use"))


def tail_lru(scene: Scene, key: int) -> Sequence[float]:
    """Uses in one event rank by the last token, then by that token's order of experts."""
    at = scene.last(key, "insert", "use")
    entry = scene.log[at]
    if entry.what == "insert":
        return (at,)
    first = next(i for i, e in enumerate(scene.log) if e.what == "use" and e.event == entry.event)
    return (first, entry.places[-1])


def lfru_colibri(scene: Scene, key: int) -> Sequence[float]:
    """colibri's score: 256 for each use, plus up to 255 for recency, counted in accesses."""
    at, came = scene.last(key, "insert", "use"), scene.last(key, "insert")
    age = 1 + sum(e.what == "use" for e in scene.log[at + 1 :])
    return (256 * scene.uses(key) + max(0, 255 - age), came)


def hysteresis(scene: Scene, key: int, half_life: int = 64) -> Sequence[float]:
    """Replay the log's inserts, uses and evictions to find which keys are hot."""
    heat: dict[int, int] = {}
    hot: list[int] = []
    passing: list[int] = []
    full, passes = False, 0
    for entry in scene.log:
        if entry.what == "pass":
            passes += 1
            if passes % half_life == 0:
                heat = {k: h // 2 for k, h in heat.items()}
        elif entry.what == "evict":
            hot, passing = ([k for k in members if k != entry.key] for members in (hot, passing))
            full = bool(hot or passing)
        elif entry.what == "insert":
            (passing if full else hot).append(entry.key)
        elif entry.what == "use":
            heat[entry.key] = heat.get(entry.key, 0) + 1
            if entry.key in passing and hot:
                cold = min(hot, key=lambda k: (heat.get(k, 0), k))
                if heat[entry.key] > heat.get(cold, 0) * 5 // 4 + 4:
                    hot[hot.index(cold)] = entry.key
                    passing.remove(entry.key)
                    passing.append(cold)
    if key in passing:
        return (0, passing.index(key))
    return (1, heat.get(key, 0), key)


_RULES: tuple[Oracle, ...] = (
    *(static, heat_lru, tail_lru, lfru_colibri, hysteresis, lru, fifo, lfu, lhu, score, fld),
    *(shallow_first, frequency_layer, least_stale, layered_lru, lfru),
)
EVICTIONS: dict[str, Oracle] = {rule.__name__: rule for rule in _RULES}


# --- routing: equations 5 to 10 on lists ------------------------------------------------------


def promote(subset: Sequence[int], everything: Sequence[int]) -> list[int]:
    """Equation 5."""
    return [*subset, *(r for r in everything if r not in subset)]


def rank(logits: Sequence[float]) -> list[int]:
    """Equation 2, ties to the smaller expert."""
    return sorted(range(len(logits)), key=lambda e: (-logits[e], e))


def max_rank(
    logits: Sequence[float], cached: Collection[int], top_k: int, M: int, J: int
) -> set[int]:
    """Algorithm 1."""
    r = rank(logits)
    promoted = promote([e for e in r[:M] if e in cached], r)
    return set(promote(r[:J], promoted)[:top_k])


def cumsum(
    logits: Sequence[float], cached: Collection[int], top_k: int, p: float, J: int
) -> set[int]:
    """Algorithm 2."""
    peak = max(logits)
    mass = [math.exp(z - peak) for z in logits]
    r, p_cum, M = rank(logits), 0.0, 0
    while p_cum < p and len(r) > M:
        p_cum += mass[r[M]] / sum(mass)
        M += 1
    return max_rank(logits, cached, top_k, M, J)


def cache_prior(
    logits: Sequence[float], cached: Collection[int], top_k: int, prior: float, top_j: int
) -> set[int]:
    """Equation 9, where `prior` is lambda times Delta_avg."""
    r = rank(logits)
    boosted = {e for e in r if e in cached} | set(r[:top_j])
    modified = [np.float32(z) + np.float32(prior) * (e in boosted) for e, z in enumerate(logits)]
    return set(sorted(r, key=lambda e: (-modified[e], r.index(e)))[:top_k])


# --- miss -------------------------------------------------------------------------------------


def substitute_score(
    scores: Sequence[float],
    experts: Sequence[int],
    resident: Collection[int],
    tolerance: float,
    relative: bool = False,
) -> list[int]:
    """One token: each absent expert, heaviest first, takes the closest resident one still free."""
    chosen = list(experts)
    taken = set(experts)
    for place, expert in enumerate(experts):
        if expert in resident:
            continue
        limit = tolerance * (scores[expert] if relative else 1.0)
        gaps = [
            (abs(scores[e] - scores[expert]), e)
            for e in range(len(scores))
            if e in resident and e not in taken and abs(scores[e] - scores[expert]) <= limit
        ]
        if gaps:
            chosen[place] = min(gaps)[1]
            taken.add(chosen[place])
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


def buddy_token(
    logits: Sequence[float],
    own: Sequence[int],
    resident: Collection[int],
    lists: Sequence[Sequence[int]],
    q: Sequence[Sequence[float]],
    *,
    rho: int,
    eta: float = 0.0,
    hop_factor: Callable[[int, int], float] = lambda i, j: 1.0,
    reuse: float = 0.0,
    order: str = "heaviest",
) -> list[int]:
    """One token that passed the gates: sections 3.1 and 3.3 with equation 3."""
    chosen, substitutes = list(own), list[int]()
    low, high = min(logits), max(logits)
    places = list(enumerate(own))
    for place, missing in places if order == "heaviest" else places[::-1]:
        if missing in resident or len(substitutes) == rho:
            continue
        scores = {}
        for j in lists[missing]:
            if j not in resident or j in own or (j in substitutes and not reuse):
                continue
            logit = (logits[j] - low) / max(high - low, 1e-9)
            psi = q[missing][j] * (1 + eta * logit) * hop_factor(missing, j)
            scores[j] = psi * reuse ** substitutes.count(j)
        if scores:
            chosen[place] = min(scores, key=lambda j: (-scores[j], j))
            substitutes.append(chosen[place])
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
