"""Error texts for what users type: the key, the value, what is allowed, and the nearest match."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(value: str, allowed: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"`, or an empty string where nothing is close."""
    close = difflib.get_close_matches(str(value), list(allowed), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def unknown(key: str, value: object, allowed: Iterable[str]) -> ValueError:
    """Build the error for a value outside a closed list of names."""
    names = sorted(allowed)
    return ValueError(
        f"{key}={value!r} is not known.{nearest(str(value), names)} Allowed: {', '.join(names)}."
    )
