"""A draft model as the clock and the memory see it."""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval_moecache.records.geometry import Geometry

MOST_DRAFTED = 1024
"""Tokens drafted for one pass, at most: far beyond the length at which any draft has been wrong."""
NO_TARGET = -1
"""Stands in `Draft.targets` for a layer of the draft that foretells none of the model's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The sizes of a draft model.

    Its `geometry` counts the draft's own layers; a dense feed-forward block is a single expert.
    """

    geometry: Geometry
    level: int = 0
    """The precision that its experts are stored in and read at."""
    nbytes: int = 0
    """What it takes beside the target: all of it is resident."""
    tokens: int = 1
    """Tokens drafted for each verify pass."""
    targets: tuple[int, ...] = ()
    """For each of its layers, the model's MoE layer at the same place, whose gate can be asked
    about the draft's states; NO_TARGET for none. Empty where no gate can."""
