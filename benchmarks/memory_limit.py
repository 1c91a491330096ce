"""Limits the memory of this process: by a control group, which counts cached files, too; else data.

A control group (v1 or v2) needs the right to make one. Without it RLIMIT_DATA limits what the
process allocates and what it maps privately, and files that were read may be read again from the
page cache for nothing: a benchmark of disk offloading then measures memory. `Limit.kind` says so.
"""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from types import TracebackType

GROUPS = Path("/sys/fs/cgroup")


class Limit:
    """Puts this process into a control group of its own until the block is over."""

    def __init__(self) -> None:
        self.kind = "RLIMIT_DATA"
        self._group: Path | None = None
        self._file = ""

    def __enter__(self) -> Limit:
        for parent, file in _places():
            group = parent / f"moecache-{os.getpid()}"
            try:
                group.mkdir()
            except OSError:
                continue
            try:
                assert (group / file).exists()
                (group / "cgroup.procs").write_text(str(os.getpid()))
            except (OSError, AssertionError):
                group.rmdir()
                continue
            self._group, self._file, self.kind = group, file, "control group"
            break
        return self

    def grant(self, nbytes: int, mapped: int = 0) -> None:
        """Allow so many bytes beyond what is held now; `mapped`: of files, by rlimit alone.

        Raises OSError where more is held and cannot be taken back.
        """
        if self._group is not None:
            (self._group / self._file).write_text(str(status("RssAnon") + nbytes))
        else:
            most = status("VmData") + nbytes + mapped
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._group is not None:
            (self._group.parent / "cgroup.procs").write_text(str(os.getpid()))
            self._group.rmdir()


def _places() -> list[tuple[Path, str]]:
    """Return where a group may be made, with the file of its limit: this process' own group."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append((GROUPS / path.lstrip("/"), "memory.max"))
        elif "memory" in controllers.split(","):
            found.append((GROUPS / "memory" / path.lstrip("/"), "memory.limit_in_bytes"))
    return found


def remove_group_of(pid: int) -> None:
    """Remove the group of a process that was killed and could not."""
    for parent, _ in _places():
        group = parent / f"moecache-{pid}"
        if group.exists():
            group.rmdir()


def status(field: str) -> int:
    """Return a figure of this process in bytes: RssAnon is memory of its own, no map of a file."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, field
    return int(found[1]) * 1024


def bytes_read() -> int:
    """Return what this process had read from the disk so far: not what the page cache had."""
    found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def forget_cached(folder: Path | str) -> None:
    """Let the page cache drop the files of a folder, so that everybody begins with a cold one."""
    for file in Path(folder).rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
