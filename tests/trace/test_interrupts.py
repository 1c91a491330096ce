"""Finished requests are kept, whichever line of the recorder an interrupt or a kill hits."""

from __future__ import annotations

import re
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lm_eval_moecache.trace import file, recorder
from lm_eval_moecache.trace.file import read_trace
from lm_eval_moecache.trace.recorder import TraceWriter
from tests.engine.traces import begin, requests

FILES = {str(recorder.__file__), str(file.__file__)}
PASSES = 2
REQUESTS = 3
START, STEP = 0, 4
"""First line tried and stride: trying every line takes a minute."""


def at_each_line(act: Callable[[int], object]) -> Callable[[], None]:
    """Call `act(number)` before each executed line of the writer; return a stop function."""
    number = -1

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal number
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            number += 1
            act(number)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    return lambda: sys.settrace(before)


def record(folder: Path, told: list[int], made: list[TraceWriter]) -> None:
    """Record a few requests; append the writer to `made`, and each kept request to `told`."""
    made.append(recording := begin(folder))
    for request in requests(recording, REQUESTS, PASSES):
        recording.keep()
        told.append(request)


def passes_in(folder: Path) -> int:
    """Return the number of passes kept of a folder's only recording, and check for other files.

    A stream remains next to its trace if the kill or interrupt came just before its removal.
    """
    recordings = sorted(folder.iterdir())
    assert all(path.name.startswith("run-000.parquet") for path in recordings), recordings
    try:
        return max((read_trace(path).num_passes for path in recordings), default=0)
    except ValueError as error:
        assert re.search("is not a readable stream|has no rows", str(error))
        return 0


def test_an_interrupt_at_any_line_keeps_every_request_that_was_told_finished(
    tmp_path: Path,
) -> None:
    """Up to the end of the recording, `close` included; then the process ends."""
    done, at = False, START
    while not done:
        folder = tmp_path / str(at)
        folder.mkdir()
        finished: list[int] = []
        writers: list[TraceWriter] = []

        def interrupt(number: int, at: int = at) -> None:
            if number == at:
                raise KeyboardInterrupt

        stop = at_each_line(interrupt)
        try:
            record(folder, finished, writers)
            writers[0].close()
            done = True
        except KeyboardInterrupt:
            stop()
            for writer in writers:
                writer.close_interrupted()
        finally:
            stop()
        if writers:
            assert passes_in(folder) in (PASSES * len(finished), PASSES * len(finished) + PASSES), (
                at
            )
        at += STEP
    assert at > 200


def test_a_kill_at_any_line_keeps_every_request_that_was_told_finished(tmp_path: Path) -> None:
    folder, copy = tmp_path / "recorded", tmp_path / "killed"
    folder.mkdir()
    finished: list[int] = []
    writers: list[TraceWriter] = []
    seen_counts = set()

    def kill(number: int) -> None:
        """Check the files as a killed process would leave them."""
        if number % STEP:
            return
        sys.settrace(None)
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.writing"))
        passes = passes_in(copy)
        assert passes in (PASSES * len(finished), PASSES * len(finished) + PASSES), number
        seen_counts.add(passes)
        shutil.rmtree(copy)
        sys.settrace(tracing)

    stop = at_each_line(kill)
    tracing = sys.gettrace()
    try:
        record(folder, finished, writers)
        writers[0].close()
    finally:
        stop()
    assert seen_counts == {PASSES * count for count in range(REQUESTS + 1)}


def test_a_full_disk_ends_the_recording_and_keeps_what_was_finished(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    writers: list[TraceWriter] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    record(tmp_path / "all", [], writers)
    [stream] = (tmp_path / "all").iterdir()
    used = stream.stat().st_size
    writers.pop().close()
    for room in range(used - 1, used // 3, -100):
        folder = tmp_path / str(room)
        folder.mkdir()
        finished: list[int] = []
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            with pytest.raises(ValueError, match="File too large"):
                record(folder, finished, writers)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        [stream] = folder.iterdir()
        if finished:
            assert read_trace(stream).num_passes == PASSES * len(finished)
