"""Data-aware prefetch: predicts all layers' experts of a pass from its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm, most_likely
from lm_eval_moecache.records.artifact import DATA_AWARE
from lm_eval_moecache.records.data_aware import load_data_aware
from lm_eval_moecache.records.event import PASS_START, Event
from lm_eval_moecache.records.ranges import Positive


@dataclass(eq=False, kw_only=True)
class DataAware(PrefetchAlgorithm):
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

    source: ClassVar[str] = "Du et al. 2024 (SiDA), by its abstract and public repository"
    predicts_pass: ClassVar[bool] = True
    artifact_kind: ClassVar[str | None] = DATA_AWARE

    profile: str | None = None
    overfetch: Positive = 1.0

    def __post_init__(self) -> None:
        self.artifact = load_data_aware(self.profile, self.geometry)
        self._count = self.most(self.overfetch)

    def propose(self, event: Event) -> Sequence[int]:
        keys: list[int] = []
        if event.layer == PASS_START:
            for layer, logits in sorted(event.predicted.items()):
                keys += most_likely(layer, logits, self._count)
        return keys
