"""Whether lm-eval can save what it is asked to, before a run; and whether it has, after it.

lm-eval writes at the end, into a folder named after the model, and only logs that it could not.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.errors import ArgumentsError
from lm_eval_moecache.records.files import TINY, check_writable
from lm_eval_moecache.records.numbers import shown

# In lm-eval's order (`GeneralConfigTracker`).
_NAMING = ("peft", "delta", "pretrained", "model", "path", "engine")
_DATE = "2026-01-31T12-00-00.000000"
_FAILED = "Could not save"
_TRACKER = logging.getLogger("lm_eval.loggers.evaluation_tracker")


def check_output(evaluation: Mapping[str, Any]) -> None:
    """Raise ArgumentsError where what `lm_eval run` with these options writes cannot be written."""
    from lm_eval.utils import sanitize_model_name

    output = str(evaluation.get("output_path") or "")
    if not output:
        return
    path, model_args = Path(output), evaluation.get("model_args") or {}
    key = next((key for key in _NAMING if key in model_args), "pretrained")
    name, folder = str(model_args.get(key, TINY)), path.parent
    results = path.with_name(f"{path.stem}_{_DATE}.json")
    if path.suffix != ".json":
        folder = path / sanitize_model_name(name)
        results = folder / f"results_{_DATE}.json"
    logs = evaluation.get("log_samples") or evaluation.get("predict_only")
    tasks = evaluation.get("tasks", ()) if logs else ()
    samples = [folder / f"samples_{task}_{_DATE}.jsonl" for task in tasks]
    try:
        for file in (results, *samples):
            check_writable(file)
    except OSError as error:
        raise ArgumentsError(
            f"--output_path={output!r} cannot be written: {shown(error.filename)}: "
            f"{error.strerror}. Allowed: a folder that can be made, or a .json file in one. "
            f"lm-eval makes a folder in it that is named as {key}={shown(name)}."
        ) from None


class Unsaved(logging.Handler):
    """Notes what lm-eval says it could not save, and why."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        _TRACKER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(_FAILED):
            self.texts.append(f"{text[0].lower()}{text[1:]}: {sys.exc_info()[1]}")

    def exit_code(self) -> int:
        """Return 1, and say what could not be saved, or 0. Nothing is noted any more."""
        _TRACKER.removeHandler(self)
        for text in self.texts:
            sys.stderr.write(f"moecache: {text}\n")
        return int(bool(self.texts))

    def end_process(self) -> None:
        """End this process, as its last act, with code 1 where something could not be saved."""
        atexit.register(self._end)

    def _end(self) -> None:
        if self.exit_code():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
