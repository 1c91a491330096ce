"""LRU by the last token that needed an expert: prompt-tail promotion."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import RecencyRule
from lm_eval_moecache.records.event import Event


class TailLRU(RecencyRule):
    """Evicts the least recently used expert, where recency is that of the last token to need it.

    BigMoeOnEdge#22: every use by a prompt's token promotes, while `lru` counts only the first, so
    that the experts of the prompt's last tokens are the most recent when decoding begins. In events
    of one token it is `lru`. Cost: O(tokens x k) per event, O(1) beside pinned keys per victim.
    """

    source: ClassVar[str] = "BigMoeOnEdge#22 (keep the prompt tail's experts hot)"

    def on_event(self, event: Event) -> None:
        if event.num_tokens == 1:
            super().on_event(event)
            return
        base, last = event.layer * self.geometry.num_experts, dict[int, None]()
        for expert in event.experts[event.experts >= 0].ravel().tolist():
            last.pop(base + expert, None)
            last[base + expert] = None
        for key in last:
            self.touch(key)

    def victim(self, pinned: Container[int], layer: int) -> int | None:
        return self.oldest(pinned)
