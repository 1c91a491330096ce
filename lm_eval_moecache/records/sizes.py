"""Reads the sizes that users type: bytes, bandwidths and the forms of `capacity`.

One form names a file written by `moecache profile layer_sizes`. It is replaced by the text
`[12,10,8]/layer` as soon as it is read, so that results record the sizes even if the file is lost.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lm_eval_moecache.records.files import read_json
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.numbers import MOST_COUNT, read_count, read_number, shown

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
LAYER_SIZES = "experts_per_layer"
"""Field of a layer-sizes file with the experts per layer."""
_PER_LAYER = "/layer"
_MOST_BYTES = 10**18
"""A million times today's largest memory: anything more is a typing error."""
_MOST_BARE = 10**6
"""GB, or GB/s: a number alone that is larger was meant in bytes."""
_LEAST_BARE = 1000
"""Bytes: a number alone that is smaller was meant in another unit."""
_FASTEST = 2e12
"""Bytes a second: a link or a host's memory that is faster is no machine's."""
_UNIT = re.compile(r"(?i)[kmgt](i?b)?(/s)?")
_LETTER = re.compile(r"([0-9]*\.?[0-9]+)\s*([kKmMgGtT])(i?)")
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*")
_EXPERTS = re.compile(r"([0-9]+) ?experts?")
_SLOTS = re.compile(r"\[([0-9, ]*)\]/layer|([0-9]+)/layer")
_SIZES = "B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024)"
CAPACITY_FORMS = (
    "a share ('5%'), a size ('2GiB'), '51experts', '30/layer', or whole numbers, "
    "one for each layer, as '[12,10,8]/layer' or the file of `moecache profile layer_sizes`"
)


def parse_bytes(text: object, key: str, *, unit: str = "B", least: int = 0) -> int:
    """Read `2GiB` or `500MB`; kB, MB, GB are powers of 1000 and KiB, MiB, GiB of 1024.

    A number alone is in `unit`. Raises ValueError for what is no size, and below `least` bytes,
    naming what was probably meant.
    """
    body = str(text).strip()
    bare = _bare_number(body)
    if bare is not None and unit != "B" and bare > _MOST_BARE:
        raise ValueError(f"{key}={body!r} has no unit. Did you mean '{bare / 1e9:.4g}GB'?")
    if bare and unit == "B" and bare < _LEAST_BARE:
        raise ValueError(f"{key}={body!r} has no unit. Did you mean '{body}MiB', or '{body}B'?")
    size = _size(body if bare is None else f"{body}{unit}")
    if size is None:
        raise ValueError(
            f"{key}={shown(text)} is not a size.{_whole_unit(body)} Allowed: a number with one of "
            f"{_SIZES}."
        )
    if size < least:
        number = body.rstrip("kKMGTmgtiIbB ")
        raise ValueError(
            f"{key}={body!r} is {size} bytes, too few for it. Did you mean '{number}GB'?"
        )
    return size


def parse_bandwidth(text: object, key: str = "bandwidth", least: float = 0) -> float:
    """Read `5GB/s` as bytes per second; a number alone is GB/s.

    Less than `least`, and more than any machine has, is a slip of the unit.
    """
    body = re.sub("(?i) ?/ ?s$|ps$", "", str(text).strip())
    if re.search(r"[0-9\s][kKMGT]i?b$", body):
        raise ValueError(
            f"{key}={text!r} reads as bits per second. Allowed: bytes per second, with a capital "
            f"B, like '{body[:-1]}B/s' for bytes, or an eighth of the number for bits."
        )
    bare = _bare_number(str(text).strip())
    rate = _size(body if bare is None else f"{body}GB")
    noun = "bandwidth" if key == "bandwidth" else "rate"
    problem = f"is not a {noun}.{_whole_unit(body, '/s')}"
    if bare and bare > _MOST_BARE:
        problem = f"has no unit, and is no rate in GB/s. Did you mean '{bare / 1e9:.4g}GB/s'?"
    elif rate and rate < least:
        problem = f"is {rate} bytes a second. Did you mean '{body.rstrip('kKMGTiIbB ')}GB/s'?"
    elif rate and rate > _FASTEST:
        fewer = body if bare is not None else body.rstrip("kKMGTiIbB ")
        problem = f"is {rate / 1e9:g} GB/s, more than any machine has. Did you mean '{fewer}MB/s'?"
        raise ValueError(f"{key}={text!r} {problem} Allowed: at most {_FASTEST / 1e9:g}GB/s.")
    elif rate:
        return float(rate)
    raise ValueError(
        f"{key}={text!r} {problem} Allowed: a number with one of {_SIZES} a second, or of GB/s; "
        "above 0, like '5GB/s'."
    )


