"""Runs functions of tables in plain Python, or compiled by numba over the same tables.

A table is a list of objects of a dataclass with int and float fields, or an array of numpy records
with the same fields: `experts[key].uses` works on both. Plain Python is fastest on objects, and
numba compiles records.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from dis import get_instructions
from functools import cache
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
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


def as_records(table: Table, dtype: Any = None) -> Table:
    """Return a table as an array of records: with all fields, or those of a dtype.

    One that is such an array already is returned itself.
    """
    if isinstance(table, np.ndarray):
        return table
    entry_type: Any = type(table[0])
    dtype = dtype_of(entry_type) if dtype is None else dtype
    records = np.zeros(len(table), dtype)
    for name in dtype.names:
        records[name] = [getattr(entry, name) for entry in table]
    return records


def column(table: Table, name: str) -> Any:
    """Return one field of all entries, as an array."""
    if isinstance(table, np.ndarray):
        return table[name]
    return np.asarray([getattr(entry, name) for entry in table])


def by_reference(values: Any) -> Any:
    """Return a named tuple as compiled functions should be handed it: as an address.

    Else each call copies all that all of its arrays consist of. Use it in the entry only: the copy
    that the address is of ends with the function that asks for it.
    """
    return values


def table_at(like: Table, address: int) -> Table:
    """Return the array at an address, of the type and size of another. In machine code only."""
    raise AssertionError("plain Python has its tables at hand")


@cache
def _table_at() -> Any:
    """Return what `table_at` is in machine code."""
    extending, arrays = import_module("numba.extending"), import_module("numba.np.arrayobj")

    def place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        table = arrays.make_array(signature.return_type)(context, builder, arguments[0])
        table.data = builder.inttoptr(arguments[1], table.data.type)
        return table._getvalue()

    def like(context: Any, table: Any, address: Any) -> Any:
        return table(table, address), place

    return extending.intrinsic(like)


@cache
def _by_reference() -> Any:
    """Return what `by_reference` is in machine code."""
    extending, cgutils = import_module("numba.extending"), import_module("numba.core.cgutils")
    types, ir = _numba().types, import_module("llvmlite.ir")
    templates = import_module("numba.core.typing.templates")

    class Reference(types.Type):  # type: ignore[name-defined]
        def __init__(self, values: Any) -> None:
            super().__init__(f"Reference({values.instance_class.__name__})")
            self.values = values

        @property
        def key(self) -> Any:
            return self.values

    class Model(extending.models.PrimitiveModel):  # type: ignore[name-defined]
        def __init__(self, manager: Any, kind: Any) -> None:
            super().__init__(manager, kind, ir.PointerType(manager[kind.values].get_value_type()))

    class Fields(templates.AttributeTemplate):  # type: ignore[name-defined]
        key = Reference

        def generic_resolve(self, kind: Any, name: str) -> Any:
            return kind.values.types[kind.values.fields.index(name)]

    def load(context: Any, builder: Any, kind: Any, place: Any, name: str) -> Any:
        index = kind.values.fields.index(name)
        return builder.load(cgutils.gep_inbounds(builder, place, 0, index))

    def refer(context: Any, values: Any) -> Any:
        def store(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return cgutils.alloca_once_value(builder, arguments[0])

        return Reference(values)(values), store

    extending.register_model(Reference)(Model)
    extending.infer_getattr(Fields)
    extending.lower_getattr_generic(Reference)(load)
    return extending.intrinsic(refer)


def is_kept(modules: Sequence[ModuleType], entry: str) -> bool:
    """Ask numba whether it has a function's machine code, of this CPU and numba, in its cache.

    Imports numba.
    """
    if not has_numba():
        return False
    copy = _copy(getattr(modules[-1], entry), {}, _digest(*(m.__file__ for m in modules)))
    try:
        cache = _numba().njit(cache=True)(copy)._cache
        codegen = import_module("numba.core.registry").cpu_target.target_context.codegen()
        overloads = cache._cache_file._load_index()
    except (RuntimeError, OSError, AttributeError):  # no writable folder; another numba's insides
        return False
    return any(codegen.magic_tuple() in key for key in overloads)


UPGRADES: list[Upgrade] = []


def compile_at_once() -> None:
    """Have all machine code of this process loaded or made before its first use."""
    for upgrade in UPGRADES:
        upgrade.load = upgrade.make = 1


class Upgrade:
    """Decides when a function's work moves from plain Python to machine code: the one place.

    Work is counted in calls of the function or the like. Machine code in numba's cache is loaded
    once the work, done or known to come, takes longer than loading it; where there is none, it is
    made once the work takes longer than compiling. A run on the wall clock only loads it.
    """

    def __init__(self, modules: Sequence[ModuleType], entry: str, *, load: int, make: int) -> None:
        self.modules, self.entry = modules, entry
        self.load, self.make = load, make
        """Work that takes plain Python as long as loading the code, and as compiling it."""
        UPGRADES.append(self)
        self.restart()

    def restart(self) -> None:
        """Forget the work done so far, and that the code has been loaded."""
        self._done, self._is_due, self._ask_at = 0, False, 0

    def is_due(self, done: int = 0, ahead: int = 0) -> bool:
        """Add work `done` in plain Python; return whether to go on in machine code.

        `ahead` is the work that is known to come.
        """
        self._done += done
        work = self._done + ahead
        if not has_numba():
            return False
        self._is_due |= work >= self.make and _midway[0]
        if not self._is_due and work >= max(self.load, self._ask_at):
            self._is_due = is_kept(self.modules, self.entry)
            self._ask_at = 2 * work  # another process may make it meanwhile
        return self._is_due


class NotCompilable(Exception):
    """numba cannot compile a function, or its machine code might go stale."""


_FIXED = ("builtins", "math", "numpy")


@cache
def compiled(modules: tuple[ModuleType, ...], entry: str) -> Callable[..., Any]:
    """Return the function `entry` of the last module, compiled for its first call's arguments.

    All later calls must have arguments of the same types: they are not checked.

    The functions it calls in these modules are compiled with it: they are copied, so that the
    copies call each other. A module's constant IN_PYTHON is False there, and numba leaves out the
    branches that depend on it. The machine code is kept on disk by the module (or in the user's
    cache folder) under a name derived from all sources, because numba itself checks the entry's
    file only.
    """
    scopes = {module.__name__: {**vars(module), "IN_PYTHON": False} for module in modules}
    functions = [
        f for m in modules for f in vars(m).values() if isfunction(f) and f.__module__ == m.__name__
    ]
    copies = {
        function.__name__: _compiled(function, scopes[function.__module__], "")
        for function in functions
        if function.__name__ != entry
    }
    for name, make in (("by_reference", _by_reference), ("table_at", _table_at)):
        if any(name in scope for scope in scopes.values()):
            copies[name] = make()
    for scope in scopes.values():
        scope.update({name: value for name, value in copies.items() if name in scope})
    function, kept_as = getattr(modules[-1], entry), _digest(*(m.__file__ for m in modules))
    ready: list[Any] = []

    def call(*arguments: Any) -> Any:
        if not ready:
            # Function arguments are typed by signature: another function needs no new compilation.
            types = tuple(map(_numba().typeof, arguments))
            done = _compiled(function, scopes[modules[-1].__name__], kept_as, types)
            # Its machine code itself: to look up the types of each call takes longer than an event.
            (overload,) = done.overloads.values()
            ready.append(overload.entry_point)
        return ready[0](*arguments)

    return call


@cache
def compiled_function(function: Any, *kinds: type) -> Any:
    """Return a function of records of these kinds to two floats, compiled, as an argument.

    Raises NotCompilable.
    """
    signature, make = _of_records(*kinds), _numba().cfunc
    digest = _digest(function.__code__.co_filename, read=read_by(function))
    try:
        cfunc = _compiled(function, function.__globals__, digest, signature, make=make)
    except Exception as error:  # numba's own errors are of many kinds
        raise NotCompilable(f"{function.__qualname__}: {error}") from error
    return _pointer(cfunc, signature, int(cfunc.address))


def read_by(function: Any) -> str:
    """Return all that a function reads beside its arguments, in words that change when it does.

    Machine code has these values for good. Raises NotCompilable for what it would not notice: all
    but numbers, text, tuples of them, and what Python, `math` and numpy define.
    """
    names, codes = set(), [function.__code__]
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        names |= {i.argval for i in get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    scope, cells = function.__globals__, function.__closure__ or ()
    reads = {name: scope[name] for name in sorted(names) if name in scope}
    reads |= {str(place): cell.cell_contents for place, cell in enumerate(cells)}
    reads["defaults"] = function.__defaults__
    return "; ".join(f"{name} = {_in_words(name, value)}" for name, value in reads.items())


def _in_words(name: str, value: Any) -> str:
    if type(value) is tuple:
        return f"({', '.join(_in_words(name, each) for each in value)})"
    if type(value) in (type(None), bool, int, float, str) or isinstance(value, np.generic):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, ModuleType) and value.__name__ in _FIXED:
        return value.__name__
    home = getattr(value, "__module__", None) or type(value).__module__
    if callable(value) and home.split(".")[0] in _FIXED:
        return f"{home}.{getattr(value, '__name__', value)}"
    raise NotCompilable(f"{name} = {value!r} may change")


def uncalled(*kinds: type) -> Any:
    """Return an argument in place of a `compiled_function` that is not called."""
    return _pointer(None, _of_records(*kinds), 0)


def _of_records(*kinds: type) -> Any:
    numba = _numba()
    records = [numba.from_dtype(dtype_of(kind)) for kind in kinds]
    return numba.types.UniTuple(numba.types.float64, 2)(*records)


def callback(function: Callable[..., int], count: int) -> Any:
    """Return a Python function of `count` ints to an int in the form that compiled functions take.

    It must not raise: the caller would go on with 0.
    """
    callable_from_c = ctypes.CFUNCTYPE(*[ctypes.c_int64] * (count + 1))(function)
    address: Any = ctypes.cast(callable_from_c, ctypes.c_void_p).value
    types = _numba().types
    return _pointer(callable_from_c, types.int64(*[types.int64] * count), address)


def _pointer(function: Any, signature: Any, address: int) -> Any:
    return import_module("lm_eval_moecache.records.pointer").Pointer(function, signature, address)


def _digest(*files: object, read: str = "") -> str:
    own = [str(Path(__file__).with_name(name)) for name in ("pointer.py", "linking.py")]
    paths = map(Path, sorted((__file__, *own, *map(str, files))))
    sources = b"".join(path.read_bytes() for path in paths if path.exists())
    return hashlib.sha256(sources + read.encode()).hexdigest()[:16]


def _compiled(
    function: Any, scope: dict[str, Any], kept_as: str, *signature: Any, make: Any = None
) -> Any:
    """Return a function compiled with these globals; on disk under `kept_as`, unless empty."""
    numba = _numba()
    # No reference counting, which would cost more than all the rest: no function makes arrays.
    options: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
    copy = _copy(function, scope, kept_as)
    if not kept_as:
        # Called by compiled functions only.
        options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        linking = import_module("lm_eval_moecache.records.linking")
        inner = numba.njit(**options, pipeline_class=linking.Pipeline)(copy)
        template, unliteral = inner.get_call_template, numba.types.unliteral

        def get_call_template(args: Any, kws: Any) -> Any:
            with linking.as_parts():
                # Else numba would compile it anew for each constant it is called with.
                return template(tuple(map(unliteral, args)), kws)

        inner.get_call_template = get_call_template
        return inner
    if make is not None:
        try:
            return make(*signature, cache=True, **options)(copy)
        except RuntimeError:  # no writable folder: compiled anew in each process
            return make(*signature, **options)(copy)
    try:
        dispatcher = numba.njit(cache=True, nogil=True, **options)(copy)
        place = Path(dispatcher._cache.cache_path)
        from filelock import FileLock  # imported late, like numba

        place.mkdir(parents=True, exist_ok=True)
        # Processes that start together wait for the first to compile, and load its code.
        claim: Any = FileLock(place / f"{copy.__qualname__}.lock")
    except (RuntimeError, OSError):  # no writable folder
        dispatcher, claim = numba.njit(nogil=True, **options)(copy), nullcontext()
    with claim:
        dispatcher.compile(*signature)
    dispatcher.disable_compile()
    return dispatcher


def _copy(function: Any, scope: dict[str, Any], kept_as: str) -> Any:
    """Return the function with these globals, under the name that its machine code is kept by."""
    name, closure = function.__name__, function.__closure__
    copy = FunctionType(function.__code__, scope, name, function.__defaults__, closure)
    copy.__qualname__ = f"{name}_{kept_as}" if kept_as else function.__qualname__
    return copy
