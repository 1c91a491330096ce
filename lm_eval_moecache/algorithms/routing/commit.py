"""Commit: the predicted experts are executed, whatever the router chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np

from lm_eval_moecache.algorithms.routing.base import RoutingOverRows
from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray, each_token
from lm_eval_moecache.records.event import DECODE, UNSEEN_SCORES, Event
from lm_eval_moecache.records.ranges import Positive, Range
from lm_eval_moecache.records.selection import Selection

MostRight = Annotated[
    int, Range(least=0, below="top_k", why=": where all are right nothing is replaced")
]


@dataclass(eq=False, kw_only=True)
class Commit(RoutingOverRows):
    """Executes the experts predicted at the previous layer, without fallback.

    CommitMoE sections 4.1 to 4.3. A token's first layer is predicted at the previous token's last
    layer; that of the first generated token is routed as usual, and so is all of prefill with
    `phases=decode`, the paper's form. In a batch the first layer is also routed as usual when a
    row has ended since (beams that change places are not followed). The predictions are logits: if
    a router selects by more than its logits, that part is ignored.

    `scores`: whose scores weigh the experts, by the family's rule. The router's "are only used by"
    OWA (section 4.1), so the default is the predictor's; `router` is the other reading, and the
    one for sigmoid routers, as a predictor's logits are correct only up to a constant.
    `weights=owa`: where trigger_min to trigger_max of a token's experts were predicted correctly,
    eq. 5 and 6 adjust the weights. `tokens=mispredicted` executes predictions only where at most
    `most_right` were correct, for the analysis of Table 1: it needs the router's choice. Cost:
    O(E log E) per token.

    Parameters: scores; weights; tokens; alpha1, alpha2 (1.0, "neutral"; the paper's range is 1.0 to
    1.4); trigger_min, trigger_max (top_k - 2 and top_k - 1, the paper's values for its models);
    most_right (0, as in Table 1; with many experts per token, 0 correct predictions are rare).
    """

    name: ClassVar[str] = "commit"
    source: ClassVar[str] = "CommitMoE sections 4.1 to 4.3, eq. 5 and 6"
    uses_logits: ClassVar[bool] = True
    uses_weights: ClassVar[bool] = True
    depth = 1
    pairs_with: ClassVar[Mapping[str, tuple[str, ...]]] = {"prefetch": ("predictor",)}
    pairs_because: ClassVar[str] = "what is executed is what the trained predictor says"

    scores: Literal["predicted", "router"] = "predicted"
    weights: Literal["plain", "owa"] = "plain"
    tokens: Literal["all", "mispredicted"] = "all"
    alpha1: Positive | None = None
    alpha2: Positive | None = None
    trigger_min: int | None = None
    trigger_max: int | None = None
    most_right: MostRight | None = None

    def __post_init__(self) -> None:
        for name in ("alpha1", "alpha2", "trigger_min", "trigger_max"):
            self.only_with(name, weights="owa")
        self.only_with("most_right", tokens="mispredicted")
        if self.weights == "owa" and self.tokens == "mispredicted":
            raise ValueError(
                "routing.tokens='mispredicted' cannot be combined with routing.weights='owa': OWA "
                "is for predictions that are right in part."
            )
        top_k = self.geometry.top_k
        least = max(top_k - 2, 1) if self.trigger_min is None else self.trigger_min
        most = max(top_k - 1, 1) if self.trigger_max is None else self.trigger_max
        self.triggers = least, most
        """OWA acts where so many of a token's experts were predicted correctly."""
        if self.weights == "owa" and not 1 <= least <= most < top_k:
            raise ValueError(
                f"routing.trigger_min={least} and trigger_max={most} must lie between 1 and "
                f"top_k - 1 = {top_k - 1}: OWA is for predictions that are right in part."
            )
        super().__post_init__()

    def forget(self) -> None:
        self.number = -1
        """Of the event that is decided, or -1."""
        self.decided: FloatArray = UNSEEN_SCORES
        """The logits by which it is, [tokens, experts]."""

    def choose(self, event: Event) -> Selection | None:
        num_layers, sizes = self.geometry.num_layers, event.sizes
        ahead = event.predicted.get((event.layer + 1) % num_layers)
        is_decided, decided = np.zeros((len(event.logits), 1), bool), np.zeros_like(event.logits)
        start = 0
        for rule, index, size in zip(event.own, event.passes, sizes, strict=True):
            number, own = index * num_layers + event.layer, slice(start, start + size)
            if rule.number == number and len(rule.decided) == size:
                is_decided[own], decided[own] = True, rule.decided
            rule.number = -1 if ahead is None else number + 1
            rule.decided = UNSEEN_SCORES if ahead is None else ahead[own].copy()
            start += size
        if not is_decided.any() or (event.layer == 0 and event.phase != DECODE):
            return None
        best = np.argsort(-decided, axis=-1, kind="stable")[:, : self.geometry.top_k]
        weights, is_used = self._weigh(event, decided, best), is_decided
        if self.tokens == "mispredicted":
            found = _right(best, event.experts).sum(axis=-1, keepdims=True)
            is_used = is_used & (found <= (self.most_right or 0))
        if not is_used.all():
            best = np.where(is_used, best, event.experts)
            weights = None if weights is None else np.where(is_used, weights, np.float32(np.nan))
        return _heaviest_first(event, best, weights, is_decided)

    def _weigh(self, event: Event, decided: FloatArray, best: IntArray) -> FloatArray | None:
        """Return the weights [tokens, top_k], or None for those of the router's logits."""
        if (self.scores, self.weights) == ("router", "plain"):
            return None
        plain = event.weigh(decided if self.scores == "predicted" else event.logits, best)
        return plain if self.weights == "plain" else self._owa(event, best, plain)

    def _owa(self, event: Event, best: IntArray, plain: FloatArray) -> FloatArray:
        """Adjust the weights [tokens, top_k] of the executed experts by eq. 5 and 6."""
        true = np.zeros(event.logits.shape)
        each = each_token(best)
        true[each, event.experts] = event.weights
        right = _right(best, event.experts)
        own = true[each, best] * right
        total = true.sum(axis=-1, keepdims=True)
        # A token without a correct prediction is never triggered; this avoids its 0 / 0.
        kept = np.maximum(own.sum(axis=-1, keepdims=True), 1e-20)
        shared = np.where(right, own * (1 + (total - kept) / kept) * (self.alpha1 or 1), plain)
        scaled = shared * total / np.maximum(shared.sum(axis=-1, keepdims=True), 1e-20)
        count = right.sum(axis=-1, keepdims=True)
        least, most = self.triggers
        triggered = (count >= least) & (count <= most)
        return np.where(triggered, scaled * (self.alpha2 or 1), plain).astype(np.float32)


def _heaviest_first(
    event: Event, best: IntArray, weights: FloatArray | None, is_decided: BoolArray
) -> Selection:
    """Sort the experts by weight, descending, as miss algorithms and caches expect them.

    Those of tokens that are not decided [tokens, 1] stay in the router's order.
    """
    ruled = event.weigh(event.logits, best)
    weighed = ruled if weights is None else np.where(np.isnan(weights), ruled, weights)
    weighed = np.where(is_decided, weighed, 0)
    each, order = each_token(best), np.argsort(-weighed, axis=-1, kind="stable")
    return Selection(best[each, order], weights=None if weights is None else weights[each, order])


def _right(best: IntArray, experts: IntArray) -> BoolArray:
    """Return a mask of the predicted experts [tokens, top_k] that the router chose as well."""
    return np.asarray((best[:, :, None] == experts[:, None, :]).any(axis=-1))
