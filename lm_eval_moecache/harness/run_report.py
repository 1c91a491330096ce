"""The report of one run: its full setting and its figures, `config.moecache` in a results JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.regime import decode_waits, regime_of
from lm_eval_moecache.engine.setting import FIFO, FLAT, TOGETHER
from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.report.no_effect import settings_without_effect


def run_report(
    engine: Engine,
    config: Config,
    requests: Sequence[RequestRecord],
    peak: int,
    measured: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the setting, and the metrics of these requests, by task and in total.

    `peak` is the most bytes a cache held; `measured` is there under the wall clock.
    """
    by_task: dict[str, list[RequestRecord]] = {}
    for request in requests:
        by_task.setdefault(request.task, []).append(request)
    setting, policy = engine.setting, config.policy
    # What is charged and in which order experts run, where not as usual.
    usual = {"execute": TOGETHER, "reads_per_expert": 1, "attention": FLAT}
    report: dict[str, Any] = {
        **_draft(engine, config),
        "policy": policy.as_dict(),
        "capacity": setting.capacity.text,
        "capacity_bytes": setting.capacity.total_bytes,
        "hardware": dataclasses.asdict(config.hardware),
        "clock": config.clock,
        "scoring": config.scoring,
        "cache_reset": config.cache_reset,
        "link": config.link,
        **{k: getattr(config, k) for k, v in usual.items() if getattr(config, k) != v},
        **({} if setting.warm is None else {"warm": setting.warm.name}),
        "seed": config.seed,
        "model": dataclasses.asdict(engine.geometry),
        **_regime(engine, config, requests),
        "warnings": settings_without_effect(
            by_task,
            policy.phases,
            config.scoring,
            idle_seed=0 if policy.draws else config.seed,
            idle_link=config.link == FIFO and not policy.prefetch.algorithm.is_active,
            idle_cutoff=_prefetches_nothing(engine),
            idle_levels=() if policy.miss.algorithm.uses_ladder else config.ladder or (),
        ),
        "totals": task_metrics(requests, peak),
        "tasks": {name: task_metrics(by_task[name], peak) for name in sorted(by_task)},
    }
    if measured is not None:
        link = {"link_bytes_per_s": config.throttle_bytes_per_s}
        report["hardware"] = {"name": measured["machine"], **link}
        report |= {"store": config.store, "load": dict(measured["load"])}
    return report


def speed_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a report's figures as flat rows: one for each task, and one named `all`."""
    setting = {
        "policy": report["policy"]["name"],
        "capacity": report["capacity"],
        "hardware": report["hardware"]["name"],
        "clock": report["clock"],
    }
    rows = []
    for task, metrics in (*report["tasks"].items(), ("all", report["totals"])):
        row: dict[str, Any] = {"task": task, **setting}
        for name, value in metrics.items():
            figures = value if isinstance(value, Mapping) else {"mean": value}
            row |= {name if k == "mean" else f"{name}_{k}": v for k, v in figures.items()}
        rows.append(row)
    return rows


def _prefetches_nothing(engine: Engine) -> bool:
    stage = engine.draft_stage
    solution = None if stage is None else stage.solution
    return solution is not None and solution["asked"] == "auto" and not solution["used"]


def _regime(engine: Engine, config: Config, requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the regime of the run; on the machine's own clock its speeds are not known."""
    if config.clock == "wall":
        return {}
    geometry = engine.geometry
    regime = regime_of(geometry, engine.setting.capacity.total_bytes, config.hardware)
    emulate = {} if config.emulate is None else {"emulate": config.emulate.record()}
    waits = decode_waits(requests, geometry.num_layers)
    return {**emulate, "regime": regime.as_dict(waits)}


def _draft(engine: Engine, config: Config) -> dict[str, Any]:
    """Return what drafted, and the memory that it takes beside the cache (`moecache-spec`)."""
    if config.draft is None:
        return {}
    # A draft that only reads along drafts no token.
    found: dict[str, Any] = {"name": config.draft, "tokens": config.draft_tokens or 0, "bytes": 0}
    draft, stage = engine.setting.draft, engine.draft_stage
    if draft is not None and stage is not None:
        found["bytes"] = draft.nbytes
        found["precision"] = draft.geometry.precision[draft.level]
        if stage.solution is not None:
            found["cutoff"] = stage.solution
    return {"draft": found}
