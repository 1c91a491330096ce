"""How much of a run a trace keeps, and the proposals of prefetchers that looked on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.geometry import Geometry


class Onlooker(Protocol):
    """A prefetch algorithm's choice, which can be built for a model."""

    @property
    def name(self) -> str: ...
    @property
    def algorithm(self) -> Any: ...
    @property
    def parameters(self) -> Mapping[str, Any]: ...
    def build(self, geometry: Geometry, seed: int) -> Any: ...
    def as_dict(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Detail:
    """What a recording keeps beside the experts. The default serves any replay that a trace can.

    Whatever is kept is exact: a replay that asks for no more gives a live run's figures.

    A prefetcher sees the events alone, never the cache: where only what some prefetchers propose is
    wanted, their proposals replace the predictions they were made from, at a tenth of the size.
    """

    weights: bool = True
    logits: bool = True
    predictions: bool = True
    """Whether to keep predictions of the gates (or the policy's predictor), for every expert."""
    onlookers: tuple[tuple[Onlooker, int], ...] = ()
    """Prefetchers whose proposals are kept, each with its seed."""
    criticals: tuple[int | None, ...] | None = None
    """How many experts a layer prefetchers look at that work while a draft drafts; an entry of None
    is the most that the default takes, the top-k. None in place of all: every expert's rank."""

    def ranked(self, geometry: Geometry) -> int:
        """Return how many experts to keep of what a draft foretells of a layer."""
        if self.criticals is None:
            return geometry.num_experts
        return max((geometry.top_k if n is None else n for n in self.criticals), default=0)


FULL = Detail()


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposed:
    """What one prefetcher proposed at each event of the recorded run, most wanted first.

    Event e's keys are `keys[bounds[e]:bounds[e + 1]]`.
    """

    keys: npt.NDArray[np.int32]
    bounds: IntArray


def looks_on(choice: Onlooker) -> bool:
    """Whether a prefetcher's proposals have to be recorded: it sees more than the experts."""
    algorithm = choice.algorithm
    if not algorithm.is_active or algorithm.is_offline:
        return False
    # An instance may look further ahead than its class says. Of an outside class nothing is known.
    depth = algorithm.depth or choice.parameters.get("depth", 0)
    sees_more = depth or algorithm.uses_predictor or algorithm.foresees or algorithm.uses_logits
    return bool(sees_more or "." in choice.name)


def identity(choice: Onlooker, seed: int, predictor: str) -> str:
    """Name a prefetcher by all that its proposals follow from beside the run itself."""
    named: dict[str, Any] = {**choice.as_dict(), "predictor": predictor}
    if choice.algorithm.draws:
        named["seed"] = seed
    return json.dumps(named, sort_keys=True)
