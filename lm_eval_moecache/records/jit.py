"""Runs functions of tables as the Python they are, or compiled by numba on the same tables.

A table is a list of objects of a dataclass with int and float fields, or an array of numpy records
with these fields: `experts[key].uses` reads in either. Objects are what plain Python is quickest
with, records what numba compiles.
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
"""Of records, as said above."""
Array = Any
"""A list of numbers, or a numpy array."""


@cache
def has_numba() -> bool:
    """Whether functions can be compiled; without numba they run as they are, and slower."""
    try:
        return not _numba().config.DISABLE_JIT
    except ImportError:
        return False


_midway = [True]


def compile_midway(allowed: bool) -> None:
    """Say whether what runs from now on may stand still for a compilation.

    Not a run on the wall clock, which would measure it: that one goes on in plain Python.
    """
    _midway[0] = allowed


def may_compile() -> bool:
    """Whether numba is there, and nothing is measured that compiling would hold up."""
    return _midway[0] and has_numba()


def _numba() -> Any:
    return import_module("numba")  # imported late, and of types that are known in part


def make_table(kind: type, count: int) -> Table:
    """Return a table of objects, as they are made without arguments."""
    return [kind() for _ in range(count)]


@cache
def dtype_of(kind: Any) -> Any:
    """Return the type of numpy records with the fields of a dataclass."""
    types = {"int": np.int64, "float": np.float64}
    return np.dtype([(field.name, types[str(field.type)]) for field in fields(kind)], align=True)


def as_records(table: Table) -> Table:
    """Return an array of records with what a table of objects holds."""
    made_of: Any = type(table[0])
    kind = dtype_of(made_of)
    found = np.zeros(len(table), kind)
    for name in kind.names:
        found[name] = [getattr(entry, name) for entry in table]
    return found


def column(table: Table, name: str) -> Any:
    """Return one field of all records, as an array."""
    if isinstance(table, np.ndarray):
        return table[name]
    return np.asarray([getattr(entry, name) for entry in table])


def is_kept(modules: Sequence[ModuleType], entry: str) -> bool:
    """Whether the compiled form of a function is on disk beside its module already."""
    folder = Path(str(modules[-1].__file__)).parent / "__pycache__"
    digest = _digest(*(module.__file__ for module in modules))
    return any(folder.glob(f"*{entry}_{digest}*.nbc"))


@cache
def compiled(modules: tuple[ModuleType, ...], entry: str) -> Callable[..., Any]:
    """Return the function `entry` of the last module, compiled for the arguments it gets first.

    So is all that it calls of these modules: their functions are made anew, so that each calls the
    others as they are made here. What was compiled is kept on disk beside the module (or in the
    user's cache folder) under a name that follows from the sources: numba itself looks at no other
    file than the entry's.
    """
    scopes = {module.__name__: dict(vars(module)) for module in modules}
    own = [f for m in modules for f in vars(m).values() if isfunction(f) and f.__module__ in scopes]
    made = {
        function.__name__: _compiled(function, scopes[function.__module__], "")
        for function in own
        if function.__name__ != entry
    }
    for scope in scopes.values():
        scope.update({name: value for name, value in made.items() if name in scope})
    function, kept_as = getattr(modules[-1], entry), _digest(*(m.__file__ for m in modules))
    ready: list[Any] = []

    def call(*arguments: Any) -> Any:
        if not ready:
            # A function's type says what it takes, not who it is: another compiles nothing anew.
            types = tuple(map(_numba().typeof, arguments))
            ready.append(_compiled(function, scopes[modules[-1].__name__], kept_as, types))
        return ready[0](*arguments)

    return call


@cache
def compiled_function(function: Any, *kinds: type) -> Any:
    """Return a function of records of these kinds, which returns two floats, as an argument."""
    numba = _numba()
    records = [numba.from_dtype(dtype_of(kind)) for kind in kinds]
    signature = numba.types.UniTuple(numba.types.float64, 2)(*records)
    own = _digest(function.__code__.co_filename)
    made = _compiled(function, function.__globals__, own, signature, make=numba.cfunc)
    return _Pointer(made, numba.typeof(made))


class _Pointer:
    """A compiled function as an argument, whose type and address need not be found at each call.

    Finding them for numba's own functions takes several times as long as the search for a victim.
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
    """Return the function with these globals, compiled; an entry is kept under a name."""
    numba = _numba()
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    # Without counting references, which costs more than all the rest: nothing here makes arrays.
    options: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
    if not kept_as:
        # Nobody but compiled functions calls it.
        options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        return numba.njit(forceinline=True, **options)(made)
    made.__qualname__ = f"{function.__name__}_{kept_as}"
    if make is None:
        make, options["nogil"] = numba.njit, True
    try:
        return make(*signature, cache=True, **options)(made)
    except RuntimeError:  # no folder that it may write to: compiled anew in each process
        return make(*signature, **options)(made)
