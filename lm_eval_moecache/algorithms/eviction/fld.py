"""Furthest layer distance."""

from __future__ import annotations

from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.features import LAST_USE, Features
from lm_eval_moecache.algorithms.ranked import RankedEviction
from lm_eval_moecache.records.geometry import Geometry


def furthest_either_way(f: Features, key: int, home: int, layer: int) -> tuple[float, float]:
    # Of two layers equally far, the earlier one goes first.
    return float((home > layer) - 2 * abs(home - layer)), float(f.keys[key, LAST_USE])


def furthest_ahead(f: Features, key: int, home: int, layer: int) -> tuple[float, float]:
    return float(-((home - layer) % len(f.layers))), float(f.keys[key, LAST_USE])


class FLD(RankedEviction):
    """Evicts an expert of the layer furthest from the one being served.

    SpecMD appendix B after HOBBIT: "the distance between each cached expert's layer and the
    current inference layer, evicting experts from the farthest layers first". Read as the
    absolute difference (`distance=absolute`), earlier layers first among equals. As near layers
    are kept because they "are more likely to be needed soon", `forward` counts how many
    layers ahead the expert's next turn is, around the end of the pass: the layer just served is
    then the furthest. Inside a layer the one longest unused goes first; the paper leaves it open.
    Cost: O(1) per call, O(layers) where the furthest layers are pinned, beside pinned keys.
    """

    source: ClassVar[str] = "SpecMD appendix B (FLD); HOBBIT (Tang et al. 2024)"
    compares_layers: ClassVar[bool] = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        seed: int = 0,
        distance: Literal["absolute", "forward"] = "absolute",
    ) -> None:
        super().__init__(geometry, seed=seed)
        self.rank = furthest_either_way if distance == "absolute" else furthest_ahead
