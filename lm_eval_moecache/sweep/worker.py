"""Makes one cell's record in this process: runs the model, loaded once for many cells, or replays.

Two kinds of cells are replayed. Cells of a sweep over `traces` replay an existing trace: offline
algorithms (`eviction=belady`, `prefetch=oracle`) are allowed, and a lossy policy is replayed
open-loop, as the trace keeps the recorded routing. Cells of a group with equal outputs are replayed
from the run that the group shares: only their speed differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.plugin import MODELS
from lm_eval_moecache.harness.run_report import run_report
from lm_eval_moecache.harness.tasks import document_metrics
from lm_eval_moecache.records.artifact import versions_of
from lm_eval_moecache.records.errors import MoECacheError
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.records.sizes import parse_bytes
from lm_eval_moecache.sweep.evaluation import (
    by_metric,
    evaluate,
    quiet,
    recorded_speed,
    without_speed,
)
from lm_eval_moecache.sweep.files import write_failure, write_record
from lm_eval_moecache.sweep.identity import ResolvedCell, content_digest, plan
from lm_eval_moecache.sweep.replay_grid import Replays
from lm_eval_moecache.sweep.sharing import SharedRun
from lm_eval_moecache.sweep.spec import REPLAY, Cell
from lm_eval_moecache.trace.file import StreamedTrace
from lm_eval_moecache.trace.importers import open_any
from lm_eval_moecache.trace.recorder import FULL
from lm_eval_moecache.trace.trace import Trace

RECORD_FORMAT = 1
BY_MODEL, BY_REPLAY = "model", "replay"
# Settings of the maths libraries that change how sums round.
_ROUNDING = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
_PACKAGES = ("lm-eval-moecache", "lm-eval", "torch", "transformers", "numpy")
_versions = cache(versions_of)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended; its record or its traceback is in the experiment's folder."""

    run_id: str
    error: str | None = None
    by: str = BY_MODEL
    seconds: float = 0.0


_loaded: dict[tuple[str, ...], Any] = {}
"""The one model of this process: loading costs once per process, not once per run."""


def _model_of(planned: ResolvedCell) -> Any:
    """Return the cell's model behind a cold cache; load it unless this process holds it."""
    lm = _loaded.get(planned.load_key)
    if lm is None:
        # Free the old model first: two may not fit.
        _loaded.clear()
        module, _, name = MODELS[planned.cell.model].partition(":")
        model_class = getattr(importlib.import_module(module), name)
        lm = model_class(pretrained=planned.cell.pretrained, **planned.cell.arguments)
        _loaded[planned.load_key] = lm
        if lm.moecache == planned.config:
            return lm
    lm.install(planned.config)
    return lm


def forget_model() -> None:
    """Free the model that this process holds."""
    _loaded.clear()


def run_cell(planned: ResolvedCell, folder: str, experiment: str) -> Outcome:
    """Run or replay one cell and write its record; a run's errors go into the outcome."""
    root, is_replay = Path(folder), planned.replayed or planned.cell.model == REPLAY
    outcome = Outcome(planned.run_id, by=BY_REPLAY if is_replay else BY_MODEL)
    started_s, begin = time.time(), time.perf_counter()
    with quiet() as captured:
        try:
            if is_replay:
                results, source = _replayed(planned, root)
                made_by = {"replay_of": source}
                seconds = {"replay": time.perf_counter() - begin}
            else:
                lm = _model_of(planned)
                loaded = time.perf_counter()
                results, made_by = evaluate(planned.cell, lm), {"run": planned.run_id}
                if planned.shared is not None:
                    # Before the record: after a kill in between, the trace serves this cell too.
                    detail = planned.config.detail or FULL
                    SharedRun(root, planned.shared).keep(planned.run_id, detail, results)
                seconds = {"load": loaded - begin, "evaluate": time.perf_counter() - loaded}
        except NoSharedRunError as error:
            return dataclasses.replace(outcome, error=str(error))
        except Exception as error:
            if not is_replay:
                # A model that failed half way may keep broken hooks: the next run loads it anew.
                _loaded.clear()
            text = f"{traceback.format_exc()}\n--- output ---\n{captured.getvalue()[-4000:]}"
            with contextlib.suppress(OSError):  # a full disk: the outcome still has the error
                write_failure(root, planned.run_id, text)
            return dataclasses.replace(outcome, error=f"{type(error).__name__}: {error}")
    provenance = {**environment(started_s, seconds), "made_by": made_by}
    outcome = dataclasses.replace(outcome, seconds=seconds["replay" if is_replay else "evaluate"])
    try:
        write_record(root, {**head(planned, experiment), **results, "environment": provenance})
    except OSError as error:  # only this record is lost: others may still be written
        message = f"its result cannot be written: {error.filename}: {error.strerror or error}"
        return dataclasses.replace(outcome, error=message)
    return outcome


def run_cells(planned: Sequence[ResolvedCell], folder: str, experiment: str) -> list[Outcome]:
    """Run cells one after another, as one job of a cluster."""
    return [run_cell(cell, folder, experiment) for cell in planned]


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
        "inputs": planned.inputs,
        "configuration": planned.settings,
    }


