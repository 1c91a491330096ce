"""The bound of prefetching: what the next events will need, as far as the link can carry it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.future import Future


class Oracle(PrefetchAlgorithm):
    """Proposes exactly the experts of the next `horizon` events, the nearest first.

    It knows the events to come, so only a replay can run it, and it predicts for free. What
    stays late under it is what the link cannot carry in time. `horizon`: events (layers) ahead,
    at most one pass. Cost: O(horizon * top_k) per event.
    """

    source: ClassVar[str] = "the bound that needs the future; no paper"
    is_offline: ClassVar[bool] = True

    def __init__(self, geometry: Geometry, *, seed: int = 0, horizon: int = 1) -> None:
        super().__init__(geometry, seed=seed)
        if not 1 <= horizon <= geometry.num_layers:
            raise ValueError(
                f"prefetch.horizon={horizon} must lie between 1 and the {geometry.num_layers} "
                "layers of the model."
            )
        self.horizon = horizon

    def prepare(self, future: Future) -> None:
        self._future = future

    def propose(self, event: Event) -> Sequence[int]:
        now = event.pass_index * self.geometry.num_layers + event.layer
        keys: list[int] = []
        for ahead in range(now + 1, now + 1 + self.horizon):
            keys += self._future.keys_of(ahead)
        # Events of one pass lie in different layers, so their keys are different.
        return keys
