"""Reading experts from files that no page cache holds: how many at a time, and past the cache.

Writes a file of `--gigabytes`, and reads experts of OLMoE-1B-7B's size from random places in it, in
turn: one after another, two to four at a time, each in parts read by several threads, and all of
these with O_DIRECT. Pages are dropped before each round (POSIX_FADV_DONTNEED).

    python benchmarks/disk_reads.py [--gigabytes 4] [--reads 40] [--rounds 3] [--folder .]
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

EXPERT = 3 * 2048 * 1024 * 2
_BLOCK = 4096
Read = Callable[[int, memoryview, int], None]


def whole(descriptor: int, view: memoryview, offset: int) -> None:
    """Read until the view is full."""
    while view:
        count = os.preadv(descriptor, [view], offset)
        assert count, "the file ends"
        view, offset = view[count:], offset + count


def in_parts(pool: ThreadPoolExecutor, parts: int) -> Read:
    """Return a read whose parts are in flight together."""
    step = -(-EXPERT // parts // _BLOCK) * _BLOCK

    def read(descriptor: int, view: memoryview, offset: int) -> None:
        starts = range(0, len(view), step)
        done = [pool.submit(whole, descriptor, view[s : s + step], offset + s) for s in starts]
        for each in done:
            each.result()

    return read


def run(
    path: str, places: Sequence[int], at_once: int, parts: int, direct: bool
) -> tuple[float, float]:
    """Return GB/s by the clock, and the milliseconds of CPU that one read took."""
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    buffers = [memoryview(mmap.mmap(-1, EXPERT)) for _ in range(at_once)]
    for buffer in buffers:
        buffer[:] = bytes(EXPERT)  # Its pages are there before anything is measured.
    with ThreadPoolExecutor(parts) as pool, ThreadPoolExecutor(at_once) as readers:
        read = whole if parts == 1 else in_parts(pool, parts)
        start, cpu = time.perf_counter(), time.process_time()
        work = [
            readers.submit(read, descriptor, buffers[i % at_once], place)
            for i, place in enumerate(places)
        ]
        for each in work:
            each.result()
        taken, used = time.perf_counter() - start, time.process_time() - cpu
    os.close(descriptor)
    return len(places) * EXPERT / taken / 1e9, used / len(places) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--reads", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder")
    given = parser.parse_args()
    ways = [
        (at_once, parts, direct)
        for direct in (False, True)
        for at_once, parts in ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 4))
    ]
    found: dict[tuple[int, int, bool], list[tuple[float, float]]] = {way: [] for way in ways}
    with tempfile.NamedTemporaryFile(dir=given.folder) as file:
        count = int(given.gigabytes * 1e9) // EXPERT
        for _ in range(count):
            file.write(random.randbytes(EXPERT))
        file.flush()
        os.fsync(file.fileno())
        for seed in range(given.rounds):
            places = random.Random(seed).choices(range(count), k=given.reads)
            for way in ways:
                found[way].append(run(file.name, [p * EXPERT for p in places], *way))
    base = statistics.median(rate for rate, _ in found[1, 1, False])
    print(f"{given.reads} experts of {EXPERT / 1e6:.1f} MB of {count}, medians of {given.rounds}:")
    print("| reads at a time | parts each | O_DIRECT | GB/s | of one | CPU ms a read |")
    print("|---|---|---|---|---|---|")
    for (at_once, parts, direct), rounds in found.items():
        rate, cpu = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(
            f"| {at_once} | {parts} | {'yes' if direct else 'no'} | {rate:.2f} | "
            f"{rate / base:.2f} | {cpu:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
