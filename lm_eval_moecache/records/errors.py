"""Error texts for what users type: the key, the value, what is allowed, and the nearest match."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from lm_eval_moecache.records.numbers import shown


class AlgorithmError(RuntimeError):
    """A user's own algorithm failed while it ran: no fault of what was typed, so no ValueError."""


def nearest(value: str, allowed: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"`, or an empty string where nothing is close in either case."""
    names = {name.lower(): name for name in allowed}
    # Comparing takes time with the square of the length, and no name is that long.
    close = difflib.get_close_matches(str(value)[:100].lower(), list(names), n=1, cutoff=0.5)
    return f" Did you mean '{names[close[0]]}'?" if close else ""


def unknown(key: str, value: object, allowed: Iterable[str]) -> ValueError:
    """Build the error for a value outside a closed list of names."""
    names = sorted(allowed)
    if not isinstance(value, str):
        return ValueError(f"{key}={shown(value)} is not known. Allowed: {', '.join(names)}.")
    near = nearest(value, names)
    return ValueError(f"{key}={shown(value)} is not known.{near} Allowed: {', '.join(names)}.")
