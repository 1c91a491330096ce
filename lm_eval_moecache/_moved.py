"""Keeps imports of the public modules working under the names they had before version 0.2.

Another package's algorithm subclasses `lm_eval_moecache.eviction.base.EvictionAlgorithm`, which is
now in `lm_eval_moecache.algorithms.eviction.base`: both names give the same object.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # the import system asks for methods, and its base classes take as long as all else here
    Loader = MetaPathFinder = object

_PACKAGE = __package__
MOVED = {
    "core": "records",
    "core.records": "records",
    "eviction": "algorithms.eviction",
    "lm": "harness.lm",
    "miss": "algorithms.miss",
    "plugin": "harness.plugin",
    "policy": "algorithms.policy",
    "prefetch": "algorithms.prefetch",
    "registry": "algorithms.registry",
    "routing": "algorithms.routing",
    "speculative": "model.speculative",
    "speculative.lm": "harness.spec_lm",
    "tasks": "harness.tasks",
}
"""Old module or folder -> new one, both below the package."""


class _Alias(Loader):
    """Gives the module at the new name for the old one."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # the import system has put the alias' there


class _MovedFinder(MetaPathFinder):
    """Asked first: the path of an aliased folder would find its modules a second time."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        prefix, _, old = name.partition(".")
        if prefix != _PACKAGE:
            return None
        head, dot, rest = old.partition(".")
        for known, rest_of in ((old, ""), (head, dot + rest)):
            if known in MOVED:
                new = f"{_PACKAGE}.{MOVED[known]}{rest_of}"
                warnings.warn(f"{name} is now {new}", DeprecationWarning, stacklevel=2)
                return ModuleSpec(name, _Alias(new), is_package=True)
        return None


def install() -> None:
    """Add the finder. Safe to call twice."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedFinder())
