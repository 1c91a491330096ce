"""Frequency and layer: rarely used experts of distant layers leave first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction


def uses_by_nearness(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    # Multiplied by the number of layers, to compare integers: a quotient could tie by rounding.
    ahead = (home.index - now.layer) % now.num_layers
    return float(expert.uses * (now.num_layers - ahead)), 0.0


def uses_by_shallowness(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    return float(expert.uses * (now.num_layers - home.index)), 0.0


@dataclass(eq=False, kw_only=True)
class FrequencyLayer(RankedEviction):
    """Evicts the expert with the lowest product of activation frequency and nearness of its layer.

    EdgeMoE (Yi et al. 2023), which according to BuddyMoE section 6 improves upon LRU and LFU by
    "a heuristic that considers both activation frequency and layer index". The formula is our
    reading: count x (1 - d / layers), where d is how many layers ahead the expert's next turn is,
    wrapping around at the end of the pass (`layer=forward`), or its layer index (`layer=index`,
    which favours shallow layers). Counts are events over the whole run; experts never used leave
    first; ties go to the smaller key.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    source: ClassVar[str] = "Yi et al. 2023 (EdgeMoE), as in BuddyMoE section 6"
    compares_layers: ClassVar[bool] = True

    layer: Literal["forward", "index"] = "forward"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rank = uses_by_nearness if self.layer == "forward" else uses_by_shallowness
