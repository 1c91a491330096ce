"""Finds algorithms: the folder of an axis is its registry; other packages add to it."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from traceback import extract_tb
from typing import Any

from lm_eval_moecache.records import plugins
from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.records.ranges import Range, split_range

BASES = {
    "routing": "RoutingAlgorithm",
    "prefetch": "PrefetchAlgorithm",
    "eviction": "EvictionAlgorithm",
    "miss": "MissAlgorithm",
}
AXES = tuple(BASES)
_NAMES = re.compile(r'^    name(?:: ClassVar\[str\])? = "(\w+)"$', re.MULTILINE)
_NO_RULES = ("Algorithm", *BASES.values())
# Set by the engine, not by the user.
_NOT_PARAMETERS = ("self", "geometry", "seed")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def algorithm_names(axis: str) -> list[str]:
    """Return the names of an axis' algorithms, sorted: our own, and what packages add."""
    own = modules_of(axis)
    return sorted([*own, *plugins.added(axis, own)])


@cache
def modules_of(axis: str) -> Mapping[str, str]:
    """Return the name of each of an axis' rules and the module that defines it, without imports.

    A rule is a class that sets `name: ClassVar[str] = "lru"`; several may share a file.
    """
    package = f"lm_eval_moecache.algorithms.{axis}"
    found: dict[str, str] = {}
    for folder in importlib.import_module(package).__path__:
        for path in sorted(Path(folder).glob("*.py")):
            for name in _NAMES.findall(path.read_text(encoding="utf-8")):
                if name in found:
                    raise ValueError(f"{path} and {found[name]} both define {axis}={name!r}.")
                found[name] = f"{package}.{path.stem}"
    return dict(sorted(found.items()))


def base_of(axis: str) -> type[Any]:
    """Return the base class of an axis' algorithms."""
    module = importlib.import_module(f"lm_eval_moecache.algorithms.{axis}.base")
    base: type[Any] = getattr(module, BASES[axis])
    return base


def find_algorithm(axis: str, name: str) -> type[Any]:
    """Return the class of this name in a file of the axis' folder, or a package's."""
    own = modules_of(axis)
    added = plugins.added(axis, own)
    if name in added:
        return _checked(axis, plugins.load(added[name]), plugins.described(added[name]))
    if name not in own:
        raise unknown_name_error(axis, name, [*own, *added], "`moecache policies`")
    for value in vars(importlib.import_module(own[name])).values():
        if isinstance(value, type) and vars(value).get("name") == name:
            return value
    raise ValueError(f"{own[name]} has a `name` {name!r} that is no class attribute.")


def import_class(axis: str, class_path: str) -> type[Any]:
    """Import an outside algorithm; ValueError unless it is a concrete subclass of the axis base.

    Modules of the current folder are found, as with `python -m`: installed commands have their own
    folder on `sys.path` instead.
    """
    module_name, _, class_name = class_path.rpartition(".")
    if "" not in sys.path and (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    key = f"{axis}.class_path={class_path!r}"
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # whatever the module's own code raises
        raise ValueError(f"{key} cannot be imported: {reason_of(error)}") from error
    return _checked(axis, found, key)


def is_own(algorithm: type[Any]) -> bool:
    """Whether an algorithm is of this package, which its tests cover, and no one else's."""
    return algorithm.__module__.startswith("lm_eval_moecache.algorithms.")


def _checked(axis: str, found: Any, key: str) -> type[Any]:
    """Return an outside algorithm that can be built; ValueError, beginning with `key`, if not."""
    base = base_of(axis)
    if not (isinstance(found, type) and issubclass(found, base) and found is not base):
        raise ValueError(f"{key} is not a subclass of {base.__module__}.{base.__name__}.")
    if axis == "eviction":
        from lm_eval_moecache.algorithms.eviction.base import RankedEviction, StatefulEviction

        asked: Any = (StatefulEviction, RankedEviction)
        if not issubclass(found, asked):
            raise ValueError(f"{key} must derive from lm_eval_moecache.Eviction or RankedEviction.")
    where = f"{key} ({source_of(found)})"
    if inspect.isabstract(found):
        lacking = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ValueError(f"{where} is abstract: it has to define {lacking}.")
    try:
        signature = inspect.signature(found, eval_str=True)
        signature.bind_partial(object(), seed=0)
    except Exception as error:  # a hint that names nothing raises when it is evaluated
        raise ValueError(
            f"{where} cannot be built: its constructor must take (geometry, *, seed, ...), and its "
            f"hints must be importable: {reason_of(error)}"
        ) from error
    return found


@lru_cache(maxsize=256)
def _code_of(source: str, classes: frozenset[str]) -> str:
    """Return a module's code without comments, docstrings, formatting and the rules of others."""
    tree = ast.parse(source)
    for each in [each for each in tree.body if isinstance(each, ast.ClassDef)]:
        if each.name not in classes and _NAMES.search(ast.get_source_segment(source, each) or ""):
            tree.body.remove(each)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = [*node.body[1:], ast.Pass()]
    return ast.unparse(tree)


def source_digest(algorithm: type[Any]) -> str:
    """Return a digest of an algorithm's code: its class, its bases, and what their modules share.

    Comments, formatting and the words of docstrings do not count, nor does the base of its axis; a
    docstring where there was none does, and so do strings that document attributes.
    """
    digest, classes = hashlib.sha256(), frozenset(part.__name__ for part in algorithm.__mro__)
    for part in algorithm.__mro__:
        if part.__module__ in ("builtins", "abc", "typing") or part.__name__ in _NO_RULES:
            continue
        try:
            source = inspect.getsource(sys.modules[part.__module__])
        except (OSError, TypeError):  # defined in a notebook: only its name is available
            digest.update(part.__qualname__.encode())
            continue
        digest.update(_code_of(source, classes).encode())
    return digest.hexdigest()[:16]


def source_of(algorithm: type[Any]) -> str:
    """Return the file that defines a class, for messages."""
    try:
        return str(inspect.getfile(algorithm))
    except (OSError, TypeError):
        return str(algorithm.__module__)


def reason_of(error: Exception) -> str:
    """Return the error's type and message and, if a file's own code raised it, file and line."""
    frames = extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename != __file__ and not f.filename.startswith("<")]
    is_told = own and "importlib" not in own[-1].filename
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if is_told else ""
    return f"{type(error).__name__}: {error}{place}"


@cache
def _declaration(
    algorithm: type[Any],
) -> tuple[Mapping[str, inspect.Parameter], Mapping[str, Range]]:
    """Return the constructor's parameters without their ranges, and the ranges."""
    parameters, ranges = dict[str, inspect.Parameter](), dict[str, Range]()
    for name, given in inspect.signature(algorithm, eval_str=True).parameters.items():
        if name not in _NOT_PARAMETERS and given.kind not in _VARIADIC:
            annotation, allowed = split_range(given.annotation)
            parameters[name] = given.replace(annotation=annotation)
            ranges |= {} if allowed is None else {name: allowed}
    return parameters, ranges


def parameters_of(algorithm: Any) -> Mapping[str, inspect.Parameter]:
    """Return the constructor parameters that a user may set."""
    return _declaration(algorithm)[0]


def ranges_of(algorithm: Any) -> Mapping[str, Range]:
    """Return the ranges of the parameters that have one."""
    return _declaration(algorithm)[1]
