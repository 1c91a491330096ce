"""The one reader of numbers that users type: finite, plain, and within what is allowed."""

from __future__ import annotations

import math
import re
from typing import Any

# ASCII digits only: `1_0`, full-width and Arabic digits are numbers to Python, and to nobody else.
_PLAIN = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_LEADING_ZERO = re.compile(r"[+-]?0[0-9]")
_MOST_DIGITS = 40
MOST_COUNT = 2**31 - 1
"""No count of anything here (experts, layers, tokens, documents) is larger."""


def plain_number(value: object) -> int | float | None:
    """Return a finite number, given as one or as plain text, or None for anything else."""
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


def is_plain(text: str) -> bool:
    """Whether a text is a number to everybody: `0x10`, `010` (8 to YAML) and `1_000` are none."""
    return _PLAIN.fullmatch(text.strip(" ")) is not None and _LEADING_ZERO.match(text) is None


def check_typed(text: str) -> None:
    """Refuse in `key=value,...` what Python alone takes for a number, before lm-eval makes it one.

    ValueError names the key and the value: Arabic digits, or `1_000`.
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


def read_number(
    key: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> float:
    """Return `value` as a finite number within these bounds.

    Raises ValueError naming the key, the value and what is allowed.
    """
    found = plain_number(value)
    if found is None or not _within(found, least, above, most, below):
        raise ValueError(_refusal(key, value, "a number", least, above, most, below))
    return float(found)


def read_count(
    key: str, value: object, *, least: int = 0, most: int = MOST_COUNT, exact: bool = False
) -> int:
    """Return `value` as a whole number; `3.0` and `"3"` are one unless it has to be `exact`."""
    found = None if exact and not isinstance(value, int) else plain_number(value)
    if found is None or found != int(found) or not least <= found <= most:
        limit = None if most == MOST_COUNT else most
        raise ValueError(_refusal(key, value, "a whole number", least, None, limit, None))
    return int(found)


def shown(value: object) -> str:
    """Return what a message says of a value: its repr, cut where that is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python does not print a number of 4,300 digits
        text = f"a {type(value).__name__} too large to print"
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def finite(data: Any) -> Any:
    """Return JSON data with null in the place of every NaN and infinity."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data


def _within(
    number: float,
    least: float | None,
    above: float | None,
    most: float | None,
    below: float | None,
) -> bool:
    return (
        (least is None or number >= least)
        and (above is None or number > above)
        and (most is None or number <= most)
        and (below is None or number < below)
    )


def _refusal(
    key: str,
    value: object,
    what: str,
    least: float | None,
    above: float | None,
    most: float | None,
    below: float | None,
) -> str:
    bounds = [
        text
        for bound, text in (
            (least, f"{least} or more"),
            (above, f"above {above}"),
            (most, f"at most {most}"),
            (below, f"below {below}"),
        )
        if bound is not None
    ]
    wanted = ", ".join([f"{what} (finite, in plain digits)", " and ".join(bounds)]).rstrip(", ")
    return f"{key}={shown(value)} must be {wanted}."