def check_one_word(words: Sequence[str]) -> None:
    """Refuse `--ram 64 GB`, which a shell splits in two words. ValueError says what to type."""
    for word, unit in pairwise(words):
        number = word.rpartition("=")[2]
        if _bare_number(number) is not None and _UNIT.fullmatch(unit):
            whole = unit if unit.rstrip("s").rstrip("/")[-1] in "bB" else f"{unit}B"
            raise ValueError(f"{number} {unit} is two words. Type '{number}{whole}'.")


def _whole_unit(text: str, end: str = "") -> str:
    """Return ` Type '64GB'.` for the `64G` of other programs."""
    match = _LETTER.fullmatch(text)
    if match is None:
        return ""
    letter = "k" if match[2] in "kK" else match[2].upper()
    return f" Type '{match[1]}{letter}{'i' if match[3] else ''}B{end}'."


def _size(text: str) -> int | None:
    match = _NUMBER.fullmatch(str(text))
    if match is None or match[2].lower() not in _UNITS:
        return None
    size = float(match[1]) * _UNITS[match[2].lower()]
    return int(size) if size <= _MOST_BYTES else None


def _bare_number(text: str) -> float | None:
    """Return the number of a text without a unit, None for other texts."""
    match = _NUMBER.fullmatch(text)
    return None if match is None or match[2] else float(match[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Bytes that resident experts may take, for one cache or (`per_layer`) for one per layer."""

    text: str
    bytes_by_partition: tuple[int, ...]

    @property
    def per_layer(self) -> bool:
        """Whether each layer has a cache of its own."""
        return len(self.bytes_by_partition) > 1

    def partitions(self, num_layers: int) -> list[range]:
        """Return the MoE layers that each cache serves."""
        if not self.per_layer:
            return [range(num_layers)]
        return [range(layer, layer + 1) for layer in range(num_layers)]

    @property
    def total_bytes(self) -> int:
        """Bytes of all caches together."""
        return sum(self.bytes_by_partition)


def capacity_text(text: object) -> str:
    """Return the capacity text as typed, a layer-sizes file replaced by its content."""
    body = str(text).strip()
    if not body.endswith(".json"):
        return body
    data = read_json(body, f"capacity={body!r}")
    sizes = data.get(LAYER_SIZES) if isinstance(data, dict) else None
    if not isinstance(sizes, list) or not sizes or not all(type(n) is int and n > 0 for n in sizes):
        raise ValueError(
            f"capacity={body!r}: {LAYER_SIZES}={sizes!r} must be a list of whole numbers, one for "
            "each MoE layer and each 1 or more. `moecache profile layer_sizes` writes such a file."
        )
    return spell(sizes)


def spell(sizes: list[int]) -> str:
    """Return the capacity text of these experts per layer: `[12,10,8]/layer`."""
    return f"[{','.join(map(str, sizes))}]{_PER_LAYER}"


def is_per_layer(text: object) -> bool:
    """Whether a capacity text asks for one cache per layer."""
    return capacity_text(text).endswith(_PER_LAYER)


def check_capacity(text: object) -> None:
    """Raise ValueError for text that is no capacity for any model."""
    _read(text)


def _read(text: object) -> tuple[str, str, list[float]]:
    """Return a capacity's text, its unit (`%`, `bytes`, `experts`, `/layer`) and its numbers: one,
    or for differing layers one per layer."""
    body = capacity_text(text)
    slots, experts = _SLOTS.fullmatch(body), _EXPERTS.fullmatch(body)
    try:
        if slots is not None:
            parts = (slots[1] or slots[2] or "").split(",")
            return body, _PER_LAYER, [read_count("capacity", part, least=1) for part in parts]
        if experts is not None:
            num_experts = read_count("capacity", experts[1], least=1)
            return f"{num_experts}experts", "experts", [num_experts]
        if body.endswith("%"):
            return body, "%", [read_number("capacity", body[:-1], above=0, most=100)]
        size = -1 if _bare_number(body) is not None else parse_bytes(body, "capacity")
        return body, "bytes", [read_count("capacity", size, least=1, most=_MOST_BYTES)]
    except ValueError:
        raise ValueError(
            f"capacity={shown(text)} is not a capacity.{_meant(body)} Allowed: "
            f"{CAPACITY_FORMS}; "
            "above zero, and at most 100%."
        ) from None


def _meant(capacity: str) -> str:
    """Return what a capacity without a whole unit may mean, as it has to be typed."""
    number = _bare_number(capacity)
    if not number or not number <= MOST_COUNT:
        return _whole_unit(capacity)
    share = f"{100 * number if number < 1 else number:g}%"
    meant = [f"'{share}' of all expert bytes"] if number <= 100 else []
    meant += [f"'{int(number)}experts'"] if number % 1 == 0 else []
    return f" Did you mean {' or '.join(meant)}?" if meant else ""


def check_sized(text: str, trace: str) -> None:
    """Raise ValueError for a capacity in bytes with a trace that lacks the experts' size."""
    if not (text.endswith(("%", _PER_LAYER)) or _EXPERTS.fullmatch(text)):
        raise ValueError(
            f"capacity={text!r}: trace {trace} does not say how large an expert is. Give "
            "`expert_bytes`, or a capacity as a share, a number of experts or N/layer."
        )


def parse_capacity(text: object, geometry: Geometry, *, per_layer: bool = False) -> Capacity:
    """Turn `5%`, `2GiB`, `51experts`, `30/layer` or `[12,10,8]/layer` into bytes for this model.

    With `per_layer` any form becomes one cache per layer, each with room for the same number of
    whole experts. A number of experts counts those of the largest size. Raises ValueError where the
    form is wrong or the result cannot hold even one expert.
    """
    body, unit, numbers = _read(text)
    first = numbers[0]
    if unit == _PER_LAYER:
        slots = numbers if body.startswith("[") else numbers * geometry.num_layers
        problem = ""
        if len(slots) != geometry.num_layers:
            problem = f"has {len(slots)} sizes, but the model has {geometry.num_layers} MoE layers"
        elif max(slots) > geometry.num_experts:
            problem = f"asks for more than the {geometry.num_experts} experts that a layer has"
        if problem:
            raise ValueError(f"capacity={body!r} {problem}.")
        return _by_layer(body, geometry, slots)
    if unit == "%":
        total = int(geometry.total_expert_bytes * first / 100)
    else:
        total = int(first) * (geometry.max_expert_bytes if unit == "experts" else 1)
    if total < geometry.max_expert_bytes:
        raise ValueError(
            f"capacity={text!r} is {total} bytes, too small for one expert of "
            f"{geometry.max_expert_bytes} bytes. Allowed: {CAPACITY_FORMS}."
        )
    if not per_layer:
        return Capacity(text=body, bytes_by_partition=(total,))
    slots_per_layer = total * geometry.num_experts // geometry.total_expert_bytes
    if not slots_per_layer:
        raise ValueError(
            f"capacity={text!r} is {total} bytes, too small for one expert in each of "
            f"{geometry.num_layers} layers: this policy has a cache per layer."
        )
    return _by_layer(body, geometry, [slots_per_layer] * geometry.num_layers)


def _by_layer(text: str, geometry: Geometry, slots: Sequence[float]) -> Capacity:
    sizes = (int(n) * levels[0] for n, levels in zip(slots, geometry.expert_bytes, strict=True))
    return Capacity(text=text, bytes_by_partition=tuple(sizes))
