"""Whether two runs were made on machines that round alike, by what their records say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval_moecache.report.results import Run

# What of a record's `environment` decides how a sum is rounded. Cores do not: threads do.
_MACHINE = ("cpu", "cpu_model", "instructions", "threads", "gpu", "rounding")
_LIBRARIES = ("torch", "transformers", "numpy")


def same_machine(one: Run, other: Run) -> bool:
    """Whether both records name their CPU, instruction set, threads and libraries, and agree."""
    first, second = _fingerprint(one.environment), _fingerprint(other.environment)
    return first is not None and first == second


def _fingerprint(environment: Mapping[str, Any]) -> list[Any] | None:
    machine, versions = environment.get("machine", {}), environment.get("versions", {})
    # Records from before the CPU was written down, and lm-eval's own files, cannot be told.
    if not machine.get("cpu_model") or not all(versions.get(name) for name in _LIBRARIES):
        return None
    return [
        *(machine.get(name) for name in _MACHINE),
        *(versions.get(name) for name in _LIBRARIES),
    ]
