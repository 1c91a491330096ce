"""Runs functions of tables in plain Python, or compiled by numba over the same tables.

A table is a list of objects of a dataclass with int and float fields, or an array of numpy records
with the same fields: `experts[key].uses` works on both. Plain Python is fastest on objects, and
numba compiles records.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

Table = Any
"""A list of objects or an array of records, as above."""
Array = Any
"""A list of numbers, or a numpy array."""


@cache
def has_numba() -> bool:
    """Whether functions can be compiled; without numba they run uncompiled, and slower."""
    try:
        return not _numba().config.DISABLE_JIT
    except ImportError:
        return False


_midway = [True]


def compile_midway(allowed: bool) -> None:
    """Set whether runs from now on may pause to compile.

    A run on the wall clock may not, because it would measure the pause: it stays in plain Python.
    """
    _midway[0] = allowed


def may_compile() -> bool:
    """Whether numba is available and no wall-clock run would measure the compilation."""
    return _midway[0] and has_numba()


def _numba() -> Any:
    return import_module("numba")  # imported late, and only partly typed


def make_table(kind: type, count: int) -> Table:
    """Return a table of `count` objects with default values."""
    return [kind() for _ in range(count)]


@cache
def dtype_of(kind: Any) -> Any:
    """Return the numpy record dtype with the fields of a dataclass."""
    types = {"int": np.int64, "float": np.float64}
    return np.dtype([(field.name, types[str(field.type)]) for field in fields(kind)], align=True)


def as_records(table: Table) -> Table:
    """Return an array of records with the values of a table of objects."""
    entry_type: Any = type(table[0])
    dtype = dtype_of(entry_type)
    records = np.zeros(len(table), dtype)
    for name in dtype.names:
        records[name] = [getattr(entry, name) for entry in table]
    return records


def column(table: Table, name: str) -> Any:
    """Return one field of all entries, as an array."""
    if isinstance(table, np.ndarray):
        return table[name]
    return np.asarray([getattr(entry, name) for entry in table])


def is_kept(modules: Sequence[ModuleType], entry: str) -> bool:
    """Whether the machine code of a function is on disk beside its module."""
    folder = Path(str(modules[-1].__file__)).parent / "__pycache__"
    digest = _digest(*(module.__file__ for module in modules))
    return any(folder.glob(f"*{entry}_{digest}*.nbc"))


@cache
def compiled(modules: tuple[ModuleType, ...], entry: str) -> Callable[..., Any]:
    """Return the function `entry` of the last module, compiled for its first call's arguments.

    The functions it calls in these modules are compiled with it: they are copied, so that the
    copies call each other. The machine code is kept on disk beside the module (or in the user's
    cache folder) under a name derived from all sources, because numba itself checks the entry's
    file only.
    """
    scopes = {module.__name__: dict(vars(module)) for module in modules}
    functions = [
        f for m in modules for f in vars(m).values() if isfunction(f) and f.__module__ in scopes
    ]
    copies = {
        function.__name__: _compiled(function, scopes[function.__module__], "")
        for function in functions
        if function.__name__ != entry
    }
    for scope in scopes.values():
        scope.update({name: value for name, value in copies.items() if name in scope})
    function, kept_as = getattr(modules[-1], entry), _digest(*(m.__file__ for m in modules))
    ready: list[Any] = []

    def call(*arguments: Any) -> Any:
        if not ready:
            # Function arguments are typed by signature: another function needs no new compilation.
            types = tuple(map(_numba().typeof, arguments))
            ready.append(_compiled(function, scopes[modules[-1].__name__], kept_as, types))
        return ready[0](*arguments)

    return call


@cache
def compiled_function(function: Any, *kinds: type) -> Any:
    """Return a function of records of these kinds to two floats, compiled, as an argument."""
    numba = _numba()
    records = [numba.from_dtype(dtype_of(kind)) for kind in kinds]
    signature = numba.types.UniTuple(numba.types.float64, 2)(*records)
    digest = _digest(function.__code__.co_filename)
    cfunc = _compiled(function, function.__globals__, digest, signature, make=numba.cfunc)
    return _Pointer(cfunc, numba.typeof(cfunc))


class _Pointer:
    """A compiled function as an argument, with its type and address looked up once.

    For numba's own function objects that lookup takes several times the search for a victim.
    """

    def __init__(self, function: Any, kind: Any) -> None:
        self._function, self._numba_type_ = function, kind

    def __wrapper_address__(self) -> int:
        return int(self._function.address)


def _digest(*files: object) -> str:
    paths = map(Path, sorted((__file__, *map(str, files))))
    sources = b"".join(path.read_bytes() for path in paths if path.exists())
    return hashlib.sha256(sources).hexdigest()[:16]


def _compiled(
    function: Any, scope: dict[str, Any], kept_as: str, *signature: Any, make: Any = None
) -> Any:
    """Return a function compiled with these globals; on disk under `kept_as`, unless empty."""
    numba = _numba()
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    # No reference counting, which would cost more than all the rest: no function makes arrays.
    options: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
    if not kept_as:
        # Called by compiled functions only.
        options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        return numba.njit(forceinline=True, **options)(copy)
    copy.__qualname__ = f"{function.__name__}_{kept_as}"
    if make is None:
        make, options["nogil"] = numba.njit, True
    try:
        return make(*signature, cache=True, **options)(copy)
    except RuntimeError:  # no writable folder: compiled anew in each process
        return make(*signature, **options)(copy)
