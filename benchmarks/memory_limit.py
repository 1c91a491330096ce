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

GROUPS = Path("/sys/fs/cgroup")


class Limit:
    """Puts this process into a control group of its own until the block is over."""

    def __init__(self) -> None:
        self.kind = "RLIMIT_DATA"
        self._file: Path | None = None

    def __enter__(self) -> Limit:
        for file in _limits_of(os.getpid()):
            try:
                file.parent.mkdir()
            except OSError:
                continue
            try:
                assert file.exists()
                (file.parent / "cgroup.procs").write_text(str(os.getpid()))
            except (OSError, AssertionError):
                file.parent.rmdir()
                continue
            self._file, self.kind = file, "control group"
            break
        return self

    def grant(self, nbytes: int, mapped: int = 0) -> None:
        """Allow so many bytes beyond what is held now; `mapped`: of files, by rlimit alone.

        Raises OSError where more is held and cannot be taken back.
        """
        if self._file is not None:
            self._file.write_text(str(status("RssAnon") + nbytes))
        else:
            most = status("VmData") + nbytes + mapped
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            (self._file.parent.parent / "cgroup.procs").write_text(str(os.getpid()))
            self._file.parent.rmdir()


def _limits_of(pid: int) -> list[Path]:
    """Return the files that would limit a process, in groups below this process' own."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        group = Path(path.lstrip("/"), f"moecache-{pid}")
        if controllers == "":
            found.append(GROUPS / group / "memory.max")
        elif "memory" in controllers.split(","):
            found.append(GROUPS / "memory" / group / "memory.limit_in_bytes")
    return found


def remove_group_of(pid: int) -> None:
    """Remove the group of a process that was killed and could not."""
    for file in _limits_of(pid):
        if file.parent.exists():
            file.parent.rmdir()


def _figure(pattern: str, file: str) -> int:
    found = re.search(pattern, Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    assert found is not None, pattern
    return int(found[1])


def status(field: str) -> int:
    """Return a figure of this process in bytes: RssAnon is memory of its own, no map of a file."""
    return 1024 * _figure(rf"{field}:\s+(\d+) kB", "status")


def bytes_read() -> int:
    """Return what this process had read from the disk so far: not what the page cache had."""
    return _figure(r"^read_bytes: (\d+)", "io")


def forget_cached(folder: Path | str) -> None:
    """Let the page cache drop the files of a folder, so that everybody begins with a cold one."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
