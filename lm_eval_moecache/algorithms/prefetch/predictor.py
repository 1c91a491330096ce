"""Predictor prefetch: trained networks predict the next layer's router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.prefetch.base import LikeliestPrefetch
from lm_eval_moecache.records.artifact import PREDICTOR
from lm_eval_moecache.records.predictor import load_predictor
from lm_eval_moecache.records.ranges import Positive


@dataclass(eq=False, kw_only=True)
class Predictor(LikeliestPrefetch):
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
