"""Whole commands killed at random moments: nothing lost, nothing doubled, no process left.

    python -m tests.soak.kills --times 10

SIGKILL goes to the command alone, whose workers have to end by themselves; SIGINT goes to its whole
process group, as a terminal sends it. Each command then runs again to its end, as it says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lm_eval_moecache.records.files import PART
from lm_eval_moecache.trace.file import read_trace
from lm_eval_moecache.trace.partial import SUFFIX

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGKILL, signal.SIGINT)
LONGEST_S = 600
PLACE = "pretrained=tiny,capacity=25%"
POLICIES = ["on_demand", "specmd", "pruning", "cumsum"]
SPACE = {
    "routing": {"standard": {}, "cumsum": {"p": [0.5, 0.8]}},
    "prefetch": {"none": {}},
    "eviction": {"lru": {}, "fifo": {}},
    "miss": {"fetch": {}},
}


class Fault(AssertionError):
    """What a kill must not do."""


def require(holds: bool, what: object) -> None:
    if not holds:
        raise Fault(str(what))


class Ended:
    """A command that was ended, or has ended: its exit code and what it said."""

    def __init__(self, process: subprocess.Popen[str], in_time: bool) -> None:
        self.out, self.err = process.communicate(timeout=LONGEST_S)
        self.code = process.returncode
        self.was_killed = in_time
        deadline = time.monotonic() + 20
        while (left := processes_of(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        require(not left, f"processes left: {left}")


def processes_of(group: int) -> list[int]:
    """Return the processes of a group that still run (Linux)."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = place.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if state != "Z" and int(its_group) == group:
            found.append(int(place.parent.name))
    return found


