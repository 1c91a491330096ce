"""Reads the numbers that users type, with errors that name what is allowed."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from operator import ge, gt, le, lt
from typing import Any

# ASCII digits only: `1_0`, full-width and Arabic digits are numbers to Python alone.
_PLAIN = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_MOST_DIGITS = 40
_MOST_NAMES = 16
"""Names that are read in a message; of more, half as many are shown."""
LIMITS = {
    "least": ("{} or more", ge),
    "above": ("above {}", gt),
    "most": ("at most {}", le),
    "below": ("below {}", lt),
}
"""Name of a limit -> its words, and how a value compares with it."""
MOST_COUNT = 2**31 - 1
"""Upper bound on every count here (experts, layers, tokens, documents)."""


def plain_number(value: object) -> int | float | None:
    """Return a finite number given as a number or as plain text, None for anything else."""
    if isinstance(value, str):
        text = value.strip(" ")
        if len(text) > _MOST_DIGITS or _PLAIN.fullmatch(text) is None:
            return None
        value = float(text) if set(text) & set(".eE") else int(text)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond every float
        return None


def check_typed(text: str) -> None:
    """Refuse values in `key=value,...` that only Python reads as numbers, before lm-eval does.

    Such are Arabic digits and `1_000`. ValueError names the key and the value.
    """
    for part in text.split(","):
        key, is_pair, value = part.partition("=")
        value = value.strip()
        try:
            number = float(value)
        except ValueError:
            continue
        if is_pair and math.isfinite(number) and plain_number(value) is None:
            raise ValueError(f"{key.strip()}={shown(value)} must be a number in plain digits.")


def read_number(key: str, value: object, **bounds: float) -> float:
    """Return `value` as a finite number within the bounds `least`, `above`, `most` and `below`.

    Raises ValueError naming the key, the value and what is allowed.
    """
    number = plain_number(value)
    if number is None or not all(LIMITS[n][1](number, limit) for n, limit in bounds.items()):
        raise _refusal(key, value, "a number", bounds)
    return float(number)


def read_count(key: str, value: object, *, least: int = 0, most: int = MOST_COUNT) -> int:
    """Return `value` as a whole number (also `3.0` or `"3"`) from `least` to `most`.

    Raises ValueError naming the key, the value and what is allowed.
    """
    number = plain_number(value)
    if number is None or number % 1 or not least <= number <= most:
        bounds = {"least": least} if most == MOST_COUNT else {"least": least, "most": most}
        raise _refusal(key, value, "a whole number", bounds)
    return int(number)


def shown(value: object) -> str:
    """Return the repr of a value for a message, shortened where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python does not print a number of 4,300 digits
        text = f"a {type(value).__name__} too large to print"
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def nearest(value: str, allowed: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"`, or an empty string where nothing is close in either case."""
    names = {name.lower(): name for name in allowed}
    # Comparison is quadratic in the length, and no name is that long.
    close = difflib.get_close_matches(str(value)[:100].lower(), list(names), n=1, cutoff=0.5)
    return f" Did you mean '{names[close[0]]}'?" if close else ""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 request`, `2 requests`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Iterable[str], value: object = "", where: str = "") -> str:
    """Return names for a message: all, or of many the nearest to `value` and how many others.

    `where` is what lists them all, as `moecache policies`.
    """
    named = [*names]
    if len(named) <= _MOST_NAMES:
        return ", ".join(named)
    close = difflib.get_close_matches(str(value)[:100], named, n=_MOST_NAMES // 2, cutoff=0.0)
    rest = f"{', '.join(close)} and {len(named) - len(close)} more"
    return f"{rest}, which {where} lists" if where else rest


def unknown_name_error(
    key: str, value: object, allowed: Iterable[str], where: str = ""
) -> ValueError:
    """Build the error for a value outside a closed list of names; `where` lists them all."""
    names = sorted(allowed)
    near = nearest(value, names) if isinstance(value, str) else ""
    text = listed(names, value, where)
    return ValueError(f"{key}={shown(value)} is not known.{near} Allowed: {text}.")


def listed_names(text: str | None) -> list[str]:
    """Return the names of a text like `a, b,c`."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def finite(data: Any) -> Any:
    """Return JSON data with None in place of every NaN and infinity."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data


def _refusal(key: str, value: object, what: str, bounds: Mapping[str, float]) -> ValueError:
    limits = [LIMITS[name][0].format(bound) for name, bound in bounds.items()]
    within = f", {' and '.join(limits)}" if limits else ""
    return ValueError(f"{key}={shown(value)} must be {what} (finite, in plain digits){within}.")


def per_layer(key: str, value: float | list[float], num_layers: int) -> list[float]:
    """Return a number for each MoE layer, given as one for all of them or as a list.

    Raises ValueError, naming `key`, for a list of another length.
    """
    values = value if isinstance(value, list) else [value] * num_layers
    if len(values) != num_layers:
        raise ValueError(
            f"{key}={value} has {len(values)} values. Allowed: one number, or {num_layers}, one "
            "for each MoE layer."
        )
    return [float(each) for each in values]
