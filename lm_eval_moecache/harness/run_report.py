"""The report of one run: its full setting and its metrics, `config.moecache` in a results JSON.

Also the warnings about settings without effect, and the speed table that a run prints with
lm-eval's accuracy table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_moecache.algorithms.policy import Policy, choice_text
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.regime import decode_waits, regime_of, s_mbu
from lm_eval_moecache.engine.setting import FIFO
from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.hardware import OF_THE_MACHINE
from lm_eval_moecache.records.ledger import GENERATE, RequestRecord
from lm_eval_moecache.records.schemas.keys import DEFAULTS, RARE, REPORTED, keys_with
from lm_eval_moecache.report.metrics import MEGABYTE, UNCHANGED, metric_column, task_metrics
from lm_eval_moecache.report.tables.text import padded

# Settings that the title of the speed table names where they have not their default.
_TITLED = {"phases": "all"} | {
    key: DEFAULTS[key] for key in keys_with(REPORTED | RARE) if key not in ("clock", "warm")
}


def run_report(
    engine: Engine,
    config: Config,
    requests: Sequence[RequestRecord],
    peak: int,
    measured: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the setting, and the metrics of these requests, by task and in total.

    `peak` is the most bytes a cache held; `measured` is set under the wall clock only.
    """
    by_task: dict[str, list[RequestRecord]] = {}
    for request in requests:
        by_task.setdefault(request.task, []).append(request)
    setting, policy = engine.setting, config.policy
    report: dict[str, Any] = {
        **_draft(engine, config),
        "policy": policy.as_dict(),
        "capacity": setting.capacity.text,
        "capacity_bytes": setting.capacity.total_bytes,
        "hardware": {
            name: value
            for name, value in dataclasses.asdict(config.hardware).items()
            if name not in OF_THE_MACHINE
        },
        **{key: getattr(config, key) for key in keys_with(REPORTED)},
        **{k: v for k in keys_with(RARE) if (v := getattr(config, k)) != DEFAULTS[k]},
        **({} if setting.warm is None else {"warm": setting.warm.name}),
        "model": dataclasses.asdict(engine.geometry),
        **_regime(engine, config, requests),
        "warnings": settings_without_effect(by_task, config, engine.draft_stage),
    }

    def figures(part: Sequence[RequestRecord]) -> dict[str, Any]:
        # Of this machine's memory no bandwidth is known.
        roof = None if measured else s_mbu(part, engine.geometry, setting)
        return task_metrics(part, peak) | {"s_mbu": roof}

    report["totals"] = figures(requests)
    report["tasks"] = {name: figures(by_task[name]) for name in sorted(by_task)}
    if measured is not None:
        link = {"link_bytes_per_s": config.throttle_bytes_per_s}
        report["hardware"] = {"name": measured["machine"], **link}
        report |= {"store": config.store, "load": dict(measured["load"])}
    return report


_FIRST = ("e2el_ms", "tok_per_s", "ttft_ms", "tpot_ms", "miss_rate", "requests")


def speed_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a report's metrics as flat rows, one per task and one named `all`: speed first."""
    setting = {
        "policy": report["policy"]["name"],
        "capacity": report["capacity"],
        "hardware": report["hardware"]["name"],
        "clock": report["clock"],
    }
    rows = []
    for task, metrics in (*report["tasks"].items(), ("all", report["totals"])):
        row: dict[str, Any] = {}
        for name, value in metrics.items():
            figures = value if isinstance(value, Mapping) else {"mean": value}
            row |= {name if k == "mean" else f"{name}_{k}": v for k, v in figures.items()}
        first = {name: row[name] for name in _FIRST if name in row}
        rows.append({"task": task, **first, **setting, **row})
    return rows


