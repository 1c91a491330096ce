"""What was told finished is kept, whichever line of the recording an interrupt or a kill meets."""

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
"""Of the lines that are tried: all of them take a minute."""


def at_each_line(act: Callable[[int], object]) -> Callable[[], None]:
    """Call `act(number)` before each line of the writer that runs; return what ends that."""
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
    """Record a few requests; `told` gets the number of each once it is kept."""
    made.append(recording := begin(folder))
    for request in requests(recording, REQUESTS, PASSES):
        recording.keep()
        told.append(request)


def passes_in(folder: Path) -> int:
    """Return how many passes are kept of the one recording of a folder, which has nothing else.

    Killed or interrupted when all was done but to remove it, a stream lies beside its trace.
    """
    found = sorted(folder.iterdir())
    assert all(path.name.startswith("run-000.parquet") for path in found), found
    try:
        return max((read_trace(path).num_passes for path in found), default=0)
    except ValueError as error:
        assert re.search("is not a readable stream|holds no rows", str(error))
        return 0


def test_an_interrupt_at_any_line_keeps_every_request_that_was_told_finished(
    tmp_path: Path,
) -> None:
    """Up to the recording's end, `close` included, behind which the process' end comes."""
    done, at = False, START
    while not done:
        folder = tmp_path / str(at)
        folder.mkdir()
        told: list[int] = []
        made: list[TraceWriter] = []

        def interrupt(number: int, at: int = at) -> None:
            if number == at:
                raise KeyboardInterrupt

        stop = at_each_line(interrupt)
        try:
            record(folder, told, made)
            made[0].close()
            done = True
        except KeyboardInterrupt:
            stop()
            for each in made:
                each.close_interrupted()
        finally:
            stop()
        if made:
            assert passes_in(folder) in (PASSES * len(told), PASSES * len(told) + PASSES), at
        at += STEP
    assert at > 200


def test_a_kill_at_any_line_keeps_every_request_that_was_told_finished(tmp_path: Path) -> None:
    folder, copy = tmp_path / "recorded", tmp_path / "killed"
    folder.mkdir()
    told: list[int] = []
    made: list[TraceWriter] = []
    seen = set()

    def kill(number: int) -> None:
        """Look at the disk as a killed process leaves it."""
        if number % STEP:
            return
        sys.settrace(None)
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.writing"))
        passes = passes_in(copy)
        assert passes in (PASSES * len(told), PASSES * len(told) + PASSES), number
        seen.add(passes)
        shutil.rmtree(copy)
        sys.settrace(tracing)

    stop = at_each_line(kill)
    tracing = sys.gettrace()
    try:
        record(folder, told, made)
        made[0].close()
    finally:
        stop()
    assert seen == {PASSES * count for count in range(REQUESTS + 1)}


def test_a_full_disk_ends_the_recording_and_keeps_what_was_finished(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    made: list[TraceWriter] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    record(tmp_path / "all", [], made)
    [stream] = (tmp_path / "all").iterdir()
    used = stream.stat().st_size
    made.pop().close()
    for room in range(used - 1, used // 3, -100):
        folder = tmp_path / str(room)
        folder.mkdir()
        told: list[int] = []
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            with pytest.raises(ValueError, match="File too large"):
                record(folder, told, made)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        [stream] = folder.iterdir()
        if told:
            assert read_trace(stream).num_passes == PASSES * len(told)
