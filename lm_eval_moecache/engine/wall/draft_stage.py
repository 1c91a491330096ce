"""Drafting in real time: the draft computes on the device while the worker brings experts near."""

from __future__ import annotations

from lm_eval_moecache.algorithms.prefetch.base import DraftStagePrefetch
from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.engine.prefetches import Prefetches
from lm_eval_moecache.engine.wall.clock import WallClock
from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.engine.wall.traffic import Traffic
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.draft import Draft

_NOTHING: frozenset[int] = frozenset()


class WallDraftStage(DraftStage):
    """Gives what is predicted to the worker, and lets it go on whenever the draft reports.

    SP-MoE's pipelined runtime (section 3.3): the worker takes the experts that a layer asked for
    together (`io=batched`: all of them are issued at once) or one by one, while the draft goes on;
    with `trigger=vanilla` the draft waits after each layer until they are there.
    """

    def __init__(
        self,
        draft: Draft,
        link: WallLink,
        clock: WallClock,
        traffic: Traffic,
        prefetches: Prefetches,
        prefetch: DraftStagePrefetch | None,
    ) -> None:
        super().__init__(draft, clock, prefetches, prefetch)
        self._link, self._traffic = link, traffic

    def predict(self, layer: int, logits: FloatArray) -> None:
        super().predict(layer, logits)
        self._go_on()

    def _compute_dense(self, layer: int, num_tokens: int) -> None:
        self._go_on()

    def _compute_gate(self) -> None:
        self._go_on()

    def _compute_experts(self, layer: int, num_experts: int, num_tokens: int) -> None:
        self._go_on()
        if self._prefetch is None or not self._prefetch.synchronous:
            return
        start_s = self._clock.now
        # What finds no room is left to its event, which demands it.
        while issued := self._link.issued():
            self._traffic.settle(self._link.wait_for(issued))
            self._go_on()
        self.stall_s += self._clock.now - start_s

    def _go_on(self) -> None:
        if self._link.active:
            self._link.launched()
            self._traffic.drain(_NOTHING, 0)
