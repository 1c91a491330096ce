"""Damages sound files of every kind that is read: bytes anywhere, and values in their structure."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from lm_eval_moecache.records.artifact import write_artifact
from tests.engine import traces
from tests.records.test_artifact import make
from tests.report.runs import record
from tests.soak.corpus import BOARD, HARDWARE, POLICY, SPACE, SWEEP
from tests.soak.judge import READERS
from tests.trace.test_trace import CSV, JSONL, forget, half_a_recording

WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, math.inf, -math.inf, math.nan, 2**63, 10**400),
    *("", "x", "\0", "n" * 300, "=1+1", [], [[]], {}, {"": {}}, [1, "x", None]),
)


class Damaged(NamedTuple):
    """A damaged file: its kind, what was done to it, its bytes, and whether it must be refused."""

    kind: str
    how: str
    data: bytes
    must_be_refused: bool


def sound_files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of one sound file of every kind."""
    write_artifact(folder / "a.safetensors", make())
    (folder / "t").mkdir()
    (folder / "p").mkdir()
    trace, _ = traces.record(folder / "t")
    forget(half_a_recording(folder / "p", keep_until=2))
    [partial] = (folder / "p").iterdir()
    texts = {"policy": POLICY, "hardware": HARDWARE, "sweep": SWEEP, "space": SPACE, "board": BOARD}
    texts |= {"csv": CSV, "jsonl": JSONL, "results": json.dumps(record("a"))}
    return {
        **{kind: text.encode() for kind, text in texts.items()},
        "trace": trace.read_bytes(),
        "partial": partial.read_bytes(),
        "artifact": (folder / "a.safetensors").read_bytes(),
    }


CLOSED = ("policy", "hardware", "sweep", "space", "board")
"""Kinds of which every field is known: one that is not is an error."""


def damage(kind: str, sound: bytes, rng: np.random.Generator) -> Damaged:
    """Do one thing to a sound file."""
    if kind in (*CLOSED, "results") and rng.random() < 0.6:
        return _structure(kind, sound, rng)
    way: Callable[[str, bytes, np.random.Generator], Damaged] = _BYTES[rng.integers(len(_BYTES))]
    return way(kind, sound, rng)


def _structure(kind: str, sound: bytes, rng: np.random.Generator) -> Damaged:
    load, dump = (json.loads, _as_json) if kind == "results" else (yaml.safe_load, _as_yaml)
    data = copy.deepcopy(load(sound))
    places = list(_places(data))
    holder, key, path = places[rng.integers(len(places))]
    choice = rng.integers(4)
    if choice == 0 and isinstance(holder, dict):
        del holder[key]
        return Damaged(kind, f"without {path}", dump(data), False)
    if choice == 1:
        data["unheard_of"] = 1
        return Damaged(kind, "an unknown field", dump(data), kind in CLOSED)
    if choice == 2:
        text = dump(data)
        name = next(iter(data))
        twice = (
            text[:-1] + f', "{name}": 1}}'.encode()
            if kind == "results"
            else text + f"{name}: 1\n".encode()
        )
        return Damaged(kind, f"{name} twice", twice, True)
    holder[key] = WRONG[rng.integers(len(WRONG))]
    return Damaged(kind, f"{path}={str(holder[key])[:40]}", dump(data), False)


def _as_json(data: Any) -> bytes:
    return json.dumps(data).encode()


def _as_yaml(data: Any) -> bytes:
    return str(yaml.safe_dump(data, sort_keys=False)).encode()


def _places(data: Any, path: str = "") -> Any:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in list(items):
        yield data, key, f"{path}.{key}"
        if isinstance(value, (dict, list)):
            yield from _places(value, f"{path}.{key}")


def _flip(kind: str, sound: bytes, rng: np.random.Generator) -> Damaged:
    data = bytearray(sound)
    places = rng.integers(0, len(data), rng.integers(1, 9))
    for place in places:
        data[place] ^= int(rng.integers(1, 256))
    # Numbers and names of an artifact stand under its checksum, whichever byte it is.
    changed = bytes(data) != sound
    return Damaged(
        kind, f"flipped {sorted(places.tolist())}", bytes(data), kind == "artifact" and changed
    )


def _cut(kind: str, sound: bytes, rng: np.random.Generator) -> Damaged:
    length = int(rng.integers(0, len(sound)))
    binary = kind in ("trace", "artifact")
    return Damaged(kind, f"cut at {length}", sound[:length], binary)


def _insert(kind: str, sound: bytes, rng: np.random.Generator) -> Damaged:
    place, length = int(rng.integers(0, len(sound))), int(rng.integers(1, 64))
    data = sound[:place] + rng.bytes(length) + sound[place:]
    return Damaged(kind, f"{length} bytes at {place}", data, kind == "artifact")


def _drop(kind: str, sound: bytes, rng: np.random.Generator) -> Damaged:
    place, length = int(rng.integers(0, len(sound))), int(rng.integers(1, 64))
    data = sound[:place] + sound[place + length :]
    return Damaged(kind, f"without {length} bytes at {place}", data, kind == "artifact")


_BYTES = (_flip, _cut, _insert, _drop)
assert set(READERS) == {*CLOSED, "results", "trace", "partial", "csv", "jsonl", "artifact"}
