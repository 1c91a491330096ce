"""The kinds of input files: the reader of each, a valid example, and ways to damage it."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from lm_eval_moecache.algorithms.learned.data_aware import load_data_aware
from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.cli.table import other_table
from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.harness.arguments import read_config, split_arguments
from lm_eval_moecache.records.artifact import DATA_AWARE, read_artifact, write_artifact
from lm_eval_moecache.records.files import read_yaml
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.schemas import check
from lm_eval_moecache.records.sizes import capacity_text, parse_capacity
from lm_eval_moecache.report.compare import CompareOptions, compare
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.report.runs.files import TABLE, load_runs, write_tables
from lm_eval_moecache.report.tables.leaderboard import distinct, leaderboard
from lm_eval_moecache.report.tables.schema import Board
from lm_eval_moecache.report.tables.text import as_json, as_markdown
from lm_eval_moecache.sweep.run import check_report
from lm_eval_moecache.sweep.spec import REPLAY, read_sweep
from lm_eval_moecache.sweep.worker import check_trace_cell
from lm_eval_moecache.testing.contracts import GEOMETRY
from lm_eval_moecache.testing.streams import artifact_for
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.use import load_use, use_of, write_use
from lm_eval_moecache.tune.measure import Objective
from lm_eval_moecache.tune.search import STUDY, open_study
from lm_eval_moecache.tune.space import read_space
from moecache_lab.claims import estimates, verdicts
from moecache_lab.claims.page import page
from moecache_lab.claims.schema import Part
from tests.engine import traces
from tests.records.test_artifact import make
from tests.report.runs import record
from tests.soak.corpus import BOARD, CLAIMS, EMULATED, HARDWARE, POLICY, SPACE, SWEEP, arrays_of
from tests.trace.test_formats import FILES, FOLDER
from tests.trace.test_trace import CSV, JSONL, ROUTED

OF_CELLS = {
    **{"what": "x", "cells": "cells.json.gz", "expect": {"below": 1}},
    **{"where": {"eviction": "lru"}, "versus": {"eviction": "lfu"}},
}
OBJECTIVE = Objective(
    **{"pretrained": "tiny", "tasks": ("tiny_arc",), "limit": 2, "capacity": "25%"},
    **{"hardware": "h200", "bandwidth": None, "metric": "ttft_ms", "budget": 1.0},
)


# --- readers ---


def _use_sweep(path: Path) -> object:
    """Read the settings of every cell, as a sweep does before its first run."""
    return [
        check_trace_cell(cell)
        if cell.model == REPLAY
        else read_config(split_arguments(cell.arguments, ())[0])
        for cell in read_sweep(path).cells()[:20]
    ]


def _use_views(path: Path) -> object:
    """Check the names in a sweep's tables and figures, for which lm-eval lists its tasks."""
    sweep = read_sweep(path)
    return check_report(sweep, sweep.cells())


def _tables(folder: Path) -> Path:
    write_tables(folder, [record("a")])
    return folder / TABLE


def _use_results(path: Path) -> object:
    """Use a results file as the commands do."""
    runs = load_runs(path)
    tables = [leaderboard(runs), leaderboard(runs, columns=["run", "eviction", "miss_rate"])]
    names = [run.setting(name).raw for run in runs for name in ("policy", "hardware", "limit")]
    distinct(runs)
    return (
        compare(runs, runs, CompareOptions()),
        [write(tables) for write in (as_markdown, as_json)],
        names,
    )


def _use_claims(path: Path) -> object:
    """Read the claims and answer those whose runs exist."""
    claims = verdicts.read_claims(path)
    with contextlib.suppress(ValueError):
        return page(claims, verdicts.answer(claims, path.parent))
    return None


def _use_table(path: Path) -> object:
    """Remake the table next to the JSON of an analysis."""
    path.with_suffix(".md").touch()
    try:
        return other_table(path)
    finally:
        path.with_suffix(".md").unlink()


def _use_cells(path: Path) -> object:
    estimates._cells.cache_clear()
    return estimates.measure(Part.model_validate(OF_CELLS), path.parent)


def _use_trace(path: Path) -> object:
    trace = load_trace(str(path), logits=True, predicted=True)
    size = parse_capacity("100%", trace.geometry)
    policy, hardware = load_policy("on_demand"), load_hardware("h200")
    engine = replay(trace, Setting(policy=policy, capacity=size, hardware=hardware))
    engine.check_integrity()
    return task_metrics(engine.ledger.requests, engine.peak_cache_bytes)


