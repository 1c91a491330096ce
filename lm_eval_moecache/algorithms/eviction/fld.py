"""Furthest layer distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction


def furthest_either_way(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    # Of two layers equally far, the earlier one goes first.
    ahead = home.index - now.layer
    return float((ahead > 0) - 2 * abs(ahead)), float(expert.last_use)


def furthest_ahead(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    return float(-((home.index - now.layer) % now.num_layers)), float(expert.last_use)


@dataclass(eq=False, kw_only=True)
class FLD(RankedEviction):
    """Evicts an expert of the layer furthest from the one being served.

    SpecMD appendix B after HOBBIT: "the distance between each cached expert's layer and the
    current inference layer, evicting experts from the farthest layers first". Read as the
    absolute difference (`distance=absolute`), earlier layers first among equals. As near layers
    are kept because they "are more likely to be needed soon", `forward` counts how many layers
    ahead the expert's next turn is, wrapping around at the end of the pass: the layer just served
    is then the furthest. Within a layer the longest-unused expert goes first; the paper leaves this
    open.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    source: ClassVar[str] = "SpecMD appendix B (FLD); HOBBIT (Tang et al. 2024)"
    compares_layers: ClassVar[bool] = True

    distance: Literal["absolute", "forward"] = "absolute"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rank = furthest_either_way if self.distance == "absolute" else furthest_ahead
