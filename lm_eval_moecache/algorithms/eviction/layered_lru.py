"""Layer-wise LRU: the layer with the most residents loses its least recently used expert."""

from __future__ import annotations

from typing import ClassVar

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction


class LayeredLRU(RankedEviction):
    """Keeps one LRU list per layer in a common pool; the longest list loses its oldest expert.

    Engines with one LRU list per layer (`n/layer` here) keep one layer's experts from evicting
    another's, but cannot lend a layer more room. As the eviction of a common pool it gives each
    layer an equal share once the pool is full, whatever the order of accesses: unlike LRU it does
    not lose everything below a cycle. Among equally long lists, that of the layer whose next turn
    is furthest loses. The rule is our reading of "layer-wise LRU"; no paper states a formula.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    source: ClassVar[str] = "layer-wise LRU lists, as in llama.cpp#27861 and mixtral-offloading"
    compares_layers: ClassVar[bool] = True

    @staticmethod
    def rank(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
        away = (home.index - now.layer - 1) % now.num_layers
        return -float(home.held * now.num_layers + away), float(expert.last_use)
