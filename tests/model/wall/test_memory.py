"""Files are read while they are open; the memory that a host has to give is found."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from lm_eval_moecache.model import device
from lm_eval_moecache.model.device import available_host_bytes
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
