"""Where and when a run was made: everything about it that a rerun need not repeat."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.artifact import versions_of

# Settings of the mathematics libraries that change what a sum is rounded to.
_ROUNDING = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
_PACKAGES = ("lm-eval-moecache", "lm-eval", "torch", "transformers", "numpy")


def environment(started_s: float, seconds: dict[str, float]) -> dict[str, Any]:
    """Return the record's `environment`: date, durations, machine, versions, code revision.

    What of the machine decides how it rounds is there: two runs that agree in it repeat exactly.
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
        "versions": {"python": platform.python_version(), **_versions()},
        "revision": code_revision(),
    }


@cache
def _versions() -> dict[str, str]:
    return versions_of(_PACKAGES)


@cache
def _cpu_model() -> str:
    """Return the CPU's name; on Linux with family, model and stepping, as names are shared."""
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
    """Return the commit of this package's source tree, `-dirty` where it was changed since.

    None for an installed package: the repository that holds its environment, if any, is not ours.
    """
    folder = Path(__file__).resolve().parent.parent
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    return f"{commit}-dirty" if _git(folder, "status", "--porcelain", "--", ".") else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
