"""The table of speed that a run prints beside lm-eval's table of accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.report.columns import choice_name, metric_column
from lm_eval_moecache.report.metrics import MEGABYTE
from lm_eval_moecache.report.render import padded

_COLUMNS = (
    *("requests", "ttft_ms", "tpot_ms", "tok_per_s", "hit_rate", "miss_rate", "late_rate"),
    *("collision_miss_rate", "decode_miss_rate", "stall_ms_per_token", "bytes_moved"),
)
# The title names these settings where they are not at their defaults.
_DEFAULTS = {
    "phases": "all",
    "scoring": "parallel",
    "cache_reset": "never",
    "link": "priority",
    "execute": "together",
    "reads_per_expert": 1,
    "attention": "flat",
}


def speed_table(report: Mapping[str, Any]) -> str:
    """Render `config.moecache` as a Markdown table, one row a task and one for all of them.

    The title says under what; a line below warns of each setting that did nothing.
    """
    heads, cells = ["Task"], [[task] for task in (*report["tasks"], "**all**")]
    for name in _COLUMNS:
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
    return "\n".join([_title(report), padded(heads, cells), *regime, *warnings])


def regime_line(regime: Mapping[str, Any]) -> str:
    """Say in which regime a run was: two runs of different ones need not rank policies alike."""
    ratio = regime["transfer_per_layer"]
    parts = [
        f"capacity {regime['capacity_cycles']:.2f} token cycles",
        "layers take no time" if ratio is None else f"one expert's transfer {ratio:.3g} layers",
    ]
    if "bound" in regime:
        parts.append(f"decoding bound by {regime['bound']}")
    return f"Regime: {', '.join(parts)}."


def _title(report: Mapping[str, Any]) -> str:
    policy, hardware = report["policy"], report["hardware"]
    # None is a real link that nothing slows down.
    bytes_per_s = hardware["link_bytes_per_s"]
    link = "" if bytes_per_s is None else f" at {bytes_per_s / 1e9:g} GB/s"
    parts = [
        f"moecache ({policy['name']}: {' + '.join(choice_name(policy[a]) for a in AXES)})",
        f"capacity: {report['capacity']} = {report['capacity_bytes']} bytes"
        f"{' in a cache for each layer' if policy.get('cache') == 'layer' else ''}",
        f"hardware: {hardware['name']}{link}",
        f"clock: {report['clock']}",
    ]
    if "emulate" in report:
        parts.append(f"layers charged as: {report['emulate']['name']}")
    if "warm" in report:
        parts.append(f"warmed by: {report['warm']}")
    if "draft" in report:
        draft = report["draft"]
        parts.append(f"draft: {draft['name']}, {draft['tokens']} tokens, {draft['bytes']} bytes")
    settings = {**report, "phases": policy["phases"]}
    # A report of before `link` was a setting has none.
    parts += [
        f"{k}: {settings[k]}" for k, usual in _DEFAULTS.items() if settings.get(k, usual) != usual
    ]
    return ", ".join(parts)
