"""Runs planned cells in this process, whichever executor asked: one loaded model for many runs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
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
from lm_eval_moecache.trace.recorder import FULL

RECORD_FORMAT = 1
BY_MODEL, BY_REPLAY = "model", "replay"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run; its result or its traceback is in the experiment's folder."""

    run_id: str
    error: str | None = None
    by: str = BY_MODEL
    seconds: float = 0.0


class Holder:
    """The model this process has loaded, ready to be put behind another cache."""

    def __init__(self) -> None:
        self.key: tuple[str, ...] | None = None
        self.lm: Any = None

    def get(self, planned: ResolvedCell) -> Any:
        """Return the model of this cell behind a cold cache, loaded anew where it is another."""
        if self.key != planned.load_key:
            # Freed first: two models may not fit.
            self.key = self.lm = None
            module, _, name = MODELS[planned.cell.model].partition(":")
            model_class = getattr(importlib.import_module(module), name)
            self.lm = model_class(pretrained=planned.cell.pretrained, **planned.cell.arguments)
            self.key = planned.load_key
            if self.lm.moecache == planned.config:
                return self.lm
        self.lm.install(planned.config)
        return self.lm


@cache
def _holder() -> Holder:
    """One per process: what makes loading a cost per process and not per run."""
    return Holder()


def run_cell(planned: ResolvedCell, folder: str, experiment: str) -> Outcome:
    """Run or replay one cell and write its record. Never raises for what a run can do wrong."""
    where, share = Path(folder), planned.share
    is_replay = planned.cell.model == REPLAY or (share is not None and not share.records)
    outcome = Outcome(planned.run_id, by=BY_REPLAY if is_replay else BY_MODEL)
    started_s, begin = time.time(), time.perf_counter()
    with quiet() as said:
        try:
            if is_replay:
                if share is None:
                    kept, source = replayed_trace(planned), planned.cell.pretrained
                else:
                    kept, source = replayed(planned, where)
                made_by = {"replay_of": source}
                seconds = {"replay": time.perf_counter() - begin}
            else:
                lm = _holder().get(planned)
                loaded = time.perf_counter()
                kept, made_by = evaluate(planned.cell, lm), {"run": planned.run_id}
                if share is not None:
                    # Before the record: a kill in between leaves a trace that serves this cell too.
                    detail = planned.config.detail or FULL
                    SharedRun(where, share.name).keep(planned.run_id, detail, kept)
                seconds = {"load": loaded - begin, "evaluate": time.perf_counter() - loaded}
        except NoSharedRunError as error:
            return dataclasses.replace(outcome, error=str(error))
        except Exception as error:
            if not is_replay:
                # A model that failed half way may hold broken hooks: the next run loads its own.
                _holder.cache_clear()
            text = f"{traceback.format_exc()}\n--- output ---\n{said.getvalue()[-4000:]}"
            with contextlib.suppress(OSError):  # a full disk: the outcome says it all the same
                write_failure(where, planned.run_id, text)
            return dataclasses.replace(outcome, error=f"{type(error).__name__}: {error}")
    about = {**environment(started_s, seconds), "made_by": made_by}
    outcome = dataclasses.replace(outcome, seconds=seconds["replay" if is_replay else "evaluate"])
    try:
        write_record(where, {**head(planned, experiment), **kept, "environment": about})
    except OSError as error:  # of this record: the others may still be written
        told = f"its result cannot be written: {error.filename}: {error.strerror or error}"
        return dataclasses.replace(outcome, error=told)
    return outcome


def run_cells(planned: Sequence[ResolvedCell], folder: str, experiment: str) -> list[Outcome]:
    """Run cells one after another: a job of a cluster."""
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
