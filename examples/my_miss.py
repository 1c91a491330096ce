"""A miss rule of one's own: an absent expert of little weight is left out, the others are loaded.

Run it from this folder: `moecache replay TRACE --miss my_miss.DropLight --miss.least=0.05`.
"""

from dataclasses import dataclass

from lm_eval_moecache import Event, Miss, Selection


@dataclass(eq=False, kw_only=True)
class DropLight(Miss):
    """Leaves out absent experts below a weight. Parameters: least, the weight to load (0.1)."""

    source = "the worked example of docs/algorithms.md"
    uses_weights = True  # without it, `event.weights` has no rows

    least: float = 0.1

    def choose(self, event: Event) -> Selection | None:
        keep = ~event.is_missing | (event.weights >= self.least)  # [tokens, top_k]
        return None if keep.all() else Selection(event.experts, keep)
