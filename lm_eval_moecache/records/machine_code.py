"""Compiles functions over memory (`records.memory`) with numba, and keeps their code on disk.

Imports numba, so it is imported late. The same source runs in plain Python, slowly, under
NUMBA_DISABLE_JIT=1.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call, misc, untyped-decorator"
# mypy: disable-error-code="attr-defined, call-overload, arg-type"

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from dis import get_instructions
from functools import cache
from inspect import isfunction
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, get_type_hints

# Else numba's colours end each command on a terminal with an escape sequence.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")

import llvmlite.binding as llvm
import numba
import numpy as np
from filelock import FileLock
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lm_eval_moecache.records.memory import address_of, at, callback, kind_of

logger = logging.getLogger(__name__)
JITS = not numba.config.DISABLE_JIT
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
"""No reference counting, which would cost more than all the rest: no function makes arrays."""


@intrinsic
def _at(context: Any, address: Any, index: Any, kind: Any) -> Any:
    def place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        record, start = signature.return_type, arguments[0]
        offset = builder.mul(arguments[1], start.type(record.size))
        return builder.inttoptr(builder.add(start, offset), context.get_value_type(record))

    return kind.dtype(types.int64, types.int64, kind), place


@intrinsic
def _numbers(context: Any, address: Any, kind: Any) -> Any:
    def place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind.dtype)(types.int64, kind), place


@intrinsic
def _invoke(context: Any, address: Any, first: Any, second: Any, third: Any) -> Any:
    def place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, *given = arguments
        function = ir.FunctionType(address.type, [each.type for each in given])
        return builder.call(builder.inttoptr(address, function.as_pointer()), given)

    return types.int64(*[types.int64] * 4), place


_BY_ADDRESS = {"at": _at, "numbers": _numbers, "invoke": _invoke}


def digest_of(*files: object, read: str = "") -> str:
    """Return a digest of sources, by which their machine code is kept."""
    paths = map(Path, sorted((__file__, *map(str, files))))
    sources = b"".join(path.read_bytes() for path in paths if path.exists())
    return hashlib.sha256(sources + read.encode()).hexdigest()[:16]


@cache
def compiled(modules: tuple[ModuleType, ...], entry: str) -> Any:
    """Return the function `entry` of these modules, for ctypes: its first argument is an address.

    That is a record's; all others are ints. It is compiled with the functions of the modules that
    it calls, each by itself, by its annotations: they find each other by symbol. By itself numba
    would link each with all that it calls, and optimise the innermost many times over.
    """
    functions = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isfunction(value) and value.__module__ == module.__name__
    }
    record, *others, _ = get_type_hints(functions[entry]).values()
    kind = ctypes.CFUNCTYPE(*[ctypes.c_int64] * (2 + len(others)))
    if not JITS:
        return kind(
            _keeping_errors(lambda at_, *more: functions[entry](at(at_, 0, kind_of(record)), *more))
        )
    build = _Build(functions, digest_of(*(module.__file__ for module in modules)))
    with FileLock(Path(tempfile.gettempdir()) / f"moecache_{build.digest}.lock"):
        address = build.address_of(entry)
    return kind(address)


class _Build:
    """Compiles functions that call each other, those that are called first."""

    def __init__(self, functions: dict[str, Any], digest: str) -> None:
        self._functions, self.digest = functions, digest
        self._addresses: dict[str, int] = {}
        self._symbols: dict[str, Any] = {}
        self._says = True

    def address_of(self, name: str) -> int:
        """Return the address of a function, compiled or loaded with all that it calls."""
        if name not in self._addresses:
            function = self._functions[name]
            for step in get_instructions(function):
                if step.opname == "LOAD_GLOBAL" and step.argval in self._functions:
                    self.address_of(step.argval)
            hints = get_type_hints(function)
            returned = _type_of(hints.pop("return"))
            signature = returned(*map(_type_of, hints.values()))
            done = _compiled(function, self._symbols, self.digest, signature)
            if self._says and not done.cache_hits:
                logger.info("compiling the cache once for this machine, which takes some seconds")
            self._says = False
            symbol = f"moecache_{name}_{self.digest}"
            llvm.add_symbol(symbol, done.address)
            self._addresses[name] = done.address
            self._symbols[name] = types.ExternalFunction(symbol, signature)
            _kept.append(done)
        return self._addresses[name]


_kept: list[Any] = []
"""Machine code lives as long as what numba returns."""


def _type_of(hint: Any) -> Any:
    """Return numba's type of an annotation."""
    plain = {int: types.int64, bool: types.int64, float: types.float64, type(None): types.void}
    return plain[hint] if hint in plain else numba.from_dtype(kind_of(hint))


