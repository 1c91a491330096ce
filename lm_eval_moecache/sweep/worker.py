"""Runs planned cells in this process, whichever executor asked: one loaded model for many runs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval_moecache.harness.plugin import MODELS
from lm_eval_moecache.sweep.evaluation import evaluate, quiet
from lm_eval_moecache.sweep.files import write_failure, write_record
from lm_eval_moecache.sweep.identity import ResolvedCell
from lm_eval_moecache.sweep.provenance import environment
from lm_eval_moecache.sweep.replaying import NoSharedRunError, replayed, replayed_trace
from lm_eval_moecache.sweep.sharing import SharedRun
from lm_eval_moecache.sweep.spec import REPLAY
from lm_eval_moecache.trace.detail import FULL

RECORD_FORMAT = 1
BY_MODEL, BY_REPLAY = "model", "replay"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run; its result or its traceback is in the experiment's folder."""

    run_id: str
    error: str | None = None
    by: str = BY_MODEL
    seconds: float = 0.0


@dataclass(slots=True)
class Holder:
    """The model this process has loaded, ready to be put behind another cache."""

    key: tuple[str, ...] | None = None
    lm: Any = field(default=None)

    def get(self, planned: ResolvedCell) -> Any:
        if self.key == planned.load_key:
            self.lm.install(planned.config)
            return self.lm
        # Freed first: two models may not fit.
        self.key = self.lm = None
        cell = planned.cell
        module, _, name = MODELS[cell.model].partition(":")
        model_class = getattr(importlib.import_module(module), name)
        self.lm = model_class(pretrained=cell.pretrained, **cell.arguments)
        if self.lm.moecache != planned.config:
            self.lm.install(planned.config)
        self.key = planned.load_key
        return self.lm


@cache
def _holder() -> Holder:
    """One per process: what makes loading a cost per process and not per run."""
    return Holder()


def run_cell(planned: ResolvedCell, folder: str, experiment: str) -> Outcome:
    """Run or replay one cell and write its record. Never raises for what a run can do wrong."""
    from_shared = planned.share is not None and not planned.share.records
    if from_shared or planned.cell.model == REPLAY:
        return _replay_cell(planned, Path(folder), experiment)
    started_s = time.time()
    begin = time.perf_counter()
    with quiet() as said:
        try:
            lm = _holder().get(planned)
            loaded = time.perf_counter()
            kept = evaluate(planned.cell, lm)
            if planned.share is not None:
                # Before the record: a kill in between leaves a trace that serves this cell, too.
                shared = SharedRun(Path(folder), planned.share.name)
                shared.keep(planned.run_id, planned.config.detail or FULL, kept)
        except Exception as error:
            # A model that failed half way may hold broken hooks: the next run loads its own.
            _holder.cache_clear()
            text = f"{traceback.format_exc()}\n--- output ---\n{said.getvalue()[-4000:]}"
            with contextlib.suppress(OSError):  # a full disk: the outcome says it all the same
                write_failure(Path(folder), planned.run_id, text)
            return Outcome(planned.run_id, f"{type(error).__name__}: {error}")
    seconds = {"load": loaded - begin, "evaluate": time.perf_counter() - loaded}
    made_by = {**environment(started_s, seconds), "made_by": {"run": planned.run_id}}
    record = {**head(planned, experiment), **kept, "environment": made_by}
    return _written(Path(folder), record, Outcome(planned.run_id, seconds=seconds["evaluate"]))


def _written(folder: Path, record: dict[str, Any], outcome: Outcome) -> Outcome:
    """Write a run's record. One that cannot be written is an outcome: the others may still be."""
    try:
        write_record(folder, record)
    except OSError as error:
        told = f"its result cannot be written: {error.filename}: {error.strerror or error}"
        return dataclasses.replace(outcome, error=told)
    return outcome


def _replay_cell(planned: ResolvedCell, folder: Path, experiment: str) -> Outcome:
    started_s, begin = time.time(), time.perf_counter()
    try:
        with quiet():
            if planned.share is None:
                kept, source = replayed_trace(planned), planned.cell.pretrained
            else:
                kept, source = replayed(planned, folder)
    except NoSharedRunError as error:
        return Outcome(planned.run_id, str(error), BY_REPLAY)
    except Exception as error:
        with contextlib.suppress(OSError):
            write_failure(folder, planned.run_id, traceback.format_exc())
        return Outcome(planned.run_id, f"{type(error).__name__}: {error}", BY_REPLAY)
    seconds = {"replay": time.perf_counter() - begin}
    made_by = {**environment(started_s, seconds), "made_by": {"replay_of": source}}
    record = {**head(planned, experiment), **kept, "environment": made_by}
    return _written(folder, record, Outcome(planned.run_id, None, BY_REPLAY, seconds["replay"]))


def run_cells(planned: Sequence[ResolvedCell], folder: str, experiment: str) -> list[Outcome]:
    return [run_cell(each, folder, experiment) for each in planned]


def head(planned: ResolvedCell, experiment: str) -> dict[str, Any]:
    """Return the part of a record that is known before the run."""
    cell = planned.cell
    return {
        "format": RECORD_FORMAT,
        "run_id": planned.run_id,
        "experiment": experiment,
        "label": cell.label,
        "configuration_hash": planned.configuration_hash,
        "sources": planned.sources,
        "configuration": {
            "model": cell.model,
            "model_args": dict(cell.model_args),
            "tasks": list(cell.tasks),
            **cell.options,
        },
    }
