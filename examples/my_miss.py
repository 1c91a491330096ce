"""A miss rule of one's own: an absent expert of little weight is left out, the others are loaded.

Run it from this folder: `moecache replay TRACE --miss my_miss.DropLight --miss.least=0.05`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lm_eval_moecache import Event, Fetch, Miss, Resolution, Selection


@dataclass(eq=False, kw_only=True)
class DropLight(Miss):
    """Leaves out absent experts below a weight. Parameters: least, the weight to load (0.1)."""

    source: ClassVar[str] = "the worked example of docs/algorithms.md"
    uses_weights: ClassVar[bool] = True  # without it, `event.weights` has no rows

    least: float = 0.1

    def resolve(
        self, event: Event, absent: Sequence[int], resident: Mapping[int, int]
    ) -> Resolution | None:
        keys = event.experts + event.layer * self.geometry.num_experts  # [tokens, top_k]
        keep = ~np.isin(keys, absent) | (event.weights >= self.least)
        needed = set(keys[keep].tolist())
        fetch = [Fetch(key) for key in absent if key in needed]
        return None if keep.all() else Resolution(fetch, Selection(event.experts, keep))
