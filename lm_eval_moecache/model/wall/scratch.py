"""A folder for the files of one run while it loads; those of dead runs are removed."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lm_eval_moecache.records.files import lock

logger = logging.getLogger(__name__)
PREFIX = "experts-"


@contextmanager
def scratch(parent: Path) -> Iterator[str]:
    """Make a folder in `parent` which goes when the block ends.

    Folders there of runs that were killed are removed first: a run holds a lock on its own, which
    goes with the process. Raises OSError where nothing may be written.
    """
    parent.mkdir(parents=True, exist_ok=True)
    descriptors = [os.open(parent, os.O_RDONLY)]
    try:
        # One run at a time: a new folder that is not locked yet must not look like a dead one.
        if lock(descriptors[0], wait=True):
            _remove_dead(parent)
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        descriptors.append(os.open(folder, os.O_RDONLY))
        lock(descriptors[1])
        os.close(descriptors.pop(0))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _remove_dead(parent: Path) -> None:
    for folder in sorted(parent.glob(f"{PREFIX}*")):
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:  # another user's
            continue
        try:
            if lock(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
                logger.warning("store_dir: removed %s, of a run that was killed.", folder)
        finally:
            os.close(descriptor)
