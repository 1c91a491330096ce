"""Lets go of the pages of a mapped checkpoint that have been read: they count as a process' memory.

The system would drop them by itself when memory gets short, but they look like need until then.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_MADV_PAGEOUT = 21
"""Reclaim pages now, without losing what they hold: clean ones are read again when needed."""


def page_out_checkpoints() -> None:
    """Reclaim this process' pages of mapped safetensors files (on Linux; elsewhere nothing)."""
    maps = Path("/proc/self/maps")
    if not (sys.platform.startswith("linux") and maps.exists()):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for line in maps.read_text().splitlines():
        # The hub's cache keeps files by their hash, in folders of this name.
        if line.endswith(".safetensors") or "/blobs/" in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            # A kernel without it, or a file of somebody else's, refuses: no harm.
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_PAGEOUT)
