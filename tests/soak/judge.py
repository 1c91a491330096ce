"""Gives bad inputs and damaged files to readers and commands, in this process, under a guard."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.cli.table import other_table
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.harness.arguments import read_config, split_arguments
from lm_eval_moecache.records.artifact import read_artifact
from lm_eval_moecache.records.data_aware import load_data_aware
from lm_eval_moecache.records.emulation import load_real_model
from lm_eval_moecache.records.files import read_yaml
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.schemas import check
from lm_eval_moecache.records.schemas.inputs import Board
from lm_eval_moecache.records.schemas.results import Part
from lm_eval_moecache.records.sizes import capacity_text, parse_capacity
from lm_eval_moecache.report import claims as report_claims
from lm_eval_moecache.report.claims import page
from lm_eval_moecache.report.compare import Rules, compare
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.report.results import load_runs, setting
from lm_eval_moecache.report.tables import as_json, as_markdown, distinct, leaderboard
from lm_eval_moecache.sweep.run import check_cell
from lm_eval_moecache.sweep.spec import REPLAY, Cell, read_sweep
from lm_eval_moecache.sweep.worker import check_trace_cell
from lm_eval_moecache.testing.contracts import GEOMETRY
from lm_eval_moecache.tiny import MODEL_DIR
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.use import load_use
from lm_eval_moecache.tune.measure import Objective
from lm_eval_moecache.tune.search import open_study, read_space
from tests.engine import traces
from tests.report.runs import leaderboard_of_four
from tests.soak.corpus import Bad, table
from tests.trace.test_formats import FILES, FOLDER

GUARD_S = 60
OF_CELLS = {
    **{"what": "x", "cells": "cells.json.gz", "expect": {"below": 1}},
    **{"where": {"eviction": "lru"}, "versus": {"eviction": "lfu"}},
}
OBJECTIVE = Objective(
    **{"pretrained": "tiny", "tasks": ("tiny_arc",), "limit": 2, "capacity": "25%"},
    **{"hardware": "h200", "bandwidth": None, "metric": "ttft_ms", "budget": 1.0},
)
CLEAR, ACCEPTED, UNCLEAR, TRACEBACK, HANG = "clear", "accepted", "unclear", "traceback", "hang"
LEFT = "refused, but left a file"
FAULTS = (TRACEBACK, HANG, UNCLEAR, ACCEPTED, LEFT)


class HangError(BaseException):
    """The time guard has gone off. No reader may catch it."""


@contextlib.contextmanager
def guarded(seconds: float = GUARD_S) -> Iterator[None]:
    """Interrupt the block after this time (main thread, systems with signals)."""

    def ring(number: int, frame: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _use_sweep(path: Path) -> object:
    """Read the settings of every cell, as is done before the first run."""
    return [
        check_trace_cell(cell)
        if cell.model == REPLAY
        else read_config(split_arguments(cell.arguments, ())[0])
        for cell in read_sweep(path).cells()[:20]
    ]


def _use_results(path: Path) -> object:
    """Do with a results file what commands do with one that they can read."""
    runs = load_runs(path)
    tables = [leaderboard(runs), leaderboard(runs, columns=["run", "eviction", "miss_rate"])]
    names = [setting(run, name).raw for run in runs for name in ("policy", "hardware", "limit")]
    distinct(runs)
    return compare(runs, runs, Rules()), [write(tables) for write in (as_markdown, as_json)], names


def _use_claims(path: Path) -> object:
    """Read the claims, and answer those whose runs are there."""
    found = report_claims.read_claims(path)
    with contextlib.suppress(ValueError):
        return page(found, report_claims.answer(found, path.parent))
    return None


def _use_table(path: Path) -> object:
    """Remake the table beside an analysis' or a search's JSON."""
    path.with_suffix(".md").touch()
    try:
        return other_table(path)
    finally:
        path.with_suffix(".md").unlink()


def _use_cells(path: Path) -> object:
    report_claims._cells.cache_clear()
    return report_claims.measure(Part.model_validate(OF_CELLS), path.parent)


def _use_trace(path: Path) -> object:
    trace = load_trace(str(path), logits=True, predicted=True)
    size = parse_capacity("100%", trace.geometry)
    policy, hardware = load_policy("on_demand"), load_hardware("h200")
    engine = replay(trace, Setting(policy=policy, capacity=size, hardware=hardware))
    engine.check_integrity()
    return task_metrics(engine.ledger.requests, engine.peak_cache_bytes)


OF_OTHERS = [path for path in FOLDER.iterdir() if path.name in FILES and "sglang" not in path.name]
"""Small traces in the formats of others; SGLang's has to be told its top-k."""
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "policy": ("x.yaml", lambda path: load_policy(str(path))),
    "hardware": ("x.yaml", lambda path: load_hardware(str(path))),
    "sweep": ("sweep.yaml", _use_sweep),
    "space": ("space.yaml", read_space),
    "board": ("table.yaml", lambda path: check(Board, read_yaml(path, str(path)), str(path))),
    "results": ("x.json", _use_results),
    "trace": ("x.parquet", _use_trace),
    "partial": ("x.parquet.partial", _use_trace),
    "csv": ("x.csv", _use_trace),
    "jsonl": ("x.jsonl", _use_trace),
    "npz": ("x.npz", _use_trace),
    "artifact": ("x.safetensors", lambda path: read_artifact(path, "buddies", "miss.profile")),
    "data_aware": ("x.safetensors", lambda path: load_data_aware(str(path), GEOMETRY)),
    "use": ("x.json", lambda path: load_use(str(path)).hottest),
    "sizes": ("x.json", lambda path: capacity_text(str(path))),
    "emulated": ("x.yaml", lambda path: load_real_model(str(path)).geometry()),
    "claims": ("claims.yaml", _use_claims),
    "rows": ("x.json", _use_table),
    "front": ("front.json", _use_table),
    "cells": ("cells.json.gz", _use_cells),
    "packed": ("runs.jsonl.gz", _use_results),
    "journal": ("study.journal", lambda path: open_study(path.parent, OBJECTIVE, 0)),
    **{path.name: (path.name, _use_trace) for path in OF_OTHERS},
}
"""Kind of file -> the name it is given, and what reads it."""


