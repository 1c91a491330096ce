"""The Optuna study of a search: kept in a journal file, so that an interrupted one goes on."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.hardware import RENAMED
from lm_eval_moecache.report.columns import METRICS
from lm_eval_moecache.tune.measure import Objective

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
    """Open or create the folder's study. Raises ValueError where it is of another objective."""
    optuna = import_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    journal = optuna.storages.journal
    storage = journal.JournalStorage(journal.JournalFileBackend(str(folder / JOURNAL)))
    higher = METRICS[objective.metric][2]
    study = optuna.create_study(
        study_name=_STUDY,
        storage=storage,
        directions=["maximize", "maximize" if higher else "minimize"],
        load_if_exists=True,
    )
    asked = {**dataclasses.asdict(objective), "tasks": list(objective.tasks)}
    before = dict(study.user_attrs.get("question", asked))
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


def fail_unfinished(study: Any) -> None:
    """Close the trials that a kill has left open: what they drew may be drawn again."""
    states = import_optuna().trial.TrialState
    for trial in study.get_trials(deepcopy=False, states=(states.RUNNING, states.WAITING)):
        study.tell(trial.number, state=states.FAIL)
