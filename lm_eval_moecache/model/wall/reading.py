"""Reads pieces of files into memory: large ones past the page cache, several at a time."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Piece = tuple[str, int, Bytes]
"""A file, where something begins in it, and where it shall go."""
IN_FLIGHT = 2
"""Reads at a time: while one is copied to its place, the disk works on the next."""
PART = 2 << 20
"""Bytes of one read."""
DIRECT_FROM = 1 << 20
"""Pieces of so many bytes are read past the page cache: smaller ones gain nothing by it."""
_BLOCK = 4096


class FileReader:
    """Some files, open until the reader is gone, whoever removes them meanwhile.

    With `past_cache` large pieces are read with O_DIRECT where the file system can: a page cache
    that the files do not fit into costs the processor more than it saves, and its pages are
    somebody's memory.
    """

    def __init__(self, files: Collection[str], past_cache: bool = False) -> None:
        self._files = {file: os.open(file, os.O_RDONLY) for file in sorted(files)}
        self._direct: dict[str, int] = {}
        for file in self._files if past_cache else ():
            try:
                self._direct[file] = os.open(file, os.O_RDONLY | os.O_DIRECT)
            except (OSError, AttributeError):  # a file system in memory; no Linux
                continue
        weakref.finalize(self, _close, [*self._files.values(), *self._direct.values()])
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "moecache-read")
        self._own = threading.local()

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill the targets. Raises OSError where a file cannot be read, or ends before."""
        running: list[Future[None]] = []
        for file, offset, target in pieces:
            if file not in self._direct or len(target) < DIRECT_FROM:
                self._buffered(file, offset, target)
                continue
            for start in range(0, len(target), PART):
                part = target[start : start + PART]
                running.append(self._pool.submit(self._past_cache, file, offset + start, part))
        errors = [error for error in (each.exception() for each in running) if error is not None]
        if errors:
            raise errors[0]

    def _buffered(self, file: str, offset: int, target: Bytes) -> None:
        view = memoryview(target.data)
        while view:
            count = os.preadv(self._files[file], [view], offset)
            if not count:
                raise OSError(f"{file} ends at byte {offset}: the file is truncated.")
            view, offset = view[count:], offset + count

    def _past_cache(self, file: str, offset: int, target: Bytes) -> None:
        """Read whole blocks into a buffer of this thread, and copy what was asked for."""
        buffer = self._buffer()
        begin = offset // _BLOCK * _BLOCK
        size = -(-(offset + len(target)) // _BLOCK) * _BLOCK - begin
        found = 0
        while found < offset - begin + len(target):
            try:
                view = memoryview(buffer.data)[found:size]
                count = os.preadv(self._direct[file], [view], begin + found)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Larger blocks than ours, or a file system that opens so and does not read so.
                self._buffered(file, offset, target)
                return
            if not count:
                raise OSError(f"{file} ends at byte {begin + found}: the file is truncated.")
            found += count
        np.copyto(target, buffer[offset - begin : offset - begin + len(target)])

    def _buffer(self) -> Bytes:
        if not hasattr(self._own, "buffer"):
            # Of a map of its own, which begins at a page, as these reads need.
            self._own.buffer = np.frombuffer(mmap.mmap(-1, PART + 2 * _BLOCK), dtype=np.uint8)
        found: Bytes = self._own.buffer
        return found


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
