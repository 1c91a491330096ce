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
    divides its weight among them. `weigh_as` names the experts whose weights are used where they
    are not the executed ones. `weights` are set by algorithms with a rule of their own, on the
    scale of the router's; NaN leaves an entry to the model family's rule.
    """

    experts: IntArray
    keep: BoolArray | None = None
    renormalize: bool = False
    weigh_as: IntArray | None = None
    weights: FloatArray | None = None

    @staticmethod
    def join(experts: IntArray, rows: Sequence[Selection | None]) -> Selection | None:
        """Stack the selections of single tokens; None stands for the router's choice, `experts`."""
        changed = [row for row in rows if row is not None]
        if not changed:
            return None
        chosen, keep, weigh_as = experts.copy(), np.ones(experts.shape, dtype=bool), experts.copy()
        weights = np.full(experts.shape, np.nan, dtype=np.float32)
        for token, row in enumerate(rows):
            if row is not None:
                chosen[token] = row.experts[0]
                weigh_as[token] = row.experts[0] if row.weigh_as is None else row.weigh_as[0]
                if row.keep is not None:
                    keep[token] = row.keep[0]
                if row.weights is not None:
                    weights[token] = row.weights[0]
        own_weights = weights if any(row.weights is not None for row in changed) else None
        return Selection(
            chosen, keep, any(row.renormalize for row in changed), weigh_as, own_weights
        )

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
        weigh_as = self.weigh_as
        if weigh_as is not None:
            weigh_as = np.where(earlier.keep, weigh_as, earlier.experts)
        return Selection(
            experts=np.where(earlier.keep, self.experts, earlier.experts),
            keep=earlier.keep if self.keep is None else earlier.keep & self.keep,
            renormalize=earlier.renormalize or self.renormalize,
            weigh_as=weigh_as,
            weights=weights,
        )
