"""The Optuna study of a search: kept in a journal file, so that an interrupted one goes on."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import warnings
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.hardware import RENAMED
from lm_eval_moecache.report.metrics import METRICS
from lm_eval_moecache.tune.measure import Objective

logger = logging.getLogger(__name__)
JOURNAL = "study.journal"
_STUDY = "moecache"
_STARTUP_TRIALS = 24


def import_optuna() -> Any:
    """Import the optional search library, or say which extra brings it."""
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise ValueError(
            f"moecache tune needs the package 'optuna', which is not installed ({error}). "
            "Install it with: pip install 'lm-eval-moecache[tune]'."
        ) from error


def open_study(folder: Path, objective: Objective, seed: int) -> Any:
    """Open or create the folder's study, which nobody else may be at work on.

    Raises ValueError where it is of another objective, or its journal is no longer readable.
    """
    optuna = import_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    _mend(folder / JOURNAL)
    direction = "maximize" if METRICS[objective.metric][2] else "minimize"
    journal = optuna.storages.journal
    try:
        storage = journal.JournalStorage(journal.JournalFileBackend(str(folder / JOURNAL)))
        directions = ["maximize", direction]
        study = optuna.create_study(
            study_name=_STUDY, storage=storage, directions=directions, load_if_exists=True
        )
    except OSError:
        raise
    except Exception as error:  # Optuna trusts its journal: any key that lacks, any assertion
        raise ValueError(
            f"out={str(folder)!r}: {JOURNAL} is no readable journal of a search "
            f"({type(error).__name__}: {error}). Give another folder, or remove it to begin anew."
        ) from error
    asked = {**dataclasses.asdict(objective), "tasks": list(objective.tasks)}
    before = {**asked, **study.user_attrs.get("question", {})}
    before["hardware"] = RENAMED.get(before["hardware"], before["hardware"])
    for key, value in asked.items():
        if before[key] != value:
            raise ValueError(
                f"out={str(folder)!r} holds a search with {key}={before[key]!r}, not {value!r}. "
                "Give another folder, or the same options to go on with it."
            )
    study.set_user_attr("question", asked)
    with warnings.catch_warnings():
        # `constraints_func` is deprecated in Optuna 5 for a method that Optuna 4 does not have.
        warnings.simplefilter("ignore", FutureWarning)
        study.sampler = optuna.samplers.TPESampler(
            # A resumed search draws anew instead of repeating its first trials.
            seed=seed + len(study.get_trials(deepcopy=False)),
            n_startup_trials=_STARTUP_TRIALS,
            constraints_func=lambda trial: (trial.user_attrs.get("excess", 1.0),),
        )
    return study


def _mend(journal: Path) -> None:
    """Take away what a kill or a full disk in the middle of a write has left.

    That is the lock, for which Optuna would wait half a minute, and a torn last line: the next
    one would be written behind it, and the journal would be lost.
    """
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if journal.is_file():
        data = journal.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            logger.warning("%s: its last line was torn, and is left out.", journal)
            os.truncate(journal, whole)
