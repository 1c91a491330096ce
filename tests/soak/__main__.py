"""`make soak SECONDS=600`: the outside checker and the bad inputs, for as long as one likes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

from lm_eval_moecache.tiny import MODEL_DIR
from tests.engine import traces
from tests.report.runs import leaderboard_of_four
from tests.soak.corpus import table
from tests.soak.judge import (
    ACCEPTED,
    CLEAR,
    HANG,
    LEFT,
    READERS,
    TRACEBACK,
    UNCLEAR,
    Tally,
    describe,
    judge,
    judged,
    silent,
)
from tests.soak.mutate import Damaged, damage, sound_files
from tests.soak.shadow import Violation, run_case

SHARE_OF_EVENTS = 0.8
"""Of the time; the rest is for damaged files, after every row of the table was tried once."""


def places_in(folder: Path) -> dict[str, str]:
    """Make the sound files that commands are given."""
    for name in ("traces", "results", "empty"):
        (folder / name).mkdir()
    path, _ = traces.record(folder / "traces")
    results = leaderboard_of_four(folder / "results")
    special, models = folder / "special", folder / "models"
    special.mkdir()
    for suffix in ("yaml", "json", "csv", "jsonl", "npz", "parquet", "txt"):
        os.mkfifo(special / f"pipe.{suffix}")
        (special / f"zero.{suffix}").symlink_to("/dev/zero")
    config = json.loads((MODEL_DIR / "config.json").read_text())
    for name, changes in (("negative", {"num_experts": -1}), ("binary", {})):
        (models / name).mkdir(parents=True)
        (models / name / "config.json").write_text(json.dumps({**config, **changes}))
    (models / "binary" / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"Some words to read: {number}." for number in range(20)))
    return {
        "trace": str(path),
        "results": str(results),
        "folder": str(folder / "empty"),
        "text": str(text),
        "special": str(special),
        "models": str(models),
    }


def try_table(folder: Path, tally: Tally) -> None:
    """Try every row of the table of bad inputs."""
    places = places_in(folder)
    with silent():
        for bad in table():
            verdict, told = judge(bad, folder, places)
            written = [*Path(places["folder"]).iterdir()]
            verdict = LEFT if verdict == CLEAR and written else verdict
            tally.note(verdict, f"{describe(bad)}: wanted {bad.words!r}: {told}, left {written}")


def damages(folder: Path, seed: int) -> Iterator[Damaged]:
    """Yield damaged files of every kind, without end."""
    files = sound_files(folder)
    rng = np.random.default_rng(seed)
    kinds = sorted(files)
    for number in count():
        kind = kinds[number % len(kinds)]
        yield damage(kind, files[kind], rng)


def try_damaged(damaged: Damaged, folder: Path, tally: Tally) -> None:
    """Read a damaged file. One that is still sound may be read; the others name their file."""
    name, reader = READERS[damaged.kind]
    path = folder / name
    path.write_bytes(damaged.data)
    with silent():
        verdict, told = judged(lambda: reader(path), path.name)
    if verdict == UNCLEAR and (damaged.kind == "sweep" or "=" in told):
        verdict = CLEAR  # names the field instead; a sweep's cells are named by who checks them
    if verdict == ACCEPTED and not damaged.must_be_refused:
        tally.still_sound += 1
        return
    tally.note(verdict, f"{damaged.kind} {damaged.how}: {told}")


def soak(seconds: float, seed: int) -> int:
    """Run, print what was tried, and return the exit code."""
    begin = time.monotonic()
    tally, events, cases, violations = Tally(), 0, 0, []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try_table(folder, tally)
        stream = damages(folder, seed)
        spent = {"events": 0.0, "files": time.monotonic() - begin}
        for number in count(seed):
            now = time.monotonic()
            if now - begin >= seconds:
                break
            if spent["events"] <= SHARE_OF_EVENTS * (now - begin):
                try:
                    events += run_case(number)
                except Violation as error:
                    violations.append(str(error))
                cases += 1
                spent["events"] += time.monotonic() - now
            else:
                for _ in range(20):
                    try_damaged(next(stream), folder, tally)
                spent["files"] += time.monotonic() - now
    sys.stdout.write(
        f"engine: {events} events in {cases} random cases, {len(violations)} violations\n"
        f"{tally.line()} (silently); {tally.still_sound} damaged files were still sound\n"
        f"{time.monotonic() - begin:.0f} s, {time.process_time():.0f} s of CPU, seed {seed}\n"
    )
    for text in [*violations, *tally.problems][:50]:
        sys.stdout.write(f"  {text[:400]}\n")
    bad = sum(tally.counts[name] for name in (TRACEBACK, HANG, UNCLEAR, ACCEPTED, LEFT))
    return 1 if violations or bad else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    raise SystemExit(soak(chosen.seconds, chosen.seed))