def _regime(engine: Engine, config: Config, requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the run's regime; empty under the wall clock, where device speeds are unknown."""
    if config.clock == "wall":
        return {}
    geometry = engine.geometry
    regime = regime_of(geometry, engine.setting.capacity.total_bytes, config.hardware)
    emulate = {} if config.emulate is None else {"emulate": config.emulate.record()}
    waits = decode_waits(requests, geometry.num_layers)
    return {**emulate, "regime": regime.as_dict(waits)}


def _draft(engine: Engine, config: Config) -> dict[str, Any]:
    """Return the draft model and the memory that it takes besides the cache."""
    if config.draft is None:
        return {}
    # Under `prefetch=draft` alone the draft only reads along and drafts no token.
    fields: dict[str, Any] = {
        "name": config.draft,
        "tokens": config.draft_tokens or 0,
        "bytes": 0,
    }
    draft, stage = engine.setting.draft, engine.draft_stage
    if draft is not None and stage is not None:
        fields["bytes"] = draft.nbytes
        fields["precision"] = draft.geometry.precision[draft.level]
        if stage.solution is not None:
            fields["cutoff"] = stage.solution
    return {"draft": fields}


# --- settings that had no effect on the tasks of a run ---


def settings_without_effect(
    by_task: Mapping[str, Sequence[RequestRecord]], config: Config, stage: DraftStage | None
) -> list[str]:
    """Return one sentence per setting without effect, naming the tasks if it depends on them."""
    policy, levels = config.policy, config.ladder or ()
    solution = (stage and stage.solution) or {}
    requests = sorted(by_task.items())
    undecoded = [
        t for t, group in requests if all(p.phase == PREFILL for r in group for p in r.passes)
    ]
    unscored = [t for t, group in requests if all(r.kind == GENERATE for r in group)]
    warnings = []
    if config.seed and not policy.draws:
        warnings.append(
            f"seed={config.seed}: no algorithm of this policy draws at random, so the seed changes "
            "no figure."
        )
    if len(levels) > 1 and not policy.miss.algorithm.uses_ladder:
        warnings.append(
            f"precision={config.precision}: this policy loads every expert at {levels[0]}, so the "
            f"figures are those of precision={levels[0]}."
        )
    if solution.get("asked") == "auto" and not solution["used"]:
        warnings.append(
            "prefetch.cutoff=auto: no layer's drafted experts fit into the cache in time, so "
            "nothing was prefetched while drafting. Give more capacity, fewer draft_tokens or "
            "a cutoff."
        )
    proposed = sum(p.predicted for group in by_task.values() for r in group for p in r.passes)
    if requests and not policy.prefetch.algorithm.needs_draft:
        warnings += idle_prefetch(policy, config.cache_reset, proposed)
    if config.link == FIFO and not policy.prefetch.algorithm.is_active:
        warnings.append(
            "link=fifo: this policy prefetches nothing, so the figures are those of link=priority."
        )
    # `phases=decode` is only ever set with a lossy policy.
    if policy.phases == "decode" and undecoded:
        warnings.append(
            f"phases=decode: nothing was decoded in {', '.join(undecoded)}, so the policy's lossy "
            "algorithms did nothing there. Use phases=all, or scoring=scan with a cache per layer."
        )
    elif policy.miss.algorithm.only_decodes and undecoded:
        warnings.append(
            f"miss={policy.miss.name}: nothing was decoded in {', '.join(undecoded)}, so it did "
            "nothing there. Use scoring=scan with a cache per layer."
        )
    if config.scoring == "scan" and unscored:
        warnings.append(
            f"scoring=scan: no text was scored in {', '.join(unscored)}, so it had no effect there."
        )
    return warnings


def idle_prefetch(policy: Policy, cache_reset: str, proposed: int) -> list[str]:
    """Return a sentence where a policy's prefetcher has not proposed a single expert, and why."""
    algorithm = policy.prefetch.algorithm
    if proposed or not algorithm.is_active:
        return []
    reason = "no request made it propose an expert"
    if algorithm.remembers and cache_reset == "request":
        reason += (
            ", and cache_reset=request forgets what others taught it. A running server, "
            "cache_reset=never, remembers"
        )
    return [f"prefetch={policy.prefetch.name} did nothing: {reason}."]


# --- the speed table ---

_COLUMNS = (
    *("requests", "e2el_ms", "output_tokens", "ttft_ms", "tpot_ms", "tok_per_s", "miss_rate"),
    *("decode_miss_rate", "stall_ms_per_token", "bytes_moved"),
)
_MEANS = (
    "Rates and tok/s are of all requests together, so that long ones count for more; "
    "request_hit_rate and its like in lm-eval's table are means over documents."
)


def speed_table(report: Mapping[str, Any]) -> str:
    """Render `config.moecache` as a Markdown table, one row per task and one for all of them.

    The title gives the setting; a line below warns of each setting without effect.
    """
    heads, cells = ["Task"], [[task] for task in (*report["tasks"], "**all**")]
    totals = report["totals"]
    is_changed = any(totals.get(name) not in (None, kept) for name, kept in UNCHANGED.items())
    for name in (*_COLUMNS, *(UNCHANGED if is_changed else ())):
        column = metric_column(name)
        assert column is not None, name
        in_mb = name == "bytes_moved"
        heads.append("MB moved" if in_mb else column.heading)
        decimals, unit = (1, MEGABYTE) if in_mb else (column.decimals, 1)
        for row, metrics in zip(cells, (*report["tasks"].values(), report["totals"]), strict=True):
            value = metrics.get(name)
            value = value["mean"] if isinstance(value, Mapping) else value
            row.append("" if value is None else f"{value / unit:.{decimals}f}")
    warnings = [f"Warning: {text}" for text in report["warnings"]]
    regime = [regime_line(report["regime"])] if "regime" in report else []
    return "\n".join([_title(report), padded(heads, cells), _MEANS, *regime, *warnings])


def regime_line(regime: Mapping[str, Any]) -> str:
    """Return a sentence on the regime: runs in two regimes may rank policies differently."""
    ratio = regime["transfer_per_layer"]
    parts = [
        f"capacity {regime['capacity_cycles']:.2f} token cycles",
        "layers take no time"
        if ratio is None
        else f"one expert's transfer takes {ratio:.3g} times a layer",
    ]
    if "bound" in regime:
        parts.append(f"decoding bound by {regime['bound']}")
    return f"Regime: {', '.join(parts)}."


def _title(report: Mapping[str, Any]) -> str:
    policy, hardware = report["policy"], report["hardware"]
    # None is a real link that is not throttled.
    bytes_per_s = hardware["link_bytes_per_s"]
    link = "" if bytes_per_s is None else f" at {bytes_per_s / 1e9:g} GB/s"
    parts = [
        f"moecache ({policy['name']}: {' + '.join(choice_text(a, policy[a]) for a in AXES)})",
        f"capacity: {report['capacity']} = {report['capacity_bytes']} bytes"
        f"{' in a cache for each layer' if policy.get('cache') == 'layer' else ''}",
        f"hardware: {hardware['name']}{link}",
        f"clock: {report['clock']}",
    ]
    if "emulate" in report:
        parts.append(f"emulated model: {report['emulate']['name']}")
    if "warm" in report:
        parts.append(f"warmed by: {report['warm']}")
    if "draft" in report:
        draft = report["draft"]
        parts.append(f"draft: {draft['name']}, {draft['tokens']} tokens, {draft['bytes']} bytes")
    settings = {**report, "phases": policy["phases"]}
    # Reports older than the setting `link` lack it.
    parts += [
        f"{k}: {settings[k]}" for k, value in _TITLED.items() if settings.get(k, value) != value
    ]
    return ", ".join(parts)