@dataclass
class Tally:
    """What became of the inputs tried; `problems` tells of those that are none."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    still_sound: int = 0
    """Damaged files that are none, as what was changed may be changed."""

    def note(self, verdict: str, told: str) -> None:
        self.counts[verdict] += 1
        if verdict != CLEAR:
            self.problems.append(f"{verdict}: {told}")

    def line(self) -> str:
        rest = ", ".join(f"{name} {self.counts[name]}" for name in (CLEAR, *FAULTS))
        return f"bad inputs: tried {sum(self.counts.values())}, {rest}"


def says(text: str, words: str) -> bool:
    """Whether a refusal has these words; `…` stands for anything between them."""
    return all(part in text for part in words.split(" … "))


def judged(act: Callable[[], object], words: str) -> tuple[str, str]:
    """Return what became of an input that has to be refused, and what was said."""
    try:
        with guarded():
            act()
    except HangError:
        return HANG, f"longer than {GUARD_S} s"
    except (ValueError, FileNotFoundError) as error:
        text = str(error)
        return (CLEAR if says(text, words) and len(text) < 20_000 else UNCLEAR), text[:400]
    except Exception as error:
        return TRACEBACK, f"{type(error).__name__}: {error}"[:400]
    return ACCEPTED, ""


def command(argv: list[str], words: str) -> tuple[str, str]:
    """Run a command that has to end with exit code 2 and a message."""
    said = io.StringIO()
    try:
        with guarded(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code: object = main(argv)
    except HangError:
        return HANG, str(argv)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        return TRACEBACK, f"{argv}: {type(error).__name__}: {error}"[:400]
    text = said.getvalue()
    if code == 0:
        return ACCEPTED, str(argv)
    if code != 2 or not says(text, words) or "Traceback" in text:
        return UNCLEAR, f"{argv}: exit {code}: {text[-400:]}"
    return CLEAR, text


def judge(bad: Bad, folder: Path, places: dict[str, str]) -> tuple[str, str]:
    """Try one row of the table."""
    if bad.kind in ("arguments", "drafted"):

        def configure() -> object:
            ours, _ = split_arguments(bad.given, ())
            return read_config(ours, speculative=bad.kind == "drafted")

        return judged(configure, bad.words)
    if bad.kind == "host":
        given = {
            key: value.format(**places) if str(value).startswith("{models}") else value
            for key, value in bad.given.items()
        }
        return judged(lambda: refused_model(given), bad.words)
    if bad.kind == "command":
        return command([word.format(**places) for word in bad.given], bad.words)
    return read_bad(bad.kind, bad.given, folder, bad.words)


def read_bad(kind: str, data: str | bytes, folder: Path, words: str) -> tuple[str, str]:
    """Let the reader of this kind read a file with these contents."""
    name, reader = READERS[kind]
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return judged(lambda: reader(path), words)


def refused_model(given: dict[str, Any]) -> None:
    """Check arguments as both ways into a run do; AssertionError where these say something else."""
    from lm_eval_moecache.harness.lm import MoECacheLM

    def told(act: Callable[[], object]) -> str:
        try:
            act()
        except ValueError as error:
            return str(error)
        return ""

    cell = Cell(model="moecache", model_args=given, tasks=("tiny_arc",))
    alone, in_sweep = told(lambda: MoECacheLM(**given)), told(lambda: check_cell(cell))
    assert alone == in_sweep, f"alone: {alone!r}, in a sweep: {in_sweep!r}"
    raise ValueError(alone)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep warnings of files that are left out off the screen."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def places_in(folder: Path) -> dict[str, str]:
    """Make the sound files that commands are given."""
    places = {name: folder / name for name in ("traces", "folder", "special", "models")}
    for place in (*places.values(), folder / "results"):
        place.mkdir()
    for suffix in ("yaml", "json", "csv", "jsonl", "npz", "parquet", "txt"):
        os.mkfifo(places["special"] / f"pipe.{suffix}")
        (places["special"] / f"zero.{suffix}").symlink_to("/dev/zero")
    config = json.loads((MODEL_DIR / "config.json").read_text())
    for name, changes in (("negative", {"num_experts": -1}), ("binary", {})):
        (places["models"] / name).mkdir()
        (places["models"] / name / "config.json").write_text(json.dumps({**config, **changes}))
    (places["models"] / "binary" / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"Some words to read: {number}." for number in range(20)))
    places |= {"text": text, "trace": traces.record(places["traces"])[0]}
    places["results"] = leaderboard_of_four(folder / "results")
    return {name: str(path) for name, path in places.items()}


def try_table(folder: Path, tally: Tally) -> None:
    """Try every row of the table of bad inputs."""
    places = places_in(folder)
    with silent():
        for bad in table():
            verdict, told = judge(bad, folder, places)
            left = [*Path(places["folder"]).iterdir()]
            verdict = LEFT if verdict == CLEAR and left else verdict
            given = f"{bad.kind}: {str(bad.given)[:160]}"
            tally.note(verdict, f"{given}: wanted {bad.words!r}: {told}, left {left}")
