"""Draft-stage prefetch: the draft model's attention outputs through the target's gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from lm_eval_moecache.algorithms.prefetch.base import DraftStagePrefetch, most_likely
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ranges import Experts, Range

# Section 3.2 takes one critical expert for Mixtral, whose 336 MB make errors costly, and the top-k
# for Phi-3.5-MoE (150 MB) and DeepSeek-Lite (16 MB). It gives no bound: this lies between.
LARGE_EXPERT_BYTES = 240_000_000

Cutoff = Annotated[int, Range(least=0, most="num_layers", why=", or be auto")]


class DraftPrefetch(DraftStagePrefetch):
    """Prefetches the critical experts of the coming pass while the draft model drafts.

    SP-MoE sections 3.2 and 3.3 (Algorithms 1 and 2): each draft layer's attention output goes
    through the gate of the target's layer, and the `critical` experts with the largest scores
    are queued unless they are cached. Only the layers before `cutoff` are covered; `auto` takes
    the most that memory and the overlap of loading with drafting allow (`engine.draft_stage`).
    With `trigger=worker` loading runs continuously; with `vanilla` the draft waits after each layer
    for that layer's requests. With `io=batched` the experts of a layer move under one latency. The
    paper's queue is first in, first out; here the earliest layer goes first, like all prefetches on
    this link, and experts still queued at their event are loaded on demand.
    Under `--model moecache` the draft reads each token before the model does and drafts nothing:
    any trained draft then serves as an expert predictor only. MTP heads would serve, too, but
    transformers drops them when it loads a model.

    Parameters: cutoff, 0 to the number of MoE layers or auto; critical, experts per layer and
    token (default: the top-k, 1 where an expert is larger than 240 MB); io; trigger.
    Cost: one gate and O(E log E) per layer and drafted token.
    """

    source: ClassVar[str] = "SP-MoE sections 3.2 and 3.3"
    by_order: ClassVar[bool] = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        seed: int = 0,
        cutoff: Cutoff | Literal["auto"] = "auto",
        critical: Experts | None = None,
        io: Literal["batched", "per_expert"] = "batched",
        trigger: Literal["worker", "vanilla"] = "worker",
    ) -> None:
        super().__init__(geometry, seed=seed)
        if critical is None:
            large = geometry.max_expert_bytes > LARGE_EXPERT_BYTES
            critical = 1 if large else geometry.top_k
        self.cutoff = cutoff
        self.critical = critical
        self.batched = io == "batched"
        self.synchronous = trigger == "vanilla"

    def plan(self, cutoff: int) -> None:
        if self.cutoff == "auto":
            self.cutoff = cutoff

    def propose_draft(self, layer: int, logits: FloatArray) -> Sequence[int]:
        return most_likely(layer, logits, self.critical)
