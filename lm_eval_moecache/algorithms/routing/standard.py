"""Standard routing: the router's own choice."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from lm_eval_moecache.algorithms.routing.base import RoutingAlgorithm
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.selection import Selection


class Standard(RoutingAlgorithm):
    """Uses the router's selection and weights unchanged."""

    source: ClassVar[str] = "SpecMD section 3.1.1"
    is_lossless: ClassVar[bool] = True

    def select(self, event: Event, resident: Container[int]) -> Selection | None:
        return None
