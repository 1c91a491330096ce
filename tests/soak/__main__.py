"""`make soak SECONDS=600`: engine against oracle and the bad inputs, for as long as one likes."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

from tests.engine.drawn import check
from tests.soak.corpus import table
from tests.soak.judge import FAULTS, Tally, try_damaged, try_table
from tests.soak.kinds import damages

SHARE_OF_EVENTS = 0.8
"""Share of the time; the rest is for damaged files, once every row of the table was tried."""


def soak(seconds: float, seed: int) -> int:
    """Run, print the counts and problems, and return the exit code."""
    begin = time.monotonic()
    tally, events, cases, violations = Tally(), 0, 0, list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try_table(folder, tally, table())
        stream = damages(folder, seed)
        spent = {"events": 0.0, "files": time.monotonic() - begin}
        for number in count(seed):
            now = time.monotonic()
            if now - begin >= seconds:
                break
            if spent["events"] <= SHARE_OF_EVENTS * (now - begin):
                try:
                    events += len(check(number).trace.key_bounds) - 1
                except Exception as error:
                    violations.append(f"seed={number}: {type(error).__name__}: {error}")
                cases += 1
                spent["events"] += time.monotonic() - now
            else:
                for _ in range(20):
                    try_damaged(next(stream), folder, tally)
                spent["files"] += time.monotonic() - now
    sys.stdout.write(
        f"engine: {events} events in {cases} random cases, {len(violations)} unlike the oracle's\n"
        f"{tally.line()} (silently); {tally.still_sound} damaged files were still sound\n"
        f"{time.monotonic() - begin:.0f} s, {time.process_time():.0f} s of CPU, seed {seed}\n"
    )
    for text in [*violations, *tally.problems][:50]:
        sys.stdout.write(f"  {text[:400]}\n")
    bad = sum(tally.counts[name] for name in FAULTS)
    return 1 if violations or bad else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    raise SystemExit(soak(chosen.seconds, chosen.seed))
