"""Whole commands killed at random moments: nothing lost, nothing doubled, no process left.

    make kills TIMES=10

SIGKILL goes to the command alone, whose workers have to end by themselves; SIGINT goes to its whole
process group, as a terminal sends it. Each command then runs again to its end, as it says. Each is
forked from a server that has imported torch and lm-eval before: kills meet the command's work and
not Python's imports.
"""

from __future__ import annotations

import argparse
import atexit
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.records.files import PART
from lm_eval_moecache.trace.file import SUFFIX, read_trace

LONGEST_S = 600
LONGEST_LEFT_S = 20
"""Time for workers to notice that their parent is gone."""
WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(
    [
        "lm_eval.__main__",
        *(f"lm_eval_moecache.{m}" for m in ("harness.lm", "sweep.run", "tune.search")),
    ]
)


class Fault(AssertionError):
    """A kill lost, doubled or left something."""


def require(holds: bool, what: object) -> None:
    if not holds:
        raise Fault(str(what))


class Ended(NamedTuple):
    """A command after its end or kill: exit code, printed text and duration."""

    code: int
    out: str
    err: str
    was_killed: bool
    seconds: float


def play(argv: Sequence[str], folder: str, out: str, err: str) -> None:
    """Run the command in this forked process, as its entry point does."""
    os.setpgrp()
    os.chdir(folder)
    # The second file signals that the group exists and may be killed.
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    try:
        code: Any = main(argv)
    except SystemExit as ended:
        code = ended.code or 0
    # Python runs these at exit, which multiprocessing skips.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def processes_of(group: int) -> list[int]:
    """Return the live processes of a group (Linux)."""
    processes = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if state != "Z" and int(its_group) == group:
            processes.append(int(stat.parent.name))
    return processes


class Command:
    """One command in its own folder, and the conditions after a kill and after a rerun.

    `reference` is the folder of an undisturbed run, `seconds` the fastest duration so far,
    `resumes` a part of the line that an interrupted command ends with.
    """

    name: str
    resumes: str
    reference: Path
    seconds: float

    def argv(self, folder: Path) -> list[str]:
        """Write the files that the command needs, and return its arguments."""
        raise NotImplementedError

    def check_killed(self, folder: Path, ended: Ended) -> Any:
        """Raise Fault if something is lost; return the finished work that the rerun must keep."""
        raise NotImplementedError

    def check_rerun(self, folder: Path, ended: Ended, kept: Any) -> None:
        """Raise Fault if something is lost or doubled after the rerun."""
        raise NotImplementedError

    def start(self, folder: Path, kill_after_s: float | None, number: int = 0) -> Ended:
        """Run the command, and send it a signal after this time if it is still running."""
        folder.mkdir(exist_ok=True)
        out, err = (folder.with_name(f"{folder.name}.{name}") for name in ("out", "err"))
        for path in (out, err):
            path.unlink(missing_ok=True)
        child = WARM.Process(target=play, args=(self.argv(folder), str(folder), str(out), str(err)))
        child.start()
        while not err.exists():
            time.sleep(0.001)
        begin = time.monotonic()
        child.join(kill_after_s)
        was_killed = child.is_alive()
        assert child.pid is not None
        if was_killed:
            (os.kill if number == signal.SIGKILL else os.killpg)(child.pid, number)
        child.join(LONGEST_S)
        end = time.monotonic()
        require(child.exitcode is not None, f"it still runs {LONGEST_S} s later")
        while (survivors := processes_of(child.pid)) and time.monotonic() < end + LONGEST_LEFT_S:
            time.sleep(0.02)
        require(not survivors, f"processes left after {LONGEST_LEFT_S} s: {survivors}")
        texts = out.read_text(errors="replace"), err.read_text(errors="replace")
        return Ended(child.exitcode or 0, *texts, was_killed, end - begin)

    def kill(self, folder: Path, moment: float, number: int) -> bool:
        """Kill it at a share of its time and run it again; False if it had already ended."""
        ended = self.start(folder, moment * self.seconds, number)
        if not ended.was_killed or ended.code == 0:
            # Earlier runs were slower, on a shared machine: keep later moments before the end.
            self.seconds = min(self.seconds, ended.seconds)
            return False
        if number == signal.SIGINT:
            lines = [line for line in ended.err.splitlines() if "interrupted." in line]
            require(ended.code == 130, f"exit {ended.code}: {ended.err[-2000:]}")
            require(len(lines) == 1 and self.resumes in lines[0], ended.err[-2000:])
            require("Traceback" not in ended.err, ended.err[-3000:])
        finished = self.check_killed(folder, ended)
        rerun = self.start(folder, None)
        require(rerun.code == 0, rerun.err[-2000:])
        self.check_rerun(folder, rerun, finished)
        return True


