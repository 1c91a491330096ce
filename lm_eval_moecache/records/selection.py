"""A changed choice of experts, as routing and miss algorithms return it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray
from lm_eval_moecache.records.event import DROPPED


@dataclass(frozen=True, slots=True)
class Selection:
    """A changed choice of experts, [tokens, top_k], weighted from the unmodified logits.

    `keep` is False where an expert is dropped: the others keep their weights, unless `renormalize`
    (of all tokens, or [tokens]) divides its weight among them. `weigh_as` names the experts whose
    weights are used where they are not the executed ones. `weights` are set by algorithms with a
    rule of their own, on the scale of the router's; NaN leaves an entry to the model family's rule.
    """

    experts: IntArray
    keep: BoolArray | None = None
    renormalize: bool | BoolArray = False
    weigh_as: IntArray | None = None
    weights: FloatArray | None = None

    def changes(self, experts: IntArray) -> bool:
        """Whether others than these experts are executed, in any place."""
        is_other = self.experts != experts
        return bool((is_other if self.keep is None else is_other | ~self.keep).any())

    @staticmethod
    def join(experts: IntArray, parts: Sequence[tuple[int, Selection | None]]) -> Selection | None:
        """Stack selections, each with its number of tokens; None is the router's own, `experts`."""
        changed = [part for _, part in parts if part is not None]
        if not changed or len(parts) == 1:
            return changed[0] if changed else None
        chosen, keep, weigh_as = experts.copy(), np.ones(experts.shape, dtype=bool), experts.copy()
        weights = np.full(experts.shape, np.nan, dtype=np.float32)
        renormalize = np.zeros(len(experts), dtype=bool)
        start = 0
        for num_tokens, part in parts:
            own = slice(start, start + num_tokens)
            start += num_tokens
            if part is not None:
                chosen[own], renormalize[own] = part.experts, part.renormalize
                weigh_as[own] = part.experts if part.weigh_as is None else part.weigh_as
                if part.keep is not None:
                    keep[own] = part.keep
                if part.weights is not None:
                    weights[own] = part.weights
        own_weights = weights if any(part.weights is not None for part in changed) else None
        return Selection(chosen, keep, renormalize, weigh_as, own_weights)

    def after(self, earlier: Selection) -> Selection:
        """Return this change applied on top of an earlier one, whose drops stand."""
        weights = self.weights
        if weights is None and earlier.weights is not None:
            # A replaced expert's weight goes with it, unless its replacement is weighed as it.
            source = self.experts if self.weigh_as is None else self.weigh_as
            is_unchanged = (source == earlier.experts) | (source == DROPPED)
            weights = np.where(is_unchanged, earlier.weights, np.nan).astype(np.float32)
        if earlier.keep is None:
            return self if weights is None else replace(self, weights=weights)
        weigh_as, renormalize = self.weigh_as, earlier.renormalize
        if np.any(self.renormalize):
            # Of the tokens that this change touches: the others' drops are the earlier one's alone.
            touched = self.experts != earlier.experts
            touched |= False if self.keep is None else ~self.keep
            touched |= False if weigh_as is None else weigh_as != self.experts
            renormalize = renormalize | ((touched & earlier.keep).any(-1) & self.renormalize)
        if weigh_as is not None:
            weigh_as = np.where(earlier.keep, weigh_as, earlier.experts)
        return Selection(
            experts=np.where(earlier.keep, self.experts, earlier.experts),
            keep=earlier.keep if self.keep is None else earlier.keep & self.keep,
            renormalize=renormalize,
            weigh_as=weigh_as,
            weights=weights,
        )
