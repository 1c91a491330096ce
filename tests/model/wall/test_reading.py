"""Reads past the page cache give the bytes of plain ones; memory is said as it is."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.model import device
from lm_eval_moecache.model.device import available_host_bytes, own_bytes, watched
from lm_eval_moecache.model.wall import pools
from lm_eval_moecache.model.wall.pools import FileReader

SIZE = 3 * 2**20 + 777


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Not in memory: there nothing can be read past the cache.
    path = tmp_path_factory.mktemp("reading") / "x"
    path.write_bytes(os.urandom(SIZE))
    return path


def read(reader: FileReader, file: Path, places: Sequence[tuple[int, int]]) -> list[bytes]:
    targets = [np.zeros(size, dtype=np.uint8) for _, size in places]
    reader.read([(str(file), start, t) for (start, _), t in zip(places, targets, strict=True)])
    return [target.tobytes() for target in targets]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_pieces_are_those_of_the_file(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    places = []
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, SIZE - 1))
        places.append((start, data.draw(st.integers(1, SIZE - start))))
    expected = [whole[start : start + size] for start, size in places]
    patch = pytest.MonkeyPatch()
    patch.setattr(pools, "DIRECT_FROM", data.draw(st.sampled_from([1, 5000, 2**20])))
    patch.setattr(pools, "PART", data.draw(st.sampled_from([4096, 100_000, 2**21])))
    try:
        for past_cache in (False, True):
            assert read(FileReader([str(file)], past_cache), file, places) == expected
    finally:
        patch.undo()


def past_the_cache(file: Path) -> FileReader:
    reader = FileReader([str(file)], past_cache=True)
    if not reader._direct:
        pytest.skip("this file system has a cache alone")
    return reader


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="Linux")
def test_large_pieces_go_past_the_cache_in_parts_and_small_ones_do_not(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, preadv = past_the_cache(file), os.preadv
    done: list[tuple[int, int]] = []

    def noted(descriptor: int, buffers: Any, offset: int) -> int:
        done.append((fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT, len(buffers[0])))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    read(reader, file, [(100, 3 * 2**20)])
    assert len(done) == 2 and all(direct and size % 4096 == 0 for direct, size in done)
    done.clear()
    read(reader, file, [(100, 1000)])
    read(FileReader([str(file)]), file, [(100, 3 * 2**20)])
    assert done == [(0, 1000), (0, 3 * 2**20)]


def test_what_cannot_be_read_past_the_cache_is_read_through_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may open a file so and refuse to read it."""
    reader = FileReader([str(file)], past_cache=True)
    preadv, direct = os.preadv, set(reader._direct.values())

    def refusing(descriptor: int, buffers: Any, offset: int) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    assert read(reader, file, [(5, 2**21)]) == [file.read_bytes()[5 : 5 + 2**21]]


@pytest.mark.parametrize("past_cache", [False, True])
def test_a_file_that_ends_before_is_named(past_cache: bool, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(2**21))
    reader = FileReader([str(path)], past_cache)
    with pytest.raises(OSError, match=r"short ends at byte \d+: the file is truncated"):
        read(reader, path, [(2**20, 2**20 + 1)])


def test_an_error_of_the_disk_is_raised_when_all_reads_have_ended(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = past_the_cache(file)
    preadv, ended = os.preadv, list[int]()

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        if offset < 2**20:
            raise OSError(errno.EIO, "Input/output error")
        ended.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match="Input/output error"):
        read(reader, file, [(0, 3 * 2**20)])
    assert ended == [2**21]


def test_files_are_closed_with_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "own"
    path.write_bytes(bytes(2**21))

    def opened() -> int:
        folder = Path("/proc/self/fd")
        return sum(os.path.realpath(folder / each) == str(path) for each in os.listdir(folder))

    reader = FileReader([str(path)], past_cache=True)
    read(reader, path, [(0, 2**21)])
    assert opened() == 1 + len(reader._direct)
    del reader
    gc.collect()
    assert opened() == 0


pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")
MB = 2**20


def test_what_is_taken_or_shared_counts_and_pages_of_a_mapped_file_do_not(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(os.urandom(64 * MB))
    before = own_bytes()
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        assert sum(mapped[:: mmap.PAGESIZE]) > 0
        with_map = own_bytes()
        # New pages from the system: an allocator may hand out what it kept, which counts already.
        own = mmap.mmap(-1, 64 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        own.write(mapped[:])
        with_own = own_bytes()
        assert before is not None and with_map is not None and with_own is not None
        assert with_map - before < 8 * MB
        shared = mmap.mmap(-1, 64 * MB)
        shared.write(mapped[:])
        with_shared = own_bytes()
    assert with_shared is not None
    assert 56 * MB < with_own - with_map < 140 * MB
    assert with_shared - with_own > 56 * MB
    for each in (own, shared, mapped):
        each.close()


def test_the_peak_is_of_the_block_and_not_of_what_was_before() -> None:
    """The system's own figure (ru_maxrss) is of the whole life of a process."""
    text = (
        "import os, time\n"
        "from lm_eval_moecache.model.device import own_bytes, watched\n"
        "before = bytearray(os.urandom(200 << 20))\n"
        "del before\n"
        "start = own_bytes()\n"
        "with watched() as peak:\n"
        "    inside = bytearray(os.urandom(50 << 20))\n"
        "    time.sleep(0.2)\n"
        "    del inside\n"
        "print((peak[0] - start) >> 20)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert 45 <= int(done.stdout) < 130


def test_watching_ends_with_the_block() -> None:
    with pytest.raises(ValueError, match="x"), watched() as peak:
        raise ValueError("x")
    found = list(peak)
    taken = bytearray(os.urandom(32 * MB))
    time.sleep(0.1)
    assert peak == found and len(taken) == 32 * MB


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_groups_limit_is_room_too(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the group or of one above it, less what is used; cached files make way."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    monkeypatch.setattr(device, "_PROC", proc)
    monkeypatch.setattr(device, "_GROUPS", groups)
    assert available_host_bytes() == 8000 * 1024
    kind, limit, used, cached = {
        1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("", "memory.max", "memory.current", "inactive_file"),
    }[version]
    inner, outer = groups / kind / "a/b", groups / kind / "a"
    inner.mkdir(parents=True)
    line = "4:memory:/a/b" if version == 1 else "0::/a/b"
    (proc / "self/cgroup").write_text(f"9:cpu:/elsewhere\n{line}\n")
    (inner / limit).write_text("max\n")
    assert available_host_bytes() == 8000 * 1024
    (outer / limit).write_text("5000000\n")
    (outer / used).write_text("4000000\n")
    assert available_host_bytes() == 1000000
    (outer / "memory.stat").write_text(f"x 1\n{cached} 500000\n")
    assert available_host_bytes() == 1500000
    (inner / limit).write_text("300\n")
    (inner / used).write_text("400\n")
    assert available_host_bytes() == 0
