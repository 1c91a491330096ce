"""The miss axis: absent experts in, what to load and what to execute out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lm_eval_moecache.core.records import Event, Fetch, Geometry, Selection


@dataclass(frozen=True, slots=True)
class Resolution:
    """What to do about the absent experts of one event.

    `fetch` lists what is loaded, in the order it is asked of the link; `selection` replaces the
    experts to execute, and is None where all of them are executed as asked.
    """

    fetch: Sequence[Fetch]
    selection: Selection | None = None


class MissAlgorithm(ABC):
    """Decides for each absent expert whether it is loaded (and how well), replaced or dropped."""

    source: ClassVar[str]
    """The paper and section it implements."""
    is_lossless: ClassVar[bool] = False
    """Whether every absent expert is loaded at full precision, so that results cannot change."""
    uses_logits: ClassVar[bool] = False
    """Whether `Event.experts`, `Event.weights` and `Event.logits` are needed."""

    def __init__(self, geometry: Geometry, *, seed: int = 0) -> None:
        self.geometry = geometry
        self.seed = seed

    @abstractmethod
    def resolve(
        self, event: Event, absent: Sequence[int], resident: Container[int]
    ) -> Resolution | None:
        """Say what becomes of the `absent` keys (in order of need), or None to load them all.

        Every absent key is either in `fetch` or no longer in the selection. `resident` holds the
        keys that are near now.
        """
