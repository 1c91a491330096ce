"""When, on what and with which versions a set of runs was made, in a line's worth of words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lm_eval_moecache.report.columns import setting
from lm_eval_moecache.report.results import Run

_VERSIONS = ("lm-eval-moecache", "lm-eval", "torch", "transformers")
_MOST = 3


def about(runs: Sequence[Run]) -> tuple[tuple[str, str], ...]:
    """Return (name, text) pairs; what no record says is left out."""
    dates = sorted(str(d)[:10] for run in runs if (d := run.environment.get("date")))
    machines = [run.environment.get("machine", {}) for run in runs]
    versions = [run.environment.get("versions", {}) for run in runs]
    found = {
        "Runs": str(len(runs)),
        "Date": " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])),
        "Model": _listed(str(run.moecache.get("model", {}).get("model", "")) for run in runs),
        "Hardware": _listed(str(setting(run, "hardware").raw) for run in runs),
        "Clock": _listed(str(run.moecache["clock"]) for run in runs),
        "Run on": _listed(
            str(m.get("gpu") or m.get("cpu_model") or m.get("cpu", "")) for m in machines
        ),
    }
    found |= {name: _listed(str(v.get(name, "")) for v in versions) for name in _VERSIONS}
    return tuple((name, text) for name, text in found.items() if text)


def _listed(texts: Iterable[str]) -> str:
    names = sorted({text for text in texts if text})
    rest = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + rest
