"""Files are read while they are open, and the memory figures of a process are true."""

from __future__ import annotations

import gc
import mmap
import os
import time
from pathlib import Path

import pytest
import torch

from lm_eval_moecache.model import device
from lm_eval_moecache.model.device import available_host_bytes, own_bytes, watched
from lm_eval_moecache.model.wall.pools import DiskTier

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")
MB = 2**20


def test_a_file_that_ends_before_is_named_and_is_closed_with_its_tier(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(MB))

    def is_open() -> bool:
        folder = Path("/proc/self/fd")
        return any(
            os.path.realpath(folder / descriptor) == str(path) for descriptor in os.listdir(folder)
        )

    tier = DiskTier([{"w": [[(str(path), 0, 4)], [(str(path), MB - 2, 4)]]}])
    tier.fill(0, 0, {"w": torch.empty(1)})
    with pytest.raises(OSError, match=rf"expert 1: .*short ends at byte {MB}: the file is trunc"):
        tier.fill(0, 1, {"w": torch.empty(1)})
    assert is_open()
    del tier
    gc.collect()
    assert not is_open()


def test_what_is_taken_or_shared_counts_and_pages_of_a_mapped_file_do_not(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(os.urandom(64 * MB))
    at_start = own_bytes()
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        assert sum(mapped[:: mmap.PAGESIZE]) > 0
        with_map = own_bytes()
        # New pages from the system: an allocator may reuse pages, which count already.
        private = mmap.mmap(-1, 64 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        private.write(mapped[:])
        with_private = own_bytes()
        assert at_start is not None and with_map is not None and with_private is not None
        assert with_map - at_start < 8 * MB
        shared = mmap.mmap(-1, 64 * MB)
        shared.write(mapped[:])
        with_shared = own_bytes()
    assert with_shared is not None
    assert 56 * MB < with_private - with_map < 140 * MB
    assert with_shared - with_private > 56 * MB
    for mapping in (private, shared, mapped):
        mapping.close()


def test_the_peak_is_of_the_block_and_not_of_what_was_before_or_after() -> None:
    """The system's own figure (ru_maxrss) covers the whole life of a process."""
    before = bytearray(os.urandom(200 * MB))
    del before
    start = own_bytes()
    with pytest.raises(ZeroDivisionError), watched() as peak:
        inside = bytearray(os.urandom(50 * MB))
        time.sleep(0.2)
        assert len(inside) // 0
    after = bytearray(os.urandom(200 * MB))
    time.sleep(0.1)
    assert start is not None and after
    assert 45 * MB <= peak[0] - start < 130 * MB


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_groups_limit_is_room_too(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of the group or of one above it, less its use; cached files make way."""
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
