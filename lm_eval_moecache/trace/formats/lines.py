"""What formats of text lines share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.files import parse_json, read_text
from lm_eval_moecache.trace.formats.base import Pass, TraceFormat

Layers = Mapping[int, Sequence[tuple[Any, Any]]]
"""Layer -> for each token its ids, and their weights or None."""


def numbered(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that hold something with their numbers, from 1."""
    text = read_text(path, f"trace {path.name}")
    return ((n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip())


def objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines with their line numbers."""
    for number, line in numbered(path):
        record = parse_json(line, f"trace {path.name}: line {number}")
        if not isinstance(record, dict):
            raise ValueError(f"trace {path.name}: line {number} must hold an object.")
        yield number, record


def pass_of(layers: Layers, request: int, phase: str, first_token: int) -> Pass:
    """Return a pass through these layers; it has weights where every row has."""
    rows = [layers[layer] for layer in sorted(layers)]
    weighted = all(weights for layer in rows for _, weights in layer)
    return Pass(
        experts=[[ids for ids, _ in layer] for layer in rows],
        weights=[[weights for _, weights in layer] for layer in rows] if weighted else None,
        request=request,
        phase=phase,
        first_token=first_token,
    )


def in_turn(steps: Iterable[tuple[int, Layers]]) -> list[Pass]:
    """Return the passes of (request, layers), where each goes on behind its request's last token.

    A pass of several tokens reads a text, one of a single token decodes it.
    """
    passes, done = [], Counter[int]()
    for request, layers in steps:
        tokens = len(layers[min(layers)])
        phase = PREFILL if tokens > 1 else DECODE
        passes.append(pass_of(layers, request, phase, done[request]))
        done[request] += tokens
    return passes


class JsonLines(TraceFormat):
    """A format that is told by the fields of its first line."""

    suffixes = (".jsonl",)
    fields: ClassVar[frozenset[str]]

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        return cls.fields <= first_object(head).keys()


def first_object(head: bytes) -> dict[str, Any]:
    """Return the JSON object on a file's first line; empty where there is none."""
    try:
        found = parse_json(head.lstrip().split(b"\n", 1)[0], "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
