"""What the algorithms of all axes have: a model's geometry, a seed, and facts on themselves."""

from abc import ABC
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from lm_eval_moecache.records.arrays import DoubleArray, IntArray
from lm_eval_moecache.records.artifact import Artifact
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.future import Future


# Annotations are not postponed here: subclasses need not import what these name.
@dataclass(eq=False)
class Algorithm(ABC):
    """One algorithm of an axis. A subclass that is a dataclass has its fields for parameters."""

    axis: ClassVar[str]
    name: ClassVar[str] = ""
    """What users type for a rule of this package."""
    source: ClassVar[str]
    """The paper and section it implements."""
    draws: ClassVar[bool] = False
    """Whether its choices depend on the seed."""
    uses_weights: ClassVar[bool] = False
    """Whether `Event.experts` and `Event.weights` are needed in every pass.

    Of a changed selection the weights are the gate's scores, whatever other algorithms look at.
    Traces without logits suffice.
    """
    uses_logits: ClassVar[bool] = False
    """Whether `Event.logits` are needed, and the other two with them."""
    is_offline: ClassVar[bool] = False
    """Whether it needs the future, so that only a replay can run it."""
    artifact_kind: ClassVar[str | None] = None
    """The kind of artifact (`buddies`, `predictor`) that its parameter `profile` names, if any."""
    pairs_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Axis -> the only algorithms there that go with this one; `pairs_because` says why."""
    pairs_because: ClassVar[str] = ""

    geometry: Geometry
    seed: int = field(default=0, kw_only=True)
    artifact: Artifact | None = field(default=None, init=False)
    """The artifact it was built with: the wrapped model checks that it is the model's own."""

    def __post_init__(self) -> None:
        """Check what ranges cannot say, and make what the rule needs; all fields are set."""
        return

    def only_with(self, name: str, **setting: object) -> None:
        """Raise ValueError if a parameter, None by default, is given without the one it needs."""
        ((other, needed),) = setting.items()
        value, found = getattr(self, name), getattr(self, other)
        if value is not None and found != needed:
            raise ValueError(
                f"{self.axis}.{name}={value} has no effect with {self.axis}.{other}={found!r}: it "
                f"needs {other}={needed}."
            )

    def prepare(self, future: Future) -> None:
        """Receive the future; replays call it once, before the first event."""
        return

    def on_pass(self, pass_index: int) -> None:
        """Note that a new pass over the model begins."""
        return

    @classmethod
    def label(cls) -> str:
        """Return axis and rule as errors name them: `eviction='lru'`."""
        return f"{cls.axis}={vars(cls).get('name', cls.__name__)!r}"


class OverRows(Algorithm):
    """A rule that is asked about many rows at once, each of which decides by itself.

    Rows are runs side by side, each with a cache of its own. One row's rule is asked about all of
    them, and finds what it remembers of each in that row's own rule (`Event.own`). A rule that is
    not one of these is asked row by row.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.forget()

    def forget(self) -> None:
        """Begin anew with all that the rule remembers, if anything."""
        return

    def drawn(self, event: Event, rows: IntArray) -> DoubleArray:
        """Return random numbers [len(rows), experts], each for an entry of one of these `rows`.

        Those of a row depend on the seed, its pass and the layer alone.
        """
        draws = np.empty((len(rows), self.geometry.num_experts))
        for row in np.unique(rows).tolist():
            own = rows == row
            rng = np.random.default_rng((self.seed, event.passes[row], event.layer))
            draws[own] = rng.random((np.count_nonzero(own), self.geometry.num_experts))
        return draws

    def reset_copy(self) -> Any:
        """Return the rule as it was made."""
        twin = copy(self)
        twin.forget()
        return twin