def scores_of(folder: Path) -> Any:
    """Return the scores in lm-eval's only results file, without the speed figures."""
    [path] = folder.rglob("results_*.json")
    rows = json.loads(path.read_text())["results"].items()
    return [(task, {k: v for k, v in row.items() if k.startswith("acc")}) for task, row in rows]


def routed(path: Path) -> Sequence[Any]:
    """Return the experts of a trace as one array per event."""
    trace = read_trace(path)
    return np.split(np.asarray(trace.columns.experts), trace.row_bounds[1:-1])


class Eval(Command):
    """A run through lm-eval, on the virtual clock with a trace or on the wall clock."""

    resumes = "begins anew"

    def __init__(self, name: str, extra: str, limit: int) -> None:
        self.name, self.extra, self.limit = name, extra, limit

    def argv(self, folder: Path) -> list[str]:
        return (
            f"eval --model_args pretrained=tiny,capacity=25%,{self.extra} --tasks tiny_arc "
            f"--limit {self.limit} --output_path {folder / 'out'} --device cpu"
        ).split()

    def check_killed(self, folder: Path, ended: Ended) -> Any:
        """A recording exists once the progress bar has counted a request as finished."""
        progress = [int(n) for n in re.findall(r"loglikelihood requests:.*?(\d+)/\d+", ended.err)]
        if "trace=" not in self.extra or not progress or not progress[-1]:
            return 0  # an interrupt before the first request is finished leaves no file
        is_there = any((folder / "traces").glob("*"))
        require(is_there, f"{progress[-1]} requests were finished and no recording is there")
        return progress[-1]

    def check_rerun(self, folder: Path, ended: Ended, kept: Any) -> None:
        # A run killed while writing its last file may have finished it.
        results = sorted(folder.rglob("results_*.json"))
        for older in results[:-1]:
            older.unlink()
        require(bool(results), "no results")
        require(scores_of(folder) == scores_of(self.reference), "other scores than undisturbed")
        litter = list((folder / "store").glob("*"))
        require(not litter, f"litter: {litter}")
        if "trace=" not in self.extra:
            return
        [reference] = (self.reference / "traces").iterdir()
        expected, traces = routed(reference), sorted((folder / "traces").glob("[!.]*"))
        # Keep a killed run's stream, unless its trace exists or no request was finished.
        traces = [
            path
            for path in traces
            if path.suffix != SUFFIX or (kept and path.with_suffix("") not in traces)
        ]
        require(all(path.suffix in (".parquet", SUFFIX) for path in traces), f"litter: {traces}")
        for path in traces:
            experts = routed(path)
            is_same = all(np.array_equal(a, b) for a, b in zip(experts, expected, strict=False))
            require(
                is_same and len(experts) <= len(expected), f"{path.name} is not what was routed"
            )
        require(len(routed(traces[-1])) == len(expected), f"{traces[-1].name} is not whole")
        if kept:
            require(len(traces) == 2, f"recordings: {traces}, where {kept} were finished")
            # One-token choices share a pass.
            request_passes = sorted(
                sorted(request.passes) for request in read_trace(reference).requests
            )
            needed = len({number for passes in request_passes[:kept] for number in passes})
            passes = read_trace(traces[0]).num_passes
            require(passes >= needed, f"{passes} of {needed} passes of {kept} requests kept")


class Kept(Command):
    """A command that keeps finished runs as records and resumes with the others."""

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
        self.check_whole(runs, kept, json.loads(ended.out))

    def check_whole(self, runs: dict[str, bytes], kept: dict[str, bytes], told: Any) -> None:
        """Compare the final runs with the undisturbed ones and with the printed JSON."""
        raise NotImplementedError


