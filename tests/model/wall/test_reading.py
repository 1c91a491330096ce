"""Reads past the page cache give the bytes of plain ones, wherever they begin and end."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.model.wall import tiers
from lm_eval_moecache.model.wall.tiers import FileReader

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
    patch.setattr(tiers, "DIRECT_FROM", data.draw(st.sampled_from([1, 5000, 2**20])))
    patch.setattr(tiers, "PART", data.draw(st.sampled_from([4096, 100_000, 2**21])))
    try:
        for past_cache in (False, True):
            assert read(FileReader([str(file)], past_cache), file, places) == expected
    finally:
        patch.undo()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Note each read: its flags and its size."""
    import fcntl

    done: list[tuple[int, int]] = []
    preadv = os.preadv

    def noted(descriptor: int, buffers: Any, offset: int) -> int:
        done.append((fcntl.fcntl(descriptor, fcntl.F_GETFL), len(buffers[0])))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    return done


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="Linux")
def test_large_pieces_go_past_the_cache_in_parts_and_small_ones_do_not(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = FileReader([str(file)], past_cache=True)
    if not reader._direct:
        pytest.skip("this file system has a cache alone")
    done = counted(monkeypatch)
    read(reader, file, [(100, 3 * 2**20)])
    assert len(done) == 2 and all(flags & os.O_DIRECT for flags, _ in done)
    assert all(size % 4096 == 0 for _, size in done)
    done.clear()
    read(reader, file, [(100, 1000)])
    assert [size for _, size in done] == [1000] and not done[0][0] & os.O_DIRECT
    done.clear()
    read(FileReader([str(file)]), file, [(100, 3 * 2**20)])
    assert len(done) == 1 and not done[0][0] & os.O_DIRECT


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
    reader = FileReader([str(file)], past_cache=True)
    if not reader._direct:
        pytest.skip("this file system has a cache alone")
    preadv, ended = os.preadv, list[int]()

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        if offset < 2**20:
            raise OSError(errno.EIO, "Input/output error")
        count = preadv(descriptor, buffers, offset)
        ended.append(offset)
        return count

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
