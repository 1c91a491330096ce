"""What was told finished is kept, whichever line of the recording an interrupt or a kill meets."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lm_eval_moecache.trace import partial, writer
from lm_eval_moecache.trace.file import read_trace
from lm_eval_moecache.trace.partial import SUFFIX, recover
from lm_eval_moecache.trace.writer import TraceWriter
from tests.trace.recording import forget, requests, start

FILES = {str(writer.__file__), str(partial.__file__)}
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
    made.append(recording := start(folder))
    for request in requests(recording, REQUESTS, PASSES):
        recording.keep()
        told.append(request)


def passes_in(folder: Path) -> int:
    """Return how many passes are kept in the one trace of a folder, which has nothing else."""
    found = list(folder.iterdir())
    assert all(path.suffix == ".parquet" for path in found), found
    return read_trace(found[0]).num_passes if found else 0


def test_an_interrupt_at_any_line_keeps_every_request_that_was_told_finished(
    tmp_path: Path,
) -> None:
    """Up to the recording's end, `close` included; the process' end does what `end` does."""
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
            end(made, folder)
        finally:
            stop()
        if made:
            assert passes_in(folder) in (PASSES * len(told), PASSES * len(told) + PASSES), at
        at += STEP
    assert at > 200


def end(made: list[TraceWriter], folder: Path) -> None:
    for each in made:
        each.close_interrupted()
    for stream in folder.glob(f"*{SUFFIX}"):
        # Interrupted while it was made, or when all was done but to remove it.
        assert not made or stream.with_suffix("").exists()
        for each in made:
            each._raw.close()
        recover(folder)


def test_a_kill_at_any_line_keeps_every_request_that_was_told_finished(tmp_path: Path) -> None:
    folder, copy = tmp_path / "recorded", tmp_path / "killed"
    folder.mkdir()
    told: list[int] = []
    made: list[TraceWriter] = []
    seen = set()

    def kill(number: int) -> None:
        """Look at the disk as a killed process leaves it, in a copy that nobody locks."""
        if number % STEP:
            return
        sys.settrace(None)
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.writing"))
        recover(copy)
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


def test_what_a_disk_takes_in_parts_is_written_whole_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow takes no notice of how much was written: half a batch would pass for kept."""
    room, real = 10**9, os.write

    def grudging(descriptor: int, data: memoryview) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(room, 100, len(data))
        room -= taken
        return real(descriptor, data[:taken])

    monkeypatch.setattr(partial.os, "write", grudging)
    made: list[TraceWriter] = []
    (tmp_path / "all").mkdir()
    record(tmp_path / "all", [], made)
    used = 10**9 - room
    made.pop().close()
    assert passes_in(tmp_path / "all") == PASSES * REQUESTS
    for room in range(used - 1, used // 3, -100):
        folder = tmp_path / str(room)
        folder.mkdir()
        told: list[int] = []
        with pytest.raises(ValueError, match="No space left on device"):
            record(folder, told, made)
        [stream] = folder.iterdir()
        if told:
            assert read_trace(stream).num_passes == PASSES * len(told)
        forget(made.pop())
