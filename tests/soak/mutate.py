"""Damages sound files of every kind that is read: bytes anywhere, and values in their structure."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.artifact import DATA_AWARE, write_artifact, write_use
from lm_eval_moecache.testing.contracts import GEOMETRY
from lm_eval_moecache.testing.streams import artifact_for
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.use import use_of
from lm_eval_moecache.tune.search import open_study
from tests.engine import traces
from tests.records.test_artifact import make
from tests.report.runs import record
from tests.soak.corpus import BOARD, CLAIMS, EMULATED, HARDWARE, POLICY, SPACE, SWEEP, arrays_of
from tests.soak.judge import (
    ACCEPTED,
    CLEAR,
    OBJECTIVE,
    OF_OTHERS,
    READERS,
    UNCLEAR,
    Tally,
    read_bad,
    silent,
)
from tests.trace.recording import forget, half_a_recording
from tests.trace.test_trace import CSV, JSONL, ROUTED

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
    for name in ("t", "p", "j"):
        (folder / name).mkdir()
    write_artifact(folder / "a.safetensors", make())
    write_artifact(folder / "d.safetensors", artifact_for(DATA_AWARE, GEOMETRY))
    trace, _ = traces.record(folder / "t")
    write_use(folder / "u.json", use_of(load_trace(str(trace))))
    forget(half_a_recording(folder / "p", keep_until=2))
    [partial] = (folder / "p").iterdir()
    study = open_study(folder / "j", OBJECTIVE, 0)
    study.tell(study.ask(), [0.5, 1.0])
    texts = {"policy": POLICY, "hardware": HARDWARE, "sweep": SWEEP, "space": SPACE, "board": BOARD}
    texts |= {"csv": CSV, "jsonl": JSONL, "results": json.dumps(record("a"))}
    texts |= {"claims": CLAIMS, "emulated": EMULATED}
    names = {"use": "u.json", "data_aware": "d.safetensors", "artifact": "a.safetensors"}
    files = {kind: folder / name for kind, name in names.items()}
    files |= {"journal": folder / "j/study.journal", "trace": trace, "partial": partial}
    sound = {
        **{kind: text.encode() for kind, text in texts.items()},
        **{kind: _dumped(kind, data) for kind, data in FOUND.items()},
        **{kind: path.read_bytes() for kind, path in files.items()},
        **{path.name: path.read_bytes() for path in OF_OTHERS},
        "npz": arrays_of(routed_experts=ROUTED),
    }
    assert sound.keys() == READERS.keys()
    return sound


CLOSED = ("policy", "hardware", "sweep", "space", "board", "claims", "use")
"""Kinds of which every field is known: one that is not is an error."""
JSONS = ("results", "use", "sizes", "rows", "front", "cells", "packed")
COMPRESSED = ("cells", "packed")
CHECKED = ("artifact", "data_aware")
"""Kinds with a checksum: whichever byte it is, it is seen."""
ENTRY: dict[str, Any] = {
    **{"name": "lru", "policy": {axis: {"name": "x"} for axis in AXES}, "measured_by": "replay"},
    **{"accuracy": 0.5, "stderr": None, "speed": 3.0, "within_budget": True},
}
FOUND: dict[str, Any] = {
    "sizes": {"experts_per_layer": [3, 2, 1], "capacity": 6},
    "rows": {"model": "tiny", "rows": [{"layer": n, "share": n / 7, "x": None} for n in range(3)]},
    "front": {
        **{"question": {"metric": "ttft_ms"}, "verdict": "x", "best": ENTRY, "confirmation": None},
        **{"front": [ENTRY], "shipped": [ENTRY], "left_out": {"specmd": "x"}},
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
    place, length = int(rng.integers(0, len(sound))), int(rng.integers(1, 64))
    match rng.integers(4):
        case 0:
            flipped = bytearray(sound)
            places = rng.integers(0, len(sound), rng.integers(1, 9)).tolist()
            for each in places:
                flipped[each] ^= int(rng.integers(1, 256))
            how, data = f"flipped {sorted(places)}", bytes(flipped)
        case 1:
            how, data = f"cut at {place}", sound[:place]
        case 2:
            how = f"{length} bytes at {place}"
            data = sound[:place] + rng.bytes(length) + sound[place:]
        case _:
            how = f"without {length} bytes at {place}"
            data = sound[:place] + sound[place + length :]
    # A trace says at its end that it is whole.
    must_be_refused = kind in CHECKED or (kind == "trace" and how.startswith("cut"))
    return Damaged(kind, how, data, must_be_refused and data != sound)


def _structure(kind: str, sound: bytes, rng: np.random.Generator) -> Damaged:
    if kind in JSONS:
        data = json.loads(gzip.decompress(sound) if kind in COMPRESSED else sound)
    else:
        data = yaml.safe_load(sound)
    places = list(_places(data))
    holder, key, path = places[rng.integers(len(places))]
    choice = rng.integers(4)
    if choice == 0 and isinstance(holder, dict):
        del holder[key]
        return Damaged(kind, f"without {path}", _dumped(kind, data), False)
    if choice == 1 and isinstance(data, dict):
        data["unheard_of"] = 1
        return Damaged(kind, "an unknown field", _dumped(kind, data), kind in CLOSED)
    if choice == 2 and isinstance(data, dict):
        name = next(iter(data))
        if kind in JSONS:
            twice = _packed(kind, json.dumps(data)[:-1] + f', "{name}": 1}}')
        else:
            twice = _dumped(kind, data) + f"{name}: 1\n".encode()
        return Damaged(kind, f"{name} twice", twice, True)
    holder[key] = WRONG[rng.integers(len(WRONG))]
    return Damaged(kind, f"{path}={str(holder[key])[:40]}", _dumped(kind, data), False)


def _dumped(kind: str, data: Any) -> bytes:
    if kind not in JSONS:
        return str(yaml.safe_dump(data, sort_keys=False)).encode()
    return _packed(kind, json.dumps(data))


def _packed(kind: str, text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0) if kind in COMPRESSED else text.encode()


def _places(data: Any, path: str = "") -> Iterator[tuple[Any, Any, str]]:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in list(items):
        yield data, key, f"{path}.{key}"
        if isinstance(value, (dict, list)):
            yield from _places(value, f"{path}.{key}")


def damages(folder: Path, seed: int) -> Iterator[Damaged]:
    """Yield damaged files of every kind, without end."""
    files = sorted(sound_files(folder).items())
    rng = np.random.default_rng(seed)
    for number in count():
        yield damage(*files[number % len(files)], rng)


def try_damaged(damaged: Damaged, folder: Path, tally: Tally) -> None:
    """Read a damaged file. One that is still sound may be read; the others name their file."""
    with silent():
        name = READERS[damaged.kind][0]
        verdict, told = read_bad(damaged.kind, damaged.data, folder, name)
    if verdict == UNCLEAR and (damaged.kind == "sweep" or "=" in told):
        verdict = CLEAR  # names the field instead; a sweep's cells are named by who checks them
    if verdict == ACCEPTED and not damaged.must_be_refused:
        tally.still_sound += 1
    else:
        tally.note(verdict, f"{damaged.kind} {damaged.how}: {told}")
