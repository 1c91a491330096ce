"""Damages sound files of every kind that is read: bytes anywhere, and values in their structure."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.artifact import DATA_AWARE, write_artifact
from lm_eval_moecache.records.use import write_use
from lm_eval_moecache.testing.artifacts import artifact_for
from lm_eval_moecache.testing.contracts import GEOMETRY
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.use import use_of
from lm_eval_moecache.tune.study import open_study
from tests.engine import traces
from tests.records.test_artifact import make
from tests.report.runs import record
from tests.soak.corpus import BOARD, CLAIMS, EMULATED, HARDWARE, POLICY, SPACE, SWEEP, arrays_of
from tests.soak.judge import OBJECTIVE, READERS
from tests.trace.test_trace import CSV, JSONL, ROUTED, forget, half_a_recording

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
    (folder / "j").mkdir()
    study = open_study(folder / "j", OBJECTIVE, 0)
    study.tell(study.ask(), [0.5, 1.0])
    write_artifact(folder / "d.safetensors", artifact_for(DATA_AWARE, GEOMETRY))
    write_use(folder / "u.json", use_of(load_trace(str(trace))))
    texts |= {"claims": CLAIMS, "emulated": EMULATED}
    return {
        **{kind: text.encode() for kind, text in texts.items()},
        **{kind: _dumped(kind, data) for kind, data in FOUND.items()},
        "use": (folder / "u.json").read_bytes(),
        "data_aware": (folder / "d.safetensors").read_bytes(),
        "journal": (folder / "j" / "study.journal").read_bytes(),
        "trace": trace.read_bytes(),
        "npz": arrays_of(routed_experts=ROUTED),
        "partial": partial.read_bytes(),
        "artifact": (folder / "a.safetensors").read_bytes(),
    }


CLOSED = ("policy", "hardware", "sweep", "space", "board", "claims", "use")
"""Kinds of which every field is known: one that is not is an error."""
JSONS = ("results", "use", "sizes", "rows", "front", "cells", "packed")
COMPRESSED = ("cells", "packed")
CHECKED = ("artifact", "data_aware")
"""Kinds with a checksum: whichever byte it is, it is seen."""
ENTRY: dict[str, Any] = {
    "name": "lru",
    "policy": {axis: {"name": "x"} for axis in AXES},
    "accuracy": 0.5,
    "stderr": None,
    "speed": 3.0,
    "measured_by": "replay",
    "within_budget": True,
}
FOUND: dict[str, Any] = {
    "sizes": {"experts_per_layer": [3, 2, 1], "capacity": 6},
    "rows": {"model": "tiny", "rows": [{"layer": n, "share": n / 7, "x": None} for n in range(3)]},
    "front": {
        "question": {"metric": "ttft_ms"},
        "verdict": "x",
        "best": ENTRY,
        "front": [ENTRY],
        "shipped": [ENTRY],
        "left_out": {"specmd": "x"},
        "confirmation": None,
    },
    "cells": [
        {"cell": {"trace": trace, "eviction": eviction}, "miss_rate": 0.1 + 0.2 * number}
        for trace in ("a", "b")
        for number, eviction in enumerate(("lru", "lfu"))
    ],
    "packed": record("a"),
}


def damage(kind: str, sound: bytes, rng: np.random.Generator) -> Damaged:
    """Do one thing to a sound file."""
    if kind in (*CLOSED, *JSONS, "emulated") and rng.random() < 0.6:
        return _structure(kind, sound, rng)
    way: Callable[[str, bytes, np.random.Generator], Damaged] = _BYTES[rng.integers(len(_BYTES))]
    return way(kind, sound, rng)


def _structure(kind: str, sound: bytes, rng: np.random.Generator) -> Damaged:
    data = _loaded(kind, sound)

    def dump(data: Any) -> bytes:
        return _dumped(kind, data)

    places = list(_places(data))
    holder, key, path = places[rng.integers(len(places))]
    choice = rng.integers(4)
    if choice == 0 and isinstance(holder, dict):
        del holder[key]
        return Damaged(kind, f"without {path}", dump(data), False)
    if choice == 1 and isinstance(data, dict):
        data["unheard_of"] = 1
        return Damaged(kind, "an unknown field", dump(data), kind in CLOSED)
    if choice == 2 and isinstance(data, dict):
        name = next(iter(data))
        twice = (
            _packed(kind, json.dumps(data)[:-1] + f', "{name}": 1}}')
            if kind in JSONS
            else dump(data) + f"{name}: 1\n".encode()
        )
        return Damaged(kind, f"{name} twice", twice, True)
    holder[key] = WRONG[rng.integers(len(WRONG))]
    return Damaged(kind, f"{path}={str(holder[key])[:40]}", dump(data), False)


def _loaded(kind: str, sound: bytes) -> Any:
    if kind not in JSONS:
        return yaml.safe_load(sound)
    return json.loads(gzip.decompress(sound) if kind in COMPRESSED else sound)


def _dumped(kind: str, data: Any) -> bytes:
    if kind not in JSONS:
        return str(yaml.safe_dump(data, sort_keys=False)).encode()
    return _packed(kind, json.dumps(data))


def _packed(kind: str, text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0) if kind in COMPRESSED else text.encode()


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
        kind, f"flipped {sorted(places.tolist())}", bytes(data), kind in CHECKED and changed
    )


def _cut(kind: str, sound: bytes, rng: np.random.Generator) -> Damaged:
    length = int(rng.integers(0, len(sound)))
    binary = kind in ("trace", *CHECKED)
    return Damaged(kind, f"cut at {length}", sound[:length], binary)


def _insert(kind: str, sound: bytes, rng: np.random.Generator) -> Damaged:
    place, length = int(rng.integers(0, len(sound))), int(rng.integers(1, 64))
    data = sound[:place] + rng.bytes(length) + sound[place:]
    return Damaged(kind, f"{length} bytes at {place}", data, kind in CHECKED)


def _drop(kind: str, sound: bytes, rng: np.random.Generator) -> Damaged:
    place, length = int(rng.integers(0, len(sound))), int(rng.integers(1, 64))
    data = sound[:place] + sound[place + length :]
    return Damaged(kind, f"without {length} bytes at {place}", data, kind in CHECKED)


_BYTES = (_flip, _cut, _insert, _drop)
assert set(READERS) == {
    *(*CLOSED, *JSONS, *CHECKED),
    *("emulated", "trace", "partial", "csv", "jsonl", "npz", "journal"),
}
