"""Rules that propose the likeliest experts by predicted gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.learned.data_aware import load_data_aware
from lm_eval_moecache.algorithms.learned.predictor import load_predictor
from lm_eval_moecache.algorithms.likeliest import BINS, Likeliest
from lm_eval_moecache.algorithms.prefetch.base import (
    DraftStagePrefetch,
    ScorePrefetch,
    largest,
)
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.artifact import DATA_AWARE, PREDICTOR
from lm_eval_moecache.records.event import PASS_START, Event
from lm_eval_moecache.records.memory import address_of
from lm_eval_moecache.records.ranges import Count, Experts, Positive, Range


@dataclass(eq=False, kw_only=True)
class NextGate(ScorePrefetch):
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

    name: ClassVar[str] = "next_gate"
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


@dataclass(eq=False, kw_only=True)
class Predictor(ScorePrefetch):
    """Proposes each token's k likeliest experts of the next MoE layer by a trained predictor.

    CommitMoE section 4.2: one linear layer on the router's input predicts the same token's next
    layer, two linear layers the next token's first layer. With `routing=standard` it is the paper's
    +Prefetch (section 5.3): mispredicted experts are fetched on demand. With `routing=commit` it
    loads exactly the executed experts. With `loss=bce` it stands for ProMoE (Song et al. 2025),
    whose own loss is in none of the papers here: the binary cross-entropy of the chosen experts is
    our reading. The predictor acts in prefill, too (the union over the tokens), except from its
    last layer to the next pass, as the first generated token's first layer is not predicted.
    Cost: the predictor's own weights and kernels, charged to the clock before the experts run.

    Parameters: profile, a file of `moecache profile predictor` (default: the one that ships for
    the model); loss, with which it was trained (kl); overfetch, experts proposed per token over
    top_k (1.0), rounded up.
    """

    name: ClassVar[str] = "predictor"
    source: ClassVar[str] = "CommitMoE sections 4.2 and 5.3; Song et al. 2025 (ProMoE)"
    depth = 1
    uses_predictor: ClassVar[bool] = True
    artifact_kind: ClassVar[str | None] = PREDICTOR

    profile: str | None = None
    loss: Literal["kl", "bce"] = "kl"
    overfetch: Positive = 1.0

    def __post_init__(self) -> None:
        self.artifact = load_predictor(self.profile, self.loss, self.geometry)
        self.count = self.most(self.overfetch)


Percentile = Annotated[float, Range(" (80 for the 80th, not 0.8)", least=1, most=100)]


@dataclass(eq=False, kw_only=True)
class Score(ScorePrefetch):
    """Proposes the next layer's experts whose gate score exceeds a percentile of the scores.

    SpecMD section 3.1.4 after Zhu et al. 2025: "all experts above a configurable percentile
    threshold (the default is 80th percentile)" of the softmax scores. The paper does not say which
    scores; that the rule adapts the number of experts to the distribution excludes a single token's
    scores (80% of 64 would always leave 13).
    `scope=history`: the percentile of all scores predicted so far for that layer;
    `scope=token`: of the one token's scores, a fixed share. Cost: one gate, charged to the clock.

    The history is a histogram with bins of 1/4096, and the percentile is rounded down to a bin.
    That is fine for usual scores, but coarse where most are tiny: with a router so certain, or so
    many experts, that the percentile lies below 1/4096, the threshold is 0 and every expert is
    proposed. `scope=token` has no such limit.
    """

    name: ClassVar[str] = "score"
    source: ClassVar[str] = "SpecMD section 3.1.4; Zhu et al. 2025"
    remembers: ClassVar[bool] = True
    depth = 1

    percentile: Percentile = 80.0
    scope: Literal["history", "token"] = "history"

    def forget(self) -> None:
        layers = self.geometry.num_layers
        self.counts: IntArray = np.zeros((layers, BINS + 1), np.int64)
        self.places: IntArray = np.zeros((layers, 3), np.int64)
        """The history: see `Proposing.histories`."""

    @cached_property
    def loop(self) -> Likeliest:
        return Likeliest(self.geometry, share=self.percentile / 100)

    def give(self, own: Sequence[Any], logits: FloatArray, is_alone: bool) -> FloatArray:
        scores = super().give(own, logits, is_alone=False)
        if self.scope == "token":
            bars = np.percentile(scores, self.percentile, axis=-1)
            self.loop.give(bars=bars.astype(np.float32))
        else:
            places = [(address_of(rule.counts), address_of(rule.places)) for rule in own]
            self.loop.give(histories=np.array(places))
        return scores


@dataclass(eq=False, kw_only=True)
class DataAware(ScorePrefetch):
    """Proposes each token's k likeliest experts of every layer before the pass begins.

    SiDA (Du et al., MLSys 2024): a network trained offline on a router's choices reads the tokens'
    embeddings and builds a hash table of all layers' experts, from which they are loaded ahead. The
    text was not available; the network follows its abstract and public repository: compression,
    two LSTM stages, sparse attention (sparsemax), a residual of the compressed embedding, heads for
    each MoE layer, trained by distillation of the router's largest logits.
    Deviations: the network is causal, because ours decodes, while SiDA reads whole inputs of an
    encoder; it runs before the pass and not during the previous one, as a decoded token is not
    known sooner; and the router's own choices are executed, so that a wrong prediction costs a load
    where SiDA, which removes its routers, loses accuracy (`routing=commit` measures that).
    Cost: the network's weights and kernels, charged before the first layer.

    Parameters: profile, a file of `moecache profile data_aware` (default: the one that ships for
    the model); overfetch, experts proposed per token and layer over top_k (1.0), rounded up.
    """

    name: ClassVar[str] = "data_aware"
    source: ClassVar[str] = "Du et al. 2024 (SiDA), by its abstract and public repository"
    predicts_pass: ClassVar[bool] = True
    artifact_kind: ClassVar[str | None] = DATA_AWARE

    profile: str | None = None
    overfetch: Positive = 1.0

    def __post_init__(self) -> None:
        self.artifact = load_data_aware(self.profile, self.geometry)
        self.count = self.most(self.overfetch)

    def propose(self, event: Event) -> Sequence[int]:
        return super().propose(event) if event.layer == PASS_START else ()


# Section 3.2 takes one critical expert for Mixtral, whose 336 MB make errors costly, and the top-k
# for Phi-3.5-MoE (150 MB) and DeepSeek-Lite (16 MB). It gives no bound: this lies between.
LARGE_EXPERT_BYTES = 240_000_000

Cutoff = Annotated[int, Range(least=0, most="num_layers", why=", or be auto")]


@dataclass(eq=False, kw_only=True)
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

    name: ClassVar[str] = "draft"
    source: ClassVar[str] = "SP-MoE sections 3.2 and 3.3"
    by_order: ClassVar[bool] = True

    cutoff: Cutoff | Literal["auto"] = "auto"
    critical: Experts | None = None
    io: Literal["batched", "per_expert"] = "batched"
    trigger: Literal["worker", "vanilla"] = "worker"

    def __post_init__(self) -> None:
        large = self.geometry.max_expert_bytes > LARGE_EXPERT_BYTES
        self.num_critical = self.critical or (1 if large else self.geometry.top_k)
        self.batched = self.io == "batched"
        self.synchronous = self.trigger == "vanilla"

    def plan(self, cutoff: int) -> None:
        if self.cutoff == "auto":
            self.cutoff = cutoff

    def propose_draft(self, layer: int, logits: FloatArray) -> Sequence[int]:
        return largest(layer, logits[0], self.num_critical)
