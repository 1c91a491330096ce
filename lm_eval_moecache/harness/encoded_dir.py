"""The folder in which encoded experts are kept, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.files import check_writable


def read_encoded_dir(given: Mapping[str, Any]) -> str | None:
    """Return `encoded_dir=`; ValueError where it has no effect, or cannot be written to."""
    folder = given.get("encoded_dir")
    if folder is None:
        return None
    if given.get("precision") is None:
        raise ValueError(
            f"encoded_dir={folder!r} has no effect without precision=: experts are stored as they "
            "are. Allowed with it: precision=int8, int8:int4:int2 and others."
        )
    try:
        check_writable(Path(str(folder)) / "kept")
    except OSError as error:
        raise ValueError(
            f"encoded_dir={folder!r} cannot be written to: {error}. Allowed: a folder of yours."
        ) from error
    return str(folder)
