"""Speculative prefetch: the next layers' gates on the current hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.prefetch.base import LikeliestPrefetch
from lm_eval_moecache.records.ranges import Count, Positive


@dataclass(eq=False, kw_only=True)
class NextGate(LikeliestPrefetch):
    """Applies the gates of the next `depth` layers to this layer's input and takes the top-k.

    SpecMD section 3.1.4 (top-k with overfetch); the idea is Eliseev & Mazur's. `overfetch`
    multiplies the number of experts per token (1.5 makes OLMoE's 8 into 12, rounded up). In a pass
    of several tokens the union over the tokens is proposed, the experts with the largest summed
    gate probability first: the papers give no order. Cost: one gate per layer ahead, charged to
    the clock.

    Transfers begin as soon as the gates have run; with `issue=after_layer` once this layer's
    experts are executed, so that only the next layer's attention hides them: AdapMoE, which "delays
    the actual prefetch until just before the next layer's experts are required" (SP-MoE section
    3.3). HOBBIT prefetches "multiple layers ahead" (SpecMD section 2), which is `depth`.
    """

    source: ClassVar[str] = "SpecMD section 3.1.4; Eliseev & Mazur 2023"

    overfetch: Positive = 1.0
    depth: Count = 1
    issue: Literal["at_once", "after_layer"] = "at_once"

    def __post_init__(self) -> None:
        # With a single MoE layer there is no next one, and nothing is ever predicted.
        layers = self.geometry.num_layers
        if self.depth >= layers > 1:
            raise ValueError(
                f"prefetch.depth={self.depth} reaches past the last of the {layers} MoE "
                f"layers of this model. Allowed: 1 to {layers - 1}."
            )
        self.after_layer = self.issue == "after_layer"
        self.count = self.most(self.overfetch)