# --- replayed cells: of an existing trace, or of the run that a group shares ---


class NoSharedRunError(MoECacheError):
    """The run to replay a cell from is missing: not a failure of the cell itself."""


def check_trace_cell(cell: Cell) -> ResolvedCell:
    """Return the cell with its identity.

    Raises ValueError naming the key, or the trace, that does not fit.
    """
    settings = {key: value for key, value in cell.arguments.items() if key != "expert_bytes"}
    config = read_config({"policy": "on_demand", **settings}, replayed=True)
    trace = _trace_of(cell, cell.pretrained)
    if settings.get("seed") is None:
        config = config.with_changes(seed=trace.seed)
    Replays(trace, [config]).setting(config)
    return plan(cell, config, {})


def _trace_of(cell: Cell, file: str) -> Trace | StreamedTrace:
    size = cell.arguments.get("expert_bytes")
    expert_bytes = None if size is None else parse_bytes(str(size), "expert_bytes")
    return _opened(file, expert_bytes, content_digest(file))


@lru_cache(maxsize=1)
def _opened(file: str, expert_bytes: int | None, digest: str | None) -> Trace | StreamedTrace:
    """Keep the last trace read: cells of one trace follow each other."""
    return open_any(file, logits=True, predicted=True, expert_bytes=expert_bytes)


def _replay(planned: ResolvedCell, file: str) -> tuple[dict[str, Any], list[RequestRecord]]:
    """Return a replay's report and its requests."""
    config = planned.config
    replays = Replays(_trace_of(planned.cell, file), [config])
    engine = replays.replay(replays.setting(config))
    requests = engine.ledger.requests
    return run_report(engine, config, requests, engine.peak_cache_bytes), requests


def _replayed(planned: ResolvedCell, folder: Path) -> tuple[dict[str, Any], str]:
    """Return the results that a run of the cell would keep, and the trace or run it was made from.

    From a trace: speed, but no scores. Raises NoSharedRunError where the shared run has failed,
    ValueError where its trace lacks data that the cell needs.
    """
    if planned.shared is None:
        report, _ = _replay(planned, planned.cell.pretrained)
        only_speed = {"results": {}, "config": {"moecache": report}, "scores": {}}
        return only_speed, planned.cell.pretrained
    files = SharedRun(folder, planned.shared)
    if not (files.results.is_file() and files.trace.is_file()):
        raise NoSharedRunError(
            f"the run that was to record {files.trace.name} for this cell has failed; the same "
            "command tries another one."
        )
    report, requests = _replay(planned, str(files.trace))
    recorded: dict[str, Any] = json.loads(files.results.read_text())
    results: dict[str, Any] = recorded["kept"]
    results["config"]["moecache"] = {**report, **(results["config"]["moecache"] or {})}
    for task, documents in document_metrics(requests).items():
        speed = by_metric((document, recorded_speed(each)) for document, each in documents.items())
        answers = without_speed(results["scores"].get(task, {}))
        results["scores"][task] = dict(sorted((answers | speed).items()))
    return results, recorded["run_id"]


# --- provenance: the part of a record that a rerun need not reproduce ---


def environment(started_s: float, seconds: dict[str, float]) -> dict[str, Any]:
    """Return the record's `environment`: date, durations, machine, versions, code revision.

    It holds all that decides how the machine rounds: runs that agree in it repeat exactly.
    """
    torch, gpu = sys.modules.get("torch"), None
    if torch is not None:
        from lm_eval_moecache.model.device import accelerator, name_of

        kind = accelerator()
        gpu = None if kind is None else name_of(torch.device(kind))
    return {
        "date": datetime.fromtimestamp(started_s, tz=timezone.utc).isoformat(timespec="seconds"),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "machine": {
            "cpu": platform.machine(),
            "cores": os.cpu_count(),
            "gpu": gpu,
            "cpu_model": _cpu_model(),
            "instructions": None if torch is None else torch.backends.cpu.get_cpu_capability(),
            "threads": None if torch is None else torch.get_num_threads(),
            "rounding": {name: os.environ[name] for name in _ROUNDING if name in os.environ},
        },
        "versions": {"python": platform.python_version(), **_versions(_PACKAGES)},
        "revision": code_revision(),
    }


@cache
def _cpu_model() -> str:
    """Return the CPU's name; on Linux with family, model and stepping, as CPUs share names."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    pairs = (line.partition(":") for line in lines)
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    parts = (facts.get(name, "") for name in ("model name", "cpu family", "model", "stepping"))
    return " ".join(part for part in parts if part) or platform.processor()


@cache
def code_revision() -> str | None:
    """Return the commit of this package's source tree, with `-dirty` for uncommitted changes.

    None for an installed package: a repository around its environment is not this package's.
    """
    folder = Path(__file__).resolve().parent.parent
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    return f"{commit}-dirty" if _git(folder, "status", "--porcelain", "--", ".") else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        process = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