class Sweep(Kept):
    name, resumes, out = "sweep, 2 jobs", "goes on with the others", "experiment"

    def argv(self, folder: Path) -> list[str]:
        path = folder / self.out / "sweep.yaml"
        path.parent.mkdir(exist_ok=True)
        base = {"pretrained": "tiny", "hardware": "h200", "device": "cpu"}
        grid = {"policy": ["on_demand", "specmd", "pruning", "cumsum"], "capacity": ["25%", "50%"]}
        sweep = {"tasks": "tiny_arc", "limit": 4, "jobs": 2, "base": base, "grid": grid}
        path.write_text(yaml.safe_dump(sweep))
        return ["sweep", str(path), "--json"]

    def check_whole(self, runs: dict[str, bytes], kept: dict[str, bytes], told: Any) -> None:
        expected = self.runs(self.reference)
        require(runs.keys() == expected.keys(), f"runs: {sorted(runs)}")
        require(len(told["skipped"]) == len(kept), f"skipped {told['skipped']} of {sorted(kept)}")
        require(len(told["done"]) == len(runs) - len(kept), f"done: {told['done']}")
        for name, text in runs.items():
            same = json.loads(text)["results"] == json.loads(expected[name])["results"]
            require(same, f"{name}: other results than undisturbed")


class Tune(Kept):
    """A search on a small random model, whose two dozen runs take as long as two of `tiny`."""

    name, resumes, out = "tune", "goes on with the search", "found"

    def argv(self, folder: Path) -> list[str]:
        axes = {"routing": ("standard", "cumsum"), "prefetch": ("none",), "miss": ("fetch",)}
        space = {axis: {name: {} for name in names} for axis, names in axes.items()}
        space["eviction"] = {"lru": {}, "fifo": {}}
        (folder / "space.yaml").write_text(yaml.safe_dump(space))
        model = folder.parent / "model"
        if not model.exists():
            # Imported late, as only this command needs torch.
            from tests.models import save_model

            save_model(model, "olmoe")
        return (
            f"tune --out {folder / self.out} --tasks tiny_arc --limit 2 --metric ttft_ms --json "
            f"--pretrained {model} --space {folder / 'space.yaml'} --trials 4 --jobs 2 "
            "--model_args device=cpu"
        ).split()

    def check_whole(self, runs: dict[str, bytes], kept: dict[str, bytes], told: Any) -> None:
        [whole] = self.reference.rglob("front.json")
        expected, shipped = (
            {
                composition["name"]: (composition["accuracy"], composition["speed"])
                for composition in front["shipped"]
            }
            for front in (json.loads(whole.read_text()), told)
        )
        require(len(told["shipped"]) == len(shipped), "a composition is there twice")
        require(shipped == expected, "other figures of the compositions than undisturbed")
        require(told["trials"].get("running", 0) == 0, f"open trials: {told['trials']}")


def kills(times: int, seed: int, only: str = "") -> int:
    """Kill each command `times` times by each signal, print a table, return the exit code."""
    faults, chance = 0, random.Random(seed)
    traced = Eval("traced run", "policy=specmd,hardware=h200,trace=traces", limit=6)
    on_wall = "policy=on_demand,clock=wall,store=disk,store_dir=store"
    with tempfile.TemporaryDirectory() as scratch:
        for command in (traced, Sweep(), Tune(), Eval("wall clock", on_wall, limit=6)):
            if only not in command.name:
                continue
            place = Path(scratch) / command.name.replace(" ", "-").replace(",", "")
            place.mkdir()
            command.reference = place / "whole"
            reference = command.start(command.reference, None)
            require(reference.code == 0, reference.err[-2000:])
            command.seconds = reference.seconds
            for number in (signal.SIGKILL, signal.SIGINT):
                killed = wrong = 0
                for attempt in range(3 * times):
                    moment = chance.random()
                    try:
                        killed += command.kill(place / f"{number.name}-{attempt}", moment, number)
                    except Fault as fault:
                        killed, wrong = killed + 1, wrong + 1
                        print(f"{command.name}, {number.name} at {moment:.3f}: {fault}")
                    if killed == times:
                        break
                faults += wrong
                print(
                    f"{command.name:14} {number.name:8} {killed} killed, {wrong} faults", flush=True
                )
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.soak.kills", description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a command's name")
    chosen = parser.parse_args()
    raise SystemExit(kills(chosen.times, chosen.seed, chosen.only))
