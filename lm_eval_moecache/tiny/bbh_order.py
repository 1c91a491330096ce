"""BBH's logical deduction with three objects, written from its public description."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from lm_eval_moecache.tiny.words import BIRDS, COLORS, GOLFERS, STAND_FRUITS, VEHICLES

INTRODUCTION = (
    "The following paragraphs each describe a set of three objects arranged in a fixed order. "
    "The statements are logically consistent within each paragraph."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A scene: its opening, and how order and rank are said, lowest rank first."""

    opening: str
    before: str
    after: str
    ranks: tuple[str, str, str]
    article: bool = True


SIDES = ("is the leftmost", "is the second from the left", "is the rightmost")
SETTINGS = (
    Setting(
        opening="On a branch, there are three birds:",
        before="is to the left of",
        after="is to the right of",
        ranks=SIDES,
    ),
    Setting(
        opening="On a shelf, there are three books:",
        before="is to the left of",
        after="is to the right of",
        ranks=SIDES,
    ),
    Setting(
        opening="In an antique car show, there are three vehicles:",
        before="is older than",
        after="is newer than",
        ranks=("is the oldest", "is the second-newest", "is the newest"),
    ),
    Setting(
        opening="A fruit stand sells three fruits:",
        before="are less expensive than",
        after="are more expensive than",
        ranks=("are the cheapest", "are the second-most expensive", "are the most expensive"),
        article=False,
    ),
    Setting(
        opening="In a golf tournament, there were three golfers:",
        before="finished below",
        after="finished above",
        ranks=("finished last", "finished second", "finished first"),
        article=False,
    ),
)


def _scene(rng: Random) -> tuple[Setting, list[str]]:
    """A setting and its three objects."""
    books = [f"{color} book" for color in rng.sample(COLORS, 3)]
    birds, vehicles, fruits, golfers = (
        rng.sample(pool, 3) for pool in (BIRDS, VEHICLES, STAND_FRUITS, GOLFERS)
    )
    return rng.choice(list(zip(SETTINGS, (birds, books, vehicles, fruits, golfers), strict=True)))


def _clues(rng: Random, setting: Setting, named: list[str], order: list[int]) -> list[str]:
    """Two statements that fix the order: two neighbours, or one rank and a pair without it."""
    low, middle, high = (named[place] for place in order)

    def pair(lower: str, higher: str) -> str:
        if rng.random() < 0.5:
            return f"{lower} {setting.before} {higher}."
        return f"{higher} {setting.after} {lower}."

    by_rank = [low, middle, high]
    style = rng.random()
    if style < 0.55:
        clues = [pair(low, middle), pair(middle, high)]
    elif style < 0.85:
        fixed = rng.randrange(3)
        rest = [name for rank, name in enumerate(by_rank) if rank != fixed]
        clues = [f"{by_rank[fixed]} {setting.ranks[fixed]}.", pair(rest[0], rest[1])]
    else:
        ranks = rng.sample(range(3), 2)
        clues = [f"{by_rank[rank]} {setting.ranks[rank]}." for rank in ranks]
    rng.shuffle(clues)
    return clues


def logical_deduction(rng: Random) -> tuple[str, str]:
    setting, objects = _scene(rng)
    golfers = setting.ranks[0].startswith("finished")
    named = [name if golfers else f"The {name}" for name in objects]
    listed = objects
    if setting.article:
        listed = [f"{'an' if name[0] in 'aeiou' else 'a'} {name}" for name in listed]
    order = rng.sample(range(3), 3)
    clues = [clue.replace(" The ", " the ") for clue in _clues(rng, setting, named, order)]
    asked = rng.randrange(3)
    options = [
        f"({letter}) {name} {setting.ranks[asked]}"
        for letter, name in zip("ABC", named, strict=True)
    ]
    question = f"{INTRODUCTION} {setting.opening} {listed[0]}, {listed[1]}, and {listed[2]}. "
    question += "\n".join([" ".join(clues), "Options:", *options])
    return question, f"({'ABC'[order[asked]]})"
