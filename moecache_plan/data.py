"""The data that ships beside these modules: contenders, runtimes' counters, classes of rules."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.files import read_yaml


@cache
def data(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the entries of one of the YAMLs in this folder, by their names."""
    path = Path(__file__).with_name(f"{name}.yaml")
    entries: dict[str, dict[str, Any]] = read_yaml(path, str(path))
    return entries
