"""The prefetch axis: what one event tells about the next ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from lm_eval_moecache.core.records import Event, FloatArray, Geometry


class PrefetchAlgorithm(ABC):
    """Proposes experts to bring near, most wanted first; the link decides when they come.

    A proposal for a layer at or before the running one is meant for the next pass. Keys that are
    resident or on their way may be proposed: they are refreshed rather than moved.
    """

    source: ClassVar[str]
    """The paper and section it implements."""
    is_active: ClassVar[bool] = True
    """Whether it ever proposes anything."""
    uses_logits: ClassVar[bool] = False
    """Whether `Event.experts`, `Event.weights` and `Event.logits` are needed."""
    depth: int = 0
    """How many layers ahead `Event.predicted` must reach; each layer's gate costs time."""

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        self.geometry = geometry
        self.seed = seed

    def on_pass(self, pass_index: int) -> None:
        """Note that a new pass over the model begins."""
        return

    @abstractmethod
    def propose(self, event: Event) -> Sequence[int]:
        """Return the keys to prefetch now, in order of priority, without duplicates."""


def softmax(logits: FloatArray) -> FloatArray:
    """Row-wise softmax of [tokens, experts]."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True), dtype=np.float32)


def by_mass(layer: int, wanted: np.ndarray, scores: FloatArray) -> list[int]:
    """Return the keys of the experts wanted by any token, the largest summed score first.

    `wanted` is a boolean [tokens, experts], `scores` are [tokens, experts]; ties go to the
    smaller key.
    """
    num_experts = scores.shape[-1]
    experts = np.flatnonzero(wanted.any(axis=0))
    mass = (scores * wanted).sum(axis=0)[experts]
    return [int(e) + layer * num_experts for e in experts[np.argsort(-mass, kind="stable")]]
