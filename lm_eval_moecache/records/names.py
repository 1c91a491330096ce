"""Finds the shipped file that a name means: `RTX 4070 Ti`, `rtx3060`, `Qwen/Qwen3-30B-A3B`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from lm_eval_moecache.records.files import read_csv
from lm_eval_moecache.records.numbers import shown, unknown_name_error

_TYPED = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+()-]*")
_WORDS = re.compile(r"[0-9]+(?:\.[0-9]+)?|[a-z]+|\+")


class UnknownNameError(ValueError):
    """No name is meant by what was typed, rather than several."""


class Naming(NamedTuple):
    """How the names of one kind of file are spelled."""

    aliases: Mapping[str, str] = {}
    """Other names, in any spelling -> the file's."""
    filler: str = "(?!)"
    """Pattern of words that distinguish nothing, each with the hyphen before it."""
    optional: str = "(?!)"
    """Pattern of an end that may be left out where one file alone has the rest of the name."""


def read_aliases(path: Path, names: Collection[str]) -> dict[str, str]:
    """Return other name -> one of `names`, as the columns `name` and `also` (`A; B`) of a CSV."""
    rows = [row for row in read_csv(path, str(path)) if row["name"] in names]
    return {other: row["name"] for row in rows for other in row["also"].split("; ") if other}


def find_name(
    key: str,
    typed: str,
    names: Collection[str],
    naming: Naming,
    gigabytes: Callable[[str], float] = lambda name: 0.0,
) -> str:
    """Return the one of `names` that a person means by `typed`.

    Case, spaces and hyphens do not count, nor do the words of `naming.filler`. Where a name lacks
    the optional end typed, as in `-24-gb`, its `gigabytes` must be those. Raises ValueError, naming
    `key`, for a name that is unknown or could be any of several.
    """
    spelled = {spell(name, naming): name for name in [*naming.aliases, *names]}
    wanted = spell(typed, naming) if _TYPED.fullmatch(typed) else ""
    found = {spelled[wanted]} if wanted in spelled else set()
    optional = re.compile(naming.optional)
    end = optional.search(wanted)

    def has_end(name: str) -> bool:
        size = float(re.sub("[^0-9.]", "", end.group())) if end else 0.0
        return abs(gigabytes(naming.aliases.get(name, name)) - size) < 0.05 * size

    if not found and wanted:
        bare = optional.sub("", wanted)
        found = {
            naming.aliases.get(name, name)
            for spelling, name in spelled.items()
            if optional.sub("", spelling) == bare
            and (end is None or (spelling == bare and has_end(name)))
        }
    if len(found) > 1:
        raise ValueError(
            f"{key}={shown(typed)} could be any of several. Allowed: {', '.join(sorted(found))}."
        )
    if not found:
        raise UnknownNameError(str(unknown_name_error(key, typed, names)))
    return naming.aliases.get(name := found.pop(), name)


def spell(name: str, naming: Naming) -> str:
    """Return a name's letters and numbers in lower case, hyphens between: `-rtx-4070-ti`."""
    spelling = "".join(f"-{word}" for word in _WORDS.findall(name.lower()))
    # A name of nothing but such words keeps them.
    spelling = re.sub(f"(?:{naming.filler})(?=-|$)", "", spelling) or spelling
    return re.sub("(?<=[a-z])-(?=[a-z])", "", spelling)  # `gptoss` is `gpt-oss`
