"""Whole commands killed at random moments: nothing lost, nothing doubled, no process left.

    make kills TIMES=10

SIGKILL goes to the command alone, whose workers have to end by themselves; SIGINT goes to its whole
process group, as a terminal sends it. Each command then runs again to its end, as it says.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.soak.victims import Command, Fault, commands

SIGNALS = (signal.SIGKILL, signal.SIGINT)


def kills(
    times: int,
    seed: int,
    only: str = "",
    cold: bool = False,
    signals: Sequence[signal.Signals] = SIGNALS,
) -> int:
    """Kill each command this often by each signal, print a table, return the exit code."""
    begin, faults, chance = time.monotonic(), 0, random.Random(seed)
    sys.stdout.write(
        f"{'command':14s} {'signal':8s} killed fine  s undisturbed  s to its end, at most\n"
    )
    with tempfile.TemporaryDirectory() as scratch:
        for command in commands():
            if only not in command.name:
                continue
            place = Path(scratch) / command.name.replace(" ", "-").replace(",", "")
            place.mkdir()
            command.cold = cold
            command.measure(place / "whole")
            for number in signals:
                killed, lasted = kill_often(command, place, number, times, chance)
                faults += killed - len(lasted)
                sys.stdout.write(
                    f"{command.name:14s} {number.name:8s} {killed:6d} {len(lasted):4d} "
                    f"{command.seconds:14.1f} {max(lasted, default=0):22.2f}\n"
                )
                sys.stdout.flush()
    sys.stdout.write(f"{time.monotonic() - begin:.0f} s, seed {seed}, {faults} faults\n")
    return 1 if faults else 0


def kill_often(
    command: Command, place: Path, number: signal.Signals, times: int, chance: random.Random
) -> tuple[int, list[float]]:
    """Return how often it was killed, and how long each took to end that was without fault."""
    killed, lasted = 0, []
    for each in range(3 * times):
        if killed == times:
            break
        moment = chance.random()
        try:
            seconds = command.kill(place / f"{number.name}-{each}", moment, number)
        except Fault as fault:
            killed += 1
            sys.stderr.write(f"{command.name}, {number.name} at {moment:.3f}: {fault}\n")
            continue
        if seconds is not None:
            killed += 1
            lasted.append(seconds)
    return killed, lasted


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.soak.kills", description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a command's name")
    parser.add_argument("--cold", action="store_true", help="workers import all by themselves")
    parser.add_argument("--signal", choices=[n.name for n in SIGNALS], help="default: both")
    chosen = parser.parse_args()
    signals = SIGNALS if chosen.signal is None else (signal.Signals[chosen.signal],)
    raise SystemExit(kills(chosen.times, chosen.seed, chosen.only, chosen.cold, signals))
