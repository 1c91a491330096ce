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
    """Return the record's `environment`: date, durations, machine, versions, code revision."""
    return {
        "date": datetime.fromtimestamp(started_s, tz=timezone.utc).isoformat(timespec="seconds"),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "machine": {
            "cpu": platform.machine(),
            "cores": os.cpu_count(),
            "gpu": _gpu(),
            **_rounding(),
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "revision": code_revision(),
    }


@cache
def _versions() -> dict[str, str]:
    return versions_of(_PACKAGES)


def _rounding() -> dict[str, Any]:
    """Return what decides how this machine rounds: two runs that agree in it repeat exactly."""
    torch = sys.modules.get("torch")
    return {
        "cpu_model": _cpu_model(),
        "instructions": None if torch is None else torch.backends.cpu.get_cpu_capability(),
        "threads": None if torch is None else torch.get_num_threads(),
        "rounding": {name: os.environ[name] for name in _ROUNDING if name in os.environ},
    }


@cache
def _cpu_model() -> str:
    """Return the CPU's name; on Linux with family, model and stepping, as names are shared."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    facts = dict(_halves(line) for line in lines if ":" in line)
    parts = (facts.get(name, "") for name in ("model name", "cpu family", "model", "stepping"))
    return " ".join(part for part in parts if part) or platform.processor()


def _halves(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _gpu() -> str | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    from lm_eval_moecache.model.device import accelerator, name_of

    kind = accelerator()
    return None if kind is None else name_of(torch.device(kind))


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
