"""What every clock is to the engine; how time passes is each executor's own business."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Tells the time of a run in seconds; it never goes back."""

    @property
    def now(self) -> float: ...

    def synchronize(self) -> None:
        """Let what the pass has launched come to its end before the time is taken."""
