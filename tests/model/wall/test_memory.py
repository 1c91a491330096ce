"""What host memory there is to take, control groups' limits among it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_eval_moecache.model.wall import memory
from lm_eval_moecache.model.wall.memory import available_host_bytes


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_groups_limit_is_room_too(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the group or of one above it, less what is used; cached files make way."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    monkeypatch.setattr(memory, "_PROC", proc)
    monkeypatch.setattr(memory, "_GROUPS", groups)
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
