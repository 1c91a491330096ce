"""Least-Stale: stale experts leave first, those of layers already served before all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.features import Expert, Layer, Now
from lm_eval_moecache.algorithms.ranked import RankedEviction


def protecting(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    """Stale before current, left layers before coming ones; then the key not wanted for longest."""
    cycle = 2 * now.num_layers
    turn = home.index if home.index <= now.layer else cycle - home.index
    age = expert.loaded if now.parameter else expert.wanted
    return float(turn + cycle * (expert.current == now.pass_index)), float(age)


def by_layer(expert: Expert, home: Layer, now: Now) -> tuple[float, float]:
    is_current = expert.current == now.pass_index
    age = expert.loaded if now.parameter else expert.wanted
    return float(home.index + now.num_layers * is_current), float(age)


@dataclass(eq=False, kw_only=True)
class LeastStale(RankedEviction):
    """Evicts stale experts before current ones; stale ones left of the running layer go first.

    SpecMD section 4.2: an expert is *current* once the pass in progress used it or a prefetch
    selected it, and *stale* if its last use lies in an earlier pass; it is *left* if its layer has
    already been reached. An expert prefetched for the next pass stays current in it.
    Public readings differ in whether stale experts of coming layers leave like the others
    ("within each queue, FIFO ordering based on layer position"). `protect=coming` follows figure 3
    and appendix A.3 ("protecting experts needed for upcoming layers"): stale experts on the left
    go, the first layer first; those of coming layers only when no others are stale, the furthest
    layer first. Current experts follow in the same order. `protect=none` takes all stale experts
    in layer order, so the layers after the running one lose theirs just before their turn.

    The order within a layer is open, too: `order=last_use` takes the longest unused expert,
    `order=fifo` the first loaded.
    Cost: O(layers + residents of a layer) per victim, O(1) per use.
    """

    source: ClassVar[str] = "SpecMD section 4.2, figure 3, appendix A.3"

    protect: Literal["coming", "none"] = "coming"
    order: Literal["last_use", "fifo"] = "last_use"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rank = protecting if self.protect == "coming" else by_layer
        self.parameter = float(self.order == "fifo")
