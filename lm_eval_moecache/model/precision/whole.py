"""A safetensors file that is believed only whole: renamed when written, with a checksum beside."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lm_eval_moecache.records.files import write_whole

logger = logging.getLogger(__name__)
_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class WholeFile:
    """One file and its note: SHA-256, and size and time of the file that had it."""

    path: Path

    @property
    def note(self) -> Path:
        return self.path.with_name(self.path.name + ".sha256")

    def write(self, data: bytes) -> None:
        """Write the file and then its note. Raises OSError."""
        write_whole(self.path, data)
        self._note(hashlib.sha256(data).hexdigest())

    def move(self, target: WholeFile) -> None:
        """Give the file another name, under which it is believed when its note has come, too."""
        os.replace(self.path, target.path)
        os.replace(self.note, target.note)

    def is_sound(self, thorough: bool) -> bool:
        """Whether the file has the bytes that were written.

        All are read, unless `thorough` is False and size and time are those of the note.
        """
        try:
            expected, *stamp = self.note.read_text().split()
            if thorough or stamp != self._stamp():
                if self._sum() != expected:
                    logger.warning("%s has other bytes than were written.", self.path)
                    return False
                if stamp != self._stamp():
                    self._note(expected)
            with safe_open(self.path, framework="pt"):
                return True
        except (OSError, SafetensorError, UnicodeDecodeError, ValueError):
            return False

    def _note(self, digest: str) -> None:
        write_whole(self.note, " ".join([digest, *self._stamp()]).encode())

    def _stamp(self) -> list[str]:
        about = self.path.stat()
        return [str(about.st_size), str(about.st_mtime_ns)]

    def _sum(self) -> str:
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while data := file.read(_CHUNK):
                digest.update(data)
        return digest.hexdigest()
