"""The routing axis: logits in, a changed selection (or none) out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.core.records import Event, Geometry, Selection


class RoutingAlgorithm(ABC):
    """Decides which experts each token is sent to, seeing what is resident.

    The weights of a changed selection are not its business: they come from the router's
    unmodified logits by the model family's own rule.
    """

    source: ClassVar[str]
    """The paper and section it implements."""
    is_lossless: ClassVar[bool] = False
    """Whether the selection is always the router's own, so that results cannot change."""
    uses_logits: ClassVar[bool] = False
    """Whether `Event.experts`, `Event.weights` and `Event.logits` are needed."""

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        self.geometry = geometry
        self.seed = seed

    def on_pass(self, pass_index: int) -> None:
        """Note that a new pass over the model begins."""
        return

    @abstractmethod
    def select(self, event: Event, resident: Container[int]) -> Selection | None:
        """Return the experts [tokens, top_k] to execute, heaviest first, or None for the router's.

        `event.logits` are [tokens, experts] and must not be changed. `resident` holds keys.
        """
