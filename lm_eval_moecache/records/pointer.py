"""Functions as arguments of compiled ones. Imports numba, so it is imported late.

For numba's own type of a function, each call asks Python twice for the address: 1.7 us.
"""

# mypy: disable-error-code="misc, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.experimental.function_type import FunctionModel
from numba.extending import NativeValue, register_model, unbox


class PointerType(types.FunctionType):
    """numba's type of a `Pointer` to a function of this signature."""


register_model(PointerType)(FunctionModel)


class Pointer:
    """A compiled function of a numba signature, at an address in memory."""

    def __init__(self, function: Any, signature: Any, address: int) -> None:
        self._function, self._numba_type_, self.address = function, PointerType(signature), address


@unbox(PointerType)
def _unbox(kind: Any, pointer: Any, c: Any) -> Any:
    function = cgutils.create_struct_proxy(kind)(c.context, c.builder)
    address = c.pyapi.object_getattr_string(pointer, "address")
    function.c_addr = c.pyapi.long_as_voidptr(address)
    c.pyapi.decref(address)
    return NativeValue(function._getvalue())
