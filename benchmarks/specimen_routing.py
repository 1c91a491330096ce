"""Routing as a cache sees it: real traces, hit rates in cycles, weights and use of experts."""

from __future__ import annotations

import csv
import heapq
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

CYCLES = (0.8, 2.0, 4.0)
Key = tuple[int, int]
Replay = Callable[[list[list[tuple[int, int]]], int], tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """One decoded text: `chosen[t][l]` are the experts of a token in a layer, best first.

    `weights` are theirs, where the trace has them.
    """

    num_experts: int
    chosen: list[list[list[int]]]
    weights: list[list[list[float]]] | None = None

    @property
    def cycle(self) -> int:
        """Experts that one token asks for."""
        return sum(len(experts) for experts in self.chosen[0])

    def events(self) -> list[list[Key]]:
        return [
            [(layer, expert) for expert in experts]
            for layers in self.chosen
            for layer, experts in enumerate(layers)
        ]


def read_json_lines(path: Path, num_experts: int = 64) -> Routing:
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    return Routing(num_experts=num_experts, chosen=[line["layers"] for line in lines])


def read_route_csv(path: Path) -> Routing:
    """The decode steps of a `route_trace v1` file."""
    lines = path.read_text().splitlines()
    head = next(line for line in lines if "n_expert=" in line)
    num_experts = int(head.partition("n_expert=")[2].split()[0])
    tokens = dict[tuple[int, int], dict[int, list[tuple[float, int]]]]()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        if row["phase"] != "0":
            place = (int(row["turn"]), int(row["step"]))
            layer = tokens.setdefault(place, {}).setdefault(int(row["layer"]), [])
            layer.append((float(row["weight"]), int(row["expert"])))
    ordered = [
        [sorted(token[layer], reverse=True) for layer in sorted(token)] for token in tokens.values()
    ]
    return Routing(
        num_experts=num_experts,
        chosen=[[[expert for _, expert in pairs] for pairs in token] for token in ordered],
        weights=[[[weight for weight, _ in pairs] for pairs in token] for token in ordered],
    )


def lru_hits(events: list[list[Key]], capacity: int) -> tuple[int, int]:
    """(hits, requests). An event is atomic: what it asks for is not evicted for itself."""
    cache, hits, requests = OrderedDict[Key, None](), 0, 0
    for event in events:
        hits += sum(key in cache for key in event)
        requests += len(event)
        for key in event:
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits, requests


def lfu_hits(events: list[list[Key]], capacity: int) -> tuple[int, int]:
    """(hits, requests) when the one used least so far goes first; counts outlive eviction."""
    counts, cache = Counter[Key](), set[Key]()
    heap, hits, requests = list[tuple[int, Key]](), 0, 0
    for event in events:
        hits += sum(key in cache for key in event)
        requests += len(event)
        counts.update(event)
        cache.update(event)
        for key in event:
            heapq.heappush(heap, (counts[key], key))
        kept = list[tuple[int, Key]]()
        while len(cache) > capacity:
            count, key = heapq.heappop(heap)
            if key not in cache or counts[key] != count:
                continue
            if key in event:
                kept.append((count, key))
            else:
                cache.remove(key)
        for entry in kept:
            heapq.heappush(heap, entry)
    return hits, requests


def stream_rate(routings: list[Routing], cycles: float, replay: Replay) -> float:
    """Percent of requests that hit over texts one after another, the cache kept between them."""
    events = [event for one in routings for event in one.events()]
    hits, requests = replay(events, int(cycles * routings[0].cycle))
    return 100 * hits / requests


def belady_hits(events: list[list[Key]], capacity: int) -> tuple[int, int]:
    """(hits, requests) when the one needed last goes first, never one of the same event."""
    following = _next_uses(events)
    cache, heap, hits, requests = dict[Key, int](), list[tuple[int, Key]](), 0, 0
    for event, nexts in zip(events, following, strict=True):
        hits += sum(key in cache for key in event)
        requests += len(event)
        for key, after in zip(event, nexts, strict=True):
            cache[key] = after
            heapq.heappush(heap, (-after, key))
        kept = list[tuple[int, Key]]()
        while len(cache) > capacity:
            after, key = heapq.heappop(heap)
            if cache.get(key) != -after:
                continue
            if key in event:
                kept.append((after, key))
            else:
                del cache[key]
        for entry in kept:
            heapq.heappush(heap, entry)
    return hits, requests


def _next_uses(events: list[list[Key]]) -> list[list[int]]:
    """For each request the number of the event that asks for the same expert next."""
    seen, out = dict[Key, int](), list[list[int]]()
    for place in range(len(events) - 1, -1, -1):
        out.append([seen.get(key, len(events)) for key in events[place]])
        seen.update((key, place) for key in events[place])
    return out[::-1]


def hit_rates(routings: list[Routing]) -> dict[str, float]:
    """Percent of requests that hit, each text from an empty cache, at capacities in cycles."""
    rates = dict[str, float]()
    for name, replay in (("LRU", lru_hits), ("LFU", lfu_hits), ("Belady", belady_hits)):
        for cycles in CYCLES:
            pairs = [replay(one.events(), int(cycles * one.cycle)) for one in routings]
            hits, requests = map(sum, zip(*pairs, strict=True))
            rates[f"{name} hits at {cycles:g} cycles, %"] = 100 * hits / requests
    return rates


def _use(routings: Iterable[Routing]) -> list[Counter[int]]:
    """How often each expert is chosen, by layer."""
    counts = list[Counter[int]]()
    for routing in routings:
        for layers in routing.chosen:
            while len(counts) < len(layers):
                counts.append(Counter())
            for count, experts in zip(counts, layers, strict=True):
                count.update(experts)
    return counts


def _entropy(counts: list[Counter[int]], num_experts: int) -> float:
    shares = [[n / sum(count.values()) for n in count.values()] for count in counts]
    entropies = [-sum(p * math.log(p) for p in layer) for layer in shares]
    return sum(entropies) / len(entropies) / math.log(num_experts)


def use_of_experts(routings: list[Routing]) -> dict[str, float]:
    """Entropy over one text (1 is even), experts no text used, weight of the best of the chosen."""
    num_experts = routings[0].num_experts
    whole = _use(routings)
    facts = {
        "entropy of expert use in a text (of 1)": sum(
            _entropy(_use([one]), num_experts) for one in routings
        )
        / len(routings),
        "experts never used": float(sum(num_experts - len(count) for count in whole)),
    }
    tops = [
        max(layer) / sum(layer)
        for one in routings
        for token in one.weights or ()
        for layer in token
    ]
    if tops:
        facts["best expert's share of the weight, %"] = 100 * sum(tops) / len(tops)
    return facts
