"""A recording killed at any moment: every request that was told finished is there, and once."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.trace.file import read_trace
from lm_eval_moecache.trace.partial import recover
from tests.trace.recording import requests, start

NUM_REQUESTS = 400
PASSES = 6


def record(folder: str, told: Any) -> None:
    """Record many requests; say of each that it is finished once it is kept."""
    writer = start(Path(folder))
    try:
        for _ in requests(writer, NUM_REQUESTS, PASSES):
            writer.keep()
            os.write(told, b".")
        writer.close()
    except KeyboardInterrupt:
        writer.close_interrupted()


def rest_of(descriptor: int) -> int:
    """Return how many bytes are left in a pipe whose other end is closed."""
    total = 0
    while data := os.read(descriptor, 4096):
        total += len(data)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda n: n.name)
def test_ten_kills_lose_nothing_that_was_finished_and_double_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    chance = random.Random(int(number))
    killed = 0
    for each in range(10):
        folder = tmp_path / str(each)
        folder.mkdir()
        ours, theirs = os.pipe()
        child = multiprocessing.get_context("fork").Process(
            target=record, args=(str(folder), theirs)
        )
        child.start()
        os.close(theirs)
        os.read(ours, 1)
        time.sleep(chance.uniform(0, 0.3))
        assert child.pid is not None
        os.kill(child.pid, number)
        child.join(60)
        finished = 1 + rest_of(ours)
        os.close(ours)
        killed += finished < NUM_REQUESTS
        recover(folder)
        [path] = folder.iterdir()
        trace = read_trace(path)
        # A request may have been kept in the instant before it could be told.
        assert len(trace.requests) in (finished, finished + 1)
        assert all(len(r.passes) == PASSES for r in trace.requests)
        assert trace.num_passes == PASSES * len(trace.requests)
        assert recover(folder) == []
    assert killed >= 5, "most recordings were over before the kill"