def _compiled(function: Any, scope: dict[str, Any], digest: str, signature: Any) -> Any:
    """Return a function compiled with these globals in place of its own; kept on disk."""
    name = f"{function.__name__}_{digest}"
    scope = {**function.__globals__, **_BY_ADDRESS, **scope}
    closure = function.__closure__
    copy = FunctionType(function.__code__, scope, name, function.__defaults__, closure)
    copy.__qualname__ = name
    try:
        return numba.cfunc(signature, cache=True, **_OPTIONS)(copy)
    except RuntimeError:  # no writable folder: compiled anew in each process
        return numba.cfunc(signature, **_OPTIONS)(copy)


class NotCompilable(Exception):
    """The machine code of a function might go stale."""


_FIXED = ("builtins", "math", "numpy")


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


def bridge(rule: Callable[..., tuple[float, float]], *kinds: type[Any]) -> int:
    """Return the address of a rule of two records, or of three, that writes its two numbers.

    It takes the addresses of three records, the last of which has the fields `first` and `second`.
    What numba cannot compile is called in plain Python, with the same figures; what it raises there
    is for `raise_kept`.
    """
    try:
        # Rules of one file may have one name.
        place = rule.__qualname__, rule.__code__.co_firstlineno, [*map(kind_of, kinds)]
        read = f"{place} {read_by(rule)}"
    except NotCompilable as error:
        return _in_python(rule, kinds, error)
    key = rule.__code__, read
    if key not in _bridges:
        try:
            _bridges[key] = _bridged(rule, kinds, read) if JITS else _in_python(rule, kinds)
        except Exception as error:  # numba's own errors are of many kinds
            _bridges[key] = _in_python(rule, kinds, error)
    return _bridges[key]


_bridges: dict[Any, int] = {}
raised: list[BaseException] = []


def _bridged(rule: Any, kinds: tuple[type[Any], ...], read: str) -> int:
    function = _write_two if rule.__code__.co_argcount == 2 else _write_three
    digest = digest_of(rule.__code__.co_filename, read=read)
    signature = types.int64(*[numba.from_dtype(kind_of(kind)) for kind in kinds])
    done = _compiled(function, {"rule": numba.njit(**_OPTIONS)(rule)}, digest, signature)
    _kept.append(done)
    return done.address


def _in_python(rule: Any, kinds: tuple[type[Any], ...], why: object = "") -> int:
    if why:
        logger.info("%s runs in plain Python: %s", rule.__qualname__, why)
    takes = rule.__code__.co_argcount

    def call(*places: int) -> int:
        records = [at(p, 0, kind_of(kind)) for p, kind in zip(places, kinds, strict=True)]
        answer: Any = rule(*records[:takes])
        if not (isinstance(answer, tuple) and len(answer) == 2 and answer[0] == answer[0]):
            raise ValueError(f"{rule.__qualname__} returned {answer!r}; expected: two numbers")
        records[2].first, records[2].second = answer
        return 0

    called = callback(_keeping_errors(call))
    _kept.append(called)
    return address_of(called)


def _keeping_errors(function: Callable[..., int]) -> Callable[..., int]:
    """Return a function that does not raise: machine code cannot be ended by an exception."""

    def call(*given: int) -> int:
        try:
            return int(function(*given))
        except BaseException as error:
            raised.append(error)
            return 0

    return call


def raise_kept() -> None:
    """Raise what plain Python has raised while machine code called it."""
    if raised:
        error, raised[:] = raised[0], []
        raise error


def _write_two(one: Any, other: Any, out: Any) -> int:
    out.first, out.second = rule(one, other)  # type: ignore[name-defined]  # noqa: F821
    return 0


def _write_three(one: Any, other: Any, out: Any) -> int:
    out.first, out.second = rule(one, other, out)  # type: ignore[name-defined]  # noqa: F821
    return 0
