"""What a token waits for, by mechanism: fitted constants, and how true forecasts by them are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.files import read_yaml
from lm_eval_moecache.records.runtimes import MECHANISMS_FILE

NEW_CARD = "card without rows"
"""Rows of cards of which no other machine has a row."""
PROCESSOR = "processor"
"""Rows of a processor alone, whose errors differ from those of one with a card."""
PROMPTS = {True: "prefill, processor", False: "prefill"}
"""Whether a processor alone computes a prompt -> the rows whose errors its forecast has."""
SHARES = ("card_share", "host_share", "link_share", "drive_share", "attention_share")
"""Constants that are shares of a rate."""
MICROSECONDS = (
    *("cuda_layer_us", "rocm_layer_us", "metal_layer_us", "eager_layer_us"),
    *("host_layer_us", "copy_layer_us", "read_layer_us"),
    *("card_state_us", "host_state_us", "host_attention_us", "host_shared_us", "crossing_us"),
)
"""A layer's; of a MB of linear attention's state; of a core's GFLOP of attention; of one more card.
"""
DECODE = (*SHARES, *MICROSECONDS)
PREFILL = ("prefill_compute_share", "prefill_link_share", "prefill_card_share", "prefill_chunk_ms")
PREFILL_ALONE = ("prefill_core_gflops",)
CONSTANTS = (*DECODE, *PREFILL, *PREFILL_ALONE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How far forecasts were from a group of measured rows, by constants fitted without a row's
    machine or without its source, whichever was further off."""

    rows: int
    machines: int
    sources: int
    median_factor: float
    within: Mapping[str, float]
    reach: float
    """80% of rows of an unknown source are expected within forecast / reach and x reach."""
    coverage: float
    """Share of the rows within ranges that were made without their source."""

    def __str__(self) -> str:
        return f"such ranges held {self.coverage:.0%} of {self.rows} published speeds"


UNKNOWN = Spread(
    rows=0, machines=0, sources=0, median_factor=1.0, within={}, reach=1.0, coverage=1.0
)
"""The spread while constants are being fitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mechanisms:
    """What `moecache profile runtimes` wrote: the constants and how true they are."""

    constants: Mapping[str, float]
    curve: float
    """The constant of the hit curve: a cached share c of a layer hits c (1 + curve) / (c + curve).
    """
    routings: Mapping[str, Mapping[str, Any]]
    """Hits of replays of the shipped traces, at shares of a layer's experts."""
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    """Group of rows (a mechanism, `PROCESSOR` or `NEW_CARD`), or `group, stated`, `group, assumed`.
    """
    cards: frozenset[str] = frozenset()
    """Those of the rows, as `bare_name` has them."""

    def group(self, group: str, is_stated: bool) -> str:
        """Return the narrowest group of rows that there is."""
        said = "stated" if is_stated else "assumed"
        names = (f"{group}, {said}", group if is_stated else "", said)
        return next((name for name in names if name in self.spreads), "all")

    def spread(self, group: str, is_stated: bool, card: str = "") -> Spread:
        """Return the spread of the narrowest group of rows that there is; of a card of which there
        are no rows no narrower one than such cards had."""
        found = self.spreads.get(self.group(group, is_stated), UNKNOWN)
        is_known = not card or bare_name(card) in self.cards or NEW_CARD not in self.spreads
        new = found if is_known else self.spreads[NEW_CARD]
        return max(found, new, key=lambda spread: spread.reach)


def bare_name(card: str) -> str:
    """Return the name of a card or chip without the size of its memory."""
    return re.sub("-[0-9]+gb$", "", card)


@cache
def mechanisms() -> Mechanisms:
    """Return the constants that ship with the package."""
    return read_mechanisms(MECHANISMS_FILE)


def read_mechanisms(path: Path) -> Mechanisms:
    """Read a file of `moecache profile runtimes`. Raises ValueError where it is no such file."""
    data = read_yaml(path, f"mechanisms={str(path)!r}")
    try:
        constants = {name: float(data["constants"][name]) for name in CONSTANTS}
        spreads = {name: Spread(**spread) for name, spread in data["spreads"].items()}
        return Mechanisms(
            constants=constants,
            curve=float(data["hits"]["curve"]),
            routings=data["hits"]["routings"],
            spreads=spreads,
            cards=frozenset(data["cards"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"mechanisms={str(path)!r} is not an output of `moecache profile runtimes`: {error!r}."
        ) from error
