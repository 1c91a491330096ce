"""What formats of arrays of ids share."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.files import parse_json, read_text
from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.trace.formats.base import Pass

ROUTED = "routed_experts"
MOST_BYTES = 1 << 32
"""Of one array once unpacked: a small file may say that it holds any number of zeros."""
UNREADABLE = (
    *(ValueError, OSError, EOFError, zlib.error),
    *(zipfile.BadZipFile, NotImplementedError, tokenize.TokenError),  # versions, broken headers
)
"""What numpy raises for arrays that are damaged."""


def generation(prompt: Any, steps: Any, request: int, first_token: int = 0) -> Iterator[Pass]:
    """Yield the passes of one request: its prompt's tokens at once, then one for each other.

    `prompt` and `steps` are ids [tokens, layers, top_k].
    """
    if len(prompt):
        ids = list(np.moveaxis(prompt, 1, 0))
        yield Pass(experts=ids, request=request, phase=PREFILL, first_token=first_token)
    for token, step in enumerate(steps, start=first_token + len(prompt)):
        yield Pass(experts=list(step[:, None]), request=request, first_token=token)


def check_routed(what: str, routed: Any) -> None:
    """Refuse an array that is not [tokens, layers, top_k] of whole numbers."""
    if routed.ndim != 3 or not routed.size or not np.issubdtype(routed.dtype, np.integer):
        raise ValueError(
            f"{what} is {routed.dtype} of shape {list(routed.shape)}, must be whole numbers of "
            "shape [tokens, layers, top_k] with none of them 0."
        )


def responses(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the responses of a file (one, a list, or one a line), or of a folder's JSON."""
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        what = f"trace {file.name}"
        text = read_text(file, what)
        try:
            found = parse_json(text, what)
        except ValueError:
            lines = [line for line in text.splitlines() if line.strip()]
            if len(lines) < 2:
                raise
            found = [parse_json(line, f"{what}: line {n}") for n, line in enumerate(lines, 1)]
        for number, each in enumerate(found if isinstance(found, list) else [found]):
            if not isinstance(each, dict):
                raise ValueError(f"{what}: response {number} must hold an object.")
            yield f"{what}: response {number}", each


def whole(what: str, value: Any, key: str) -> int | None:
    """Return a whole number from 0 on, or None where there is none."""
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise ValueError(f"{what}: {key}={shown(value)} must be a whole number, 0 or more.")
    return value