class Command(ABC):
    """One command in a folder of its own, and what has to be true after a kill and after a rerun.

    `reference` is the folder of an undisturbed run, `seconds` what that took.
    """

    name: str
    resumes: str
    """Of the line that an interrupt ends with."""
    reference: Path
    seconds: float

    @abstractmethod
    def argv(self, folder: Path) -> list[str]:
        """Return the command, after what it needs is written."""

    @abstractmethod
    def check_killed(self, folder: Path, ended: Ended) -> Any:
        """Raise Fault where something is lost; return what the rerun has to keep."""

    @abstractmethod
    def check_rerun(self, folder: Path, ended: Ended, kept: Any) -> None:
        """Raise Fault where something is lost or doubled once the command ran to its end."""

    def start(self, folder: Path, kill_after_s: float | None, number: int = 0) -> Ended:
        """Run the command, and send it a signal after this time if it still runs then."""
        process = subprocess.Popen(
            [sys.executable, "-m", "lm_eval_moecache.cli.main", *self.argv(folder)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        in_time = False
        if kill_after_s is not None:
            try:
                process.wait(kill_after_s)
            except subprocess.TimeoutExpired:
                in_time = True
                (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
        return Ended(process, in_time)

    def measure(self, folder: Path) -> None:
        """Run it undisturbed."""
        folder.mkdir()
        begin = time.monotonic()
        ended = self.start(folder, None)
        self.seconds, self.reference = time.monotonic() - begin, folder
        require(ended.code == 0, ended.err[-2000:])

    def kill(self, folder: Path, moment: float, number: int) -> bool:
        """Kill it at a share of its time and run it again; False where it was over before."""
        folder.mkdir()
        # Python itself and this package's entry are there after a moment; before is nobody's.
        ended = self.start(folder, 0.3 + moment * (self.seconds - 0.3), number)
        if not ended.was_killed or ended.code == 0:
            return False
        if number == signal.SIGINT:
            lines = [line for line in ended.err.splitlines() if "interrupted." in line]
            require(ended.code == 130, f"exit {ended.code}: {ended.err[-2000:]}")
            require(len(lines) == 1 and self.resumes in lines[0], ended.err[-2000:])
            require("Traceback" not in ended.err, ended.err[-3000:])
        kept = self.check_killed(folder, ended)
        again = self.start(folder, None)
        require(again.code == 0, again.err[-2000:])
        self.check_rerun(folder, again, kept)
        return True


def scores_of(folder: Path) -> Any:
    """Return the scores of the one results file of lm-eval; figures of speed are apart."""
    [path] = folder.rglob("results_*.json")
    found = json.loads(path.read_text())["results"]
    return {
        task: {key: value for key, value in row.items() if key.startswith("acc")}
        for task, row in found.items()
    }


def routed(path: Path) -> Sequence[Any]:
    """Return the experts of each row of each event of a trace."""
    trace = read_trace(path)
    return np.split(np.asarray(trace.columns.experts), trace.row_bounds[1:-1])


def passes_of(path: Path, count: int) -> int:
    """Return how many passes answer the first requests; choices of one token share a pass."""
    each = sorted(sorted(request.passes) for request in read_trace(path).requests)
    return len({number for passes in each[:count] for number in passes})


class Eval(Command):
    """A run through lm-eval, on the modelled clock with a trace or on the machine's own."""

    resumes = "begins anew"

    def __init__(self, name: str, extra: str, limit: int) -> None:
        self.name, self.extra, self.limit = name, extra, limit

    def argv(self, folder: Path) -> list[str]:
        arguments = f"{PLACE},{self.extra}"
        return (
            f"eval --model_args {arguments} --tasks tiny_arc --limit {self.limit} "
            f"--output_path {folder / 'out'} --device cpu"
        ).split()

    def check_killed(self, folder: Path, ended: Ended) -> Any:
        """Every request that the progress bar has told finished is in the recording."""
        shown = [int(n) for n in re.findall(r"loglikelihood requests:.*?(\d+)/\d+", ended.err)]
        if "trace=" not in self.extra or not shown:
            return None
        recordings = list((folder / "traces").glob("*"))
        require(bool(recordings), f"{shown[-1]} requests were finished and no recording is there")
        return {path.name: path.read_bytes() for path in recordings}, shown[-1]

    def check_rerun(self, folder: Path, ended: Ended, kept: Any) -> None:
        # What was killed while it wrote its last file may have finished that.
        results = sorted(folder.rglob("results_*.json"))
        for older in results[:-1]:
            older.unlink()
        require(bool(results), "no results")
        require(scores_of(folder) == scores_of(self.reference), "other scores than undisturbed")
        store = folder / "store"
        litter = list(store.iterdir()) if store.exists() else []
        require(not litter, f"litter: {litter}")
        if "trace=" not in self.extra:
            return
        [whole] = (self.reference / "traces").iterdir()
        expected = routed(whole)
        traces = sorted((folder / "traces").iterdir())
        require(all(path.suffix == ".parquet" for path in traces), f"litter: {traces}")
        for path in traces:
            found = routed(path)
            same = all(np.array_equal(a, b) for a, b in zip(found, expected, strict=False))
            require(same and len(found) <= len(expected), f"{path.name} is not what was routed")
        require(len(routed(traces[-1])) == len(expected), f"{traces[-1].name} is not whole")
        if kept is not None and kept[1] > 0:
            needed = passes_of(whole, kept[1])
            require(len(traces) == 2, f"recordings: {traces}, where {kept[1]} were finished")
            passes = read_trace(traces[0]).num_passes
            require(passes >= needed, f"{passes} of {needed} passes of {kept[1]} requests kept")


class Kept(Command):
    """A command that keeps finished runs as records, and goes on with the others."""

    out: str

    def runs(self, folder: Path) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in (folder / self.out / "runs").glob("*.json")}

    def check_killed(self, folder: Path, ended: Ended) -> Any:
        runs = self.runs(folder)
        hashes = [json.loads(text)["configuration_hash"] for text in runs.values()]
        require(len(set(hashes)) == len(hashes), "a run is there twice")
        require(not (folder / self.out / "failed").exists(), "a kill counts as a failed run")
        return runs

    def check_rerun(self, folder: Path, ended: Ended, kept: Any) -> None:
        runs = self.runs(folder)
        changed = [name for name, text in kept.items() if runs.get(name) != text]
        require(not changed, f"finished runs were lost or ran again: {changed}")
        litter = [p for p in (folder / self.out).rglob("*") if p.name.endswith((PART, SUFFIX))]
        require(not litter, f"litter: {litter}")
        self.check_whole(folder, runs, kept, json.loads(ended.out))

    @abstractmethod
    def check_whole(
        self, folder: Path, runs: dict[str, bytes], kept: dict[str, bytes], told: Any
    ) -> None:
        """Compare what is there at the end with the undisturbed run, and with what was told."""


class Sweep(Kept):
    name, resumes, out = "sweep, 2 jobs", "goes on with the others", "experiment"

    def argv(self, folder: Path) -> list[str]:
        path = folder / self.out / "sweep.yaml"
        path.parent.mkdir(exist_ok=True)
        base = {"pretrained": "tiny", "hardware": "h200", "device": "cpu"}
        grid = {"policy": POLICIES, "capacity": ["25%", "50%"]}
        sweep = {"tasks": "tiny_arc", "limit": 4, "jobs": 2, "base": base, "grid": grid}
        path.write_text(yaml.safe_dump(sweep))
        return ["sweep", str(path), "--json"]

    def check_whole(
        self, folder: Path, runs: dict[str, bytes], kept: dict[str, bytes], told: Any
    ) -> None:
        expected = self.runs(self.reference)
        require(runs.keys() == expected.keys(), f"runs: {sorted(runs)}")
        require(len(told["skipped"]) == len(kept), f"skipped {told['skipped']} of {sorted(kept)}")
        require(len(told["done"]) == len(runs) - len(kept), f"done: {told['done']}")
        for name, text in runs.items():
            same = json.loads(text)["results"] == json.loads(expected[name])["results"]
            require(same, f"{name}: other results than undisturbed")


class Tune(Kept):
    name, resumes, out = "tune", "goes on with the search", "found"

    def argv(self, folder: Path) -> list[str]:
        (folder / "space.yaml").write_text(yaml.safe_dump(SPACE))
        return (
            f"tune --out {folder / self.out} --tasks tiny_arc --limit 2 --metric ttft_ms --json "
            f"--space {folder / 'space.yaml'} --trials 4 --jobs 2 --model_args device=cpu"
        ).split()

    def check_whole(
        self, folder: Path, runs: dict[str, bytes], kept: dict[str, bytes], told: Any
    ) -> None:
        [whole] = self.reference.rglob("front.json")
        expected = json.loads(whole.read_text())
        shipped = {e["name"]: (e["accuracy"], e["speed"]) for e in expected["shipped"]}
        found = {e["name"]: (e["accuracy"], e["speed"]) for e in told["shipped"]}
        require(len(told["shipped"]) == len(found), "a composition is there twice")
        require(found == shipped, "other figures of the compositions than undisturbed")
        require(told["trials"].get("running", 0) == 0, f"open trials: {told['trials']}")


def commands() -> list[Command]:
    return [
        Eval("traced run", "policy=specmd,hardware=h200,trace=traces", limit=20),
        Sweep(),
        Tune(),
        Eval("wall clock", "policy=on_demand,clock=wall,store=disk,store_dir=store", limit=20),
    ]


def kills(times: int, seed: int, only: str = "") -> int:
    """Kill each command this often by each signal, print a table, return the exit code."""
    chance, faults = random.Random(seed), 0
    sys.stdout.write(f"{'command':14s} {'signal':8s} {'tried':>5s} {'ok':>3s}\n")
    with tempfile.TemporaryDirectory() as scratch:
        for command in commands():
            if only not in command.name:
                continue
            place = Path(scratch) / command.name.replace(" ", "-").replace(",", "")
            place.mkdir()
            command.measure(place / "whole")
            for number in SIGNALS:
                tried = fine = 0
                for each in range(3 * times):
                    if tried == times:
                        break
                    moment = chance.random()
                    try:
                        killed = command.kill(place / f"{number.name}-{each}", moment, number)
                        tried, fine = tried + killed, fine + killed
                    except Fault as fault:
                        tried, faults = tried + 1, faults + 1
                        sys.stderr.write(
                            f"{command.name}, {number.name} at {moment:.3f}: {fault}\n"
                        )
                line = f"{command.name:14s} {number.name:8s} {tried:5d} {fine:3d}"
                sys.stdout.write(f"{line}   ({command.seconds:.0f} s undisturbed)\n")
                sys.stdout.flush()
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.soak.kills", description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a command's name")
    chosen = parser.parse_args()
    raise SystemExit(kills(chosen.times, chosen.seed, chosen.only))
