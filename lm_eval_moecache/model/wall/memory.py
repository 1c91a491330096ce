"""What host memory a process takes for itself, and what there is to take."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EVERY_S = 0.02
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_LIMIT = {"": "memory.max", "memory": "memory.limit_in_bytes"}
_USE = {"": "memory.current", "memory": "memory.usage_in_bytes"}
"""Controller in a line of /proc/self/cgroup (none: version 2) -> file of its figure."""


def own_bytes() -> int | None:
    """Return the memory that is this process' alone or shared by it; None where it is not told.

    Maps of files do not count: the system takes their pages back when it needs them.
    """
    found = re.findall(r"(?:RssAnon|RssShmem):\s+(\d+) kB", _text(_PROC / "self/status"))
    return sum(map(int, found)) * 1024 if found else None


@contextmanager
def watched() -> Iterator[list[int]]:
    """Look at `own_bytes` every few milliseconds of a block; yield what was the most, if told."""
    peak: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while (now := own_bytes()) is not None:
            peak[:] = [max([now, *peak])]
            if done.wait(_EVERY_S):
                return

    thread = threading.Thread(target=watch, name="moecache-memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


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
