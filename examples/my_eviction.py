"""An eviction rule of one's own: who has been needed least since it was loaded leaves first.

Run it from this folder: `moecache replay TRACE --eviction my_eviction.LeastUsed`.
"""

from lm_eval_moecache import Event, Eviction


class LeastUsed(Eviction):
    """Evicts the resident that the fewest events have used since its load, then the oldest."""

    source = "the worked example of docs/algorithms.md"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.uses: dict[int, int] = {}  # in order of loading

    def on_insert(self, key: int, prefetched: bool) -> None:
        self.uses[key] = 0

    def on_event(self, event: Event) -> None:
        self.uses |= {key: self.uses[key] + 1 for key in event.keys if key in self.uses}

    def on_evict(self, key: int) -> None:
        del self.uses[key]

    def victim(self, pinned: set[int], layer: int) -> int | None:
        return min((key for key in self.uses if key not in pinned), key=self.uses.get, default=None)