# --- sound files ---


def _artifact(folder: Path, made: Any) -> Path:
    write_artifact(folder / "x.safetensors", made)
    return folder / "x.safetensors"


def _use(folder: Path) -> Path:
    write_use(folder / "x.json", use_of(load_trace(str(traces.record(folder)))))
    return folder / "x.json"


def _partial(folder: Path) -> Path:
    traces.half_a_recording(folder, keep_until=2)
    [path] = folder.iterdir()
    return path


def _study(folder: Path) -> Path:
    study = open_study(folder, OBJECTIVE, 0)
    study.tell(study.ask(), 1.0)
    return folder / STUDY


@dataclass(frozen=True)
class Kind:
    """A kind of file: its name, its reader, and a sound example."""

    name: str
    read: Callable[[Path], object]
    sound: Any
    """Its text or bytes, the content of its YAML or JSON, or a function that writes it."""
    form: str = ""
    """`yaml`, `json` or `gz` (of JSON) where values inside can be damaged."""
    is_closed: bool = False
    """Unknown fields are errors."""
    is_checked: bool = False
    """It has a checksum, so that any changed byte is detected."""

    def bytes_in(self, folder: Path) -> bytes:
        """Return the bytes of a sound file of this kind, written to `folder` if need be."""
        if callable(self.sound):
            return bytes(self.sound(folder).read_bytes())
        if isinstance(self.sound, str):
            return self.sound.encode()
        return self.sound if isinstance(self.sound, bytes) else self.dumped(self.sound)

    def parsed(self, data: bytes) -> Any:
        if self.form == "yaml":
            return yaml.safe_load(data)
        return json.loads(gzip.decompress(data) if self.form == "gz" else data)

    def dumped(self, data: Any, more: str = "") -> bytes:
        """Serialise a structure, with the text of one more field appended."""
        if self.form == "yaml":
            return (yaml.safe_dump(data, sort_keys=False) + more.replace('"', "")).encode()
        text = json.dumps(data)
        text = f"{text[:-1]}, {more}}}" if more else text
        return gzip.compress(text.encode(), mtime=0) if self.form == "gz" else text.encode()


ROWS = {"model": "tiny", "rows": [{"layer": n, "share": n / 7, "x": None} for n in range(3)]}
CELLS = [
    {"cell": {"trace": trace, "eviction": eviction}, "miss_rate": 0.1 + 0.2 * number}
    for trace in ("a", "b")
    for number, eviction in enumerate(("lru", "lfu"))
]
CLOSED, CHECKED = {"form": "yaml", "is_closed": True}, {"is_checked": True}
JSON, GZ = {"form": "json"}, {"form": "gz"}
KINDS: dict[str, Kind] = {
    "policy": Kind("x.yaml", lambda path: load_policy(str(path)), POLICY, **CLOSED),
    "hardware": Kind("x.yaml", lambda path: load_hardware(str(path)), HARDWARE, **CLOSED),
    "sweep": Kind("sweep.yaml", _use_sweep, SWEEP, **CLOSED),
    "views": Kind("sweep.yaml", _use_views, SWEEP, **CLOSED),
    "space": Kind("space.yaml", read_space, SPACE, **CLOSED),
    "board": Kind(
        "table.yaml", lambda path: check(Board, read_yaml(path, str(path)), str(path)), BOARD,
        **CLOSED,
    ),
    "claims": Kind("claims.yaml", _use_claims, CLAIMS, **CLOSED),
    "emulated": Kind(
        "x.yaml", lambda path: load_real_model(str(path)).geometry(), EMULATED, form="yaml"
    ),
    "results": Kind("x.json", _use_results, record("a"), **JSON),
    "rows": Kind("x.json", _use_table, ROWS, **JSON),
    "sizes": Kind(
        "x.json", lambda path: capacity_text(str(path)),
        {"experts_per_layer": [3, 2, 1], "capacity": 6}, **JSON,
    ),
    "use": Kind("x.json", lambda path: load_use(str(path)).hottest, _use, "json", is_closed=True),
    "cells": Kind("cells.json.gz", _use_cells, CELLS, **GZ),
    "tables": Kind(TABLE, _use_results, _tables),
    "trace": Kind("x.parquet", _use_trace, lambda folder: traces.record(folder)),
    "partial": Kind("x.parquet.partial", _use_trace, _partial),
    "csv": Kind("x.csv", _use_trace, CSV),
    "jsonl": Kind("x.jsonl", _use_trace, JSONL),
    "npz": Kind("x.npz", _use_trace, arrays_of(routed_experts=ROUTED)),
    "artifact": Kind(
        "x.safetensors", lambda path: read_artifact(path, "buddies", "miss.profile"),
        lambda folder: _artifact(folder, make()), **CHECKED,
    ),
    "data_aware": Kind(
        "x.safetensors", lambda path: load_data_aware(str(path), GEOMETRY),
        lambda folder: _artifact(folder, artifact_for(DATA_AWARE, GEOMETRY)), **CHECKED,
    ),
    "study": Kind(STUDY, lambda path: open_study(path.parent, OBJECTIVE, 0), _study),
    # Small traces in foreign formats, without SGLang's, whose reader must be given its top-k.
    **{
        path.name: Kind(path.name, _use_trace, path.read_bytes())
        for path in FOLDER.iterdir()
        if path.name in FILES and "sglang" not in path.name
    },
}  # fmt: skip


