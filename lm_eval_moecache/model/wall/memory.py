"""What host memory there is to take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_LIMIT = {"": "memory.max", "memory": "memory.limit_in_bytes"}
_USE = {"": "memory.current", "memory": "memory.usage_in_bytes"}
"""Controller in a line of /proc/self/cgroup (none: version 2) -> file of its figure."""


def available_host_bytes() -> int | None:
    """Return what can be taken without swapping, or beyond a control group's limit.

    None where the system does not say.
    """
    found = re.search(r"MemAvailable:\s+(\d+) kB", _text(_PROC / "meminfo"))
    rooms = [int(found[1]) * 1024] if found else []
    for line in _text(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for kind in _LIMIT:
            if kind in controllers.split(","):
                rooms += _rooms(kind, path)
    return min(rooms, default=None)


def _rooms(kind: str, path: str) -> Iterator[int]:
    """Return what a control group and those above it leave, cached files not counted as used."""
    group = Path(path.lstrip("/"))
    for place in (group, *group.parents):
        # A container may see its own group as the root.
        folder = _GROUPS / kind / place
        limit, used = _number(folder / _LIMIT[kind]), _number(folder / _USE[kind])
        if limit is not None and used is not None:
            cached = re.search(
                r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat"), re.M
            )
            yield max(0, limit - used + (int(cached[1]) if cached else 0))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
