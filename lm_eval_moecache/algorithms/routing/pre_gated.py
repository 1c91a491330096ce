"""Pre-gated: a layer's experts are decided one layer early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache.algorithms.cheapest import ranking
from lm_eval_moecache.algorithms.routing.base import RoutingOverRows
from lm_eval_moecache.records.arrays import FloatArray, each_token
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.selection import Selection


@dataclass(eq=False, kw_only=True)
class PreGated(RoutingOverRows):
    """Selects each layer's experts by its gate applied to the previous layer's input.

    Pre-gated MoE (Hwang et al. 2024), as described in CommitMoE section 1: "each layer's router
    determine[s] the expert selection for the next layer". The original retrains the model for
    this; here the gates are the model's own, which measures the idea without retraining. The first
    layer is routed as usual, and weights come from the layer's own logits. It can be combined only
    with a prefetcher on the same gates: `next_gate` loads exactly the selected experts. If a router
    selects by more than its logits, that part is ignored.
    Cost: O(E log E) per token.
    """

    name: ClassVar[str] = "pre_gated"
    source: ClassVar[str] = "Hwang et al. 2024 (Pre-gated MoE), as in CommitMoE section 1"
    uses_logits: ClassVar[bool] = True
    depth = 1
    pairs_with: ClassVar[Mapping[str, tuple[str, ...]]] = {"prefetch": ("none", "next_gate")}
    pairs_because: ClassVar[str] = (
        "the next layer's experts are decided already: next_gate loads exactly those, "
        "while any other prefetcher would guess at what is known"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._decided: FloatArray | None = None
        """Of all rows alike: the layer before has decided it in the same pass."""

    def on_pass(self, pass_index: int) -> None:
        self._decided = None

    def choose(self, event: Event) -> Selection | None:
        decided, self._decided = self._decided, event.predicted.get(event.layer + 1)
        if decided is None:
            return None
        top = np.argsort(-decided, axis=-1, kind="stable")[:, : self.geometry.top_k]
        is_chosen = np.zeros(decided.shape, dtype=bool)
        is_chosen[each_token(top), top] = True
        ranked = ranking(event)
        experts = ranked[is_chosen[each_token(ranked), ranked]].reshape(top.shape)
        return None if (experts == event.experts).all() else Selection(experts)
