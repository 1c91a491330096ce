"""Records and numbers in memory, got at by address: by Python, and by what numba compiles.

A record is declared by a dataclass with int and float fields, eight bytes each.
"""

# mypy: disable-error-code="no-any-return, misc, arg-type, call-overload, type-var"

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")
INTS, FLOATS = np.dtype(np.int64), np.dtype(np.float32)
DOUBLES, FLAGS = np.dtype(np.float64), np.dtype(np.uint8)
_C_TYPES = {
    INTS: ctypes.c_int64,
    FLOATS: ctypes.c_float,
    DOUBLES: ctypes.c_double,
    FLAGS: ctypes.c_uint8,
}


class Kind(Generic[T]):
    """The numpy dtype of a dataclass's records, as mypy sees it."""

    itemsize: int


@cache
def kind_of(record: type[T]) -> Kind[T]:
    """Return the numpy dtype with the fields of a dataclass, eight bytes each."""
    types_of = {"int": (np.int64, ctypes.c_int64), "float": (np.float64, ctypes.c_double)}
    named = [(field.name, *types_of[str(field.type)]) for field in fields(record)]
    kind = np.dtype([(name, of_numpy) for name, of_numpy, _ in named])
    layout = {"_fields_": [(name, of_c) for name, _, of_c in named]}
    _STRUCTURES[kind] = type(record.__name__, (ctypes.Structure,), layout)
    return kind  # type: ignore[return-value]


_STRUCTURES: dict[Any, Any] = {}
"""Kind -> the same fields as ctypes knows them."""


@cache
def _defaults(record: type[Any]) -> dict[str, Any]:
    return {f.name: 0 if f.default is MISSING else f.default for f in fields(record)}


def make_record(kind: type[T], **given: Any) -> T:
    """Return a record in memory, for Python to read and write by its fields."""
    made: T = _STRUCTURES[kind_of(kind)](**_defaults(kind) | given)
    return made


def make_table(kind: type[Any], count: int) -> Any:
    """Return an array of records with default values."""
    return np.full(count, np.array(tuple(_defaults(kind).values()), kind_of(kind)))


def at(address: int, index: int, kind: Kind[T]) -> T:
    """Return the record with this index in the table at an address."""
    return _STRUCTURES[kind].from_address(int(address + index * kind.itemsize))


def numbers(address: int, kind: Any) -> Any:
    """Return the numbers of a dtype at an address, to be read and written by index."""
    return ctypes.cast(int(address), ctypes.POINTER(_C_TYPES[kind]))


def invoke(address: int, first: int, second: int, third: int) -> int:
    """Call the function of three ints at an address; it returns an int."""
    function = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 4)(int(address))
    return function(int(first), int(second), int(third))


def callback(function: Callable[[int, int, int], int]) -> Any:
    """Return a Python function of three ints to an int, which must not raise, for `invoke`."""
    return ctypes.CFUNCTYPE(*[ctypes.c_int64] * 4)(function)


def address_of(made: Any) -> int:
    """Return the address of an array, a record or a callback, which its maker keeps alive."""
    if isinstance(made, np.ndarray):
        # A sixth of the time of `ctypes.data`; a buffer of records would describe all their fields.
        if made.dtype.names is None and made.size and made.flags.writeable:
            return ctypes.addressof(ctypes.c_char.from_buffer(made))
        return made.ctypes.data
    if isinstance(made, ctypes.Structure):
        return ctypes.addressof(made)
    return ctypes.cast(made, ctypes.c_void_p).value or 0
