"""Cache sizes that differ by layer: the file `moecache profile layer_sizes` writes, and its text.

A capacity that names such a file is turned into the text `[12,10,8]/layer` as soon as it is read,
so that a result says what was run even where the file is gone.
"""

from __future__ import annotations

from lm_eval_moecache.records.files import read_json

FIELD = "experts_per_layer"
SUFFIXES = (".json",)
_SUFFIX = "/layer"


def is_profile(text: str) -> bool:
    """Whether a capacity names a file of sizes."""
    return text.endswith(SUFFIXES)


def read_profile(path: str) -> list[int]:
    """Return the experts each layer may keep. Raises ValueError naming file, field and value."""
    data = read_json(path, f"capacity={path!r}")
    sizes = data.get(FIELD) if isinstance(data, dict) else None
    if not isinstance(sizes, list) or not sizes or not all(map(_is_size, sizes)):
        raise ValueError(
            f"capacity={path!r}: {FIELD}={sizes!r} must be a list of whole numbers, one for each "
            "MoE layer and each 1 or more. `moecache profile layer_sizes` writes such a file."
        )
    return [int(size) for size in sizes]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def spell(sizes: list[int]) -> str:
    """Return the capacity text of these sizes: `[12,10,8]/layer`."""
    return f"[{','.join(map(str, sizes))}]{_SUFFIX}"


def parse(text: str) -> list[int] | None:
    """Return the sizes in `[12,10,8]/layer`, or None where the text has another form."""
    body = text.removesuffix(_SUFFIX)
    if body == text or not (body.startswith("[") and body.endswith("]")):
        return None
    parts = [part.strip() for part in body[1:-1].split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) >= 1 for part in parts):
        raise ValueError(
            f"capacity={text!r}: the sizes between the brackets must be whole numbers, one for "
            "each MoE layer and each 1 or more, like '[12,10,8]/layer'."
        )
    return [int(part) for part in parts]
