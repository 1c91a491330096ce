"""A routing rule of one's own: a token's lightest expert is left out unless it is in the cache.

Run it from this folder: `moecache replay TRACE --routing my_routing.SpareLightest`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import numpy as np

from lm_eval_moecache import Event, Routing, Selection


class SpareLightest(Routing):
    """Leaves out a token's lightest expert if it is absent; the others share its weight."""

    source: ClassVar[str] = "the worked example of docs/algorithms.md"

    def select(self, event: Event, resident: Collection[int]) -> Selection | None:
        first = event.layer * self.geometry.num_experts  # the key of the layer's expert 0
        keep = np.ones(event.experts.shape, dtype=bool)  # [tokens, top_k], heaviest first
        keep[:, -1] = [first + expert in resident for expert in event.experts[:, -1].tolist()]
        return None if keep.all() else Selection(event.experts, keep, renormalize=True)