# --- damage ---


WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, math.inf, -math.inf, math.nan, 2**63, 10**400),
    *("", "x", "\0", "n" * 300, "=1+1", [], [[]], {}, {"": {}}, [1, "x", None]),
    *("../evil", "a\ud800b", [[1, 2, 3]], {"a": [1]}),
)


class Damaged(NamedTuple):
    """A damaged file: its kind, the damage, its bytes, and whether it must be refused."""

    kind: str
    how: str
    data: bytes
    must_be_refused: bool


def damage(name: str, sound: bytes, rng: np.random.Generator) -> Damaged:
    """Damage a sound file in one way."""
    kind = KINDS[name]
    if kind.form and rng.random() < 0.6:
        return _structure(name, sound, rng)
    place, length = int(rng.integers(0, len(sound))), int(rng.integers(1, 64))
    match rng.integers(4):
        case 0:
            flipped = bytearray(sound)
            places = rng.integers(0, len(sound), rng.integers(1, 9)).tolist()
            for position in places:
                flipped[position] ^= int(rng.integers(1, 256))
            how, data = f"flipped {sorted(places)}", bytes(flipped)
        case 1:
            how, data = f"cut at {place}", sound[:place]
        case 2:
            how = f"{length} bytes at {place}"
            data = sound[:place] + rng.bytes(length) + sound[place:]
        case _:
            how = f"without {length} bytes at {place}"
            data = sound[:place] + sound[place + length :]
    # A trace is marked complete at its end.
    must_be_refused = kind.is_checked or (name == "trace" and how.startswith("cut"))
    return Damaged(name, how, data, must_be_refused and data != sound)


def _structure(name: str, sound: bytes, rng: np.random.Generator) -> Damaged:
    kind = KINDS[name]
    data = kind.parsed(sound)
    places = list(_places(data))
    holder, key, path = places[rng.integers(len(places))]
    choice = rng.integers(4)
    if choice == 0 and isinstance(holder, dict):
        del holder[key]
        return Damaged(name, f"without {path}", kind.dumped(data), False)
    if choice == 1 and isinstance(data, dict):
        data["unheard_of"] = 1
        return Damaged(name, "an unknown field", kind.dumped(data), kind.is_closed)
    if choice == 2 and isinstance(data, dict):
        first = next(iter(data))
        return Damaged(name, f"{first} twice", kind.dumped(data, f'"{first}": 1'), True)
    holder[key] = WRONG[rng.integers(len(WRONG))]
    return Damaged(name, f"{path}={str(holder[key])[:40]}", kind.dumped(data), False)


def _places(data: Any, path: str = "") -> Iterator[tuple[Any, Any, str]]:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in list(items):
        yield data, key, f"{path}.{key}"
        if isinstance(value, (dict, list)):
            yield from _places(value, f"{path}.{key}")


def damages(folder: Path, seed: int) -> Iterator[Damaged]:
    """Yield damaged files of every kind, endlessly."""
    files = []
    for name, kind in sorted(KINDS.items()):
        scratch = folder / f"of {name}"
        scratch.mkdir()
        files.append((name, kind.bytes_in(scratch)))
    rng = np.random.default_rng(seed)
    for number in count():
        yield damage(*files[number % len(files)], rng)
