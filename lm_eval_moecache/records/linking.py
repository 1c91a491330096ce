"""How numba compiles functions that only other compiled functions call: to be linked, no more.

By itself numba links each function's machine code with that of all it calls, optimises the whole,
and makes it executable: for a chain of calls the innermost functions many times over. Here only the
outermost function is. Half of the time to compile `engine.core` was that.
"""

# mypy: disable-error-code="import-untyped, no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import cpu_target


class _Part(JITCodeLibrary):
    """One function's code. It is never called by its address, so it has neither that nor constants
    of Python (`set_env`)."""

    @property
    def codegen(self) -> Any:
        return _Codegen(self._codegen)

    def add_llvm_module(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout
        self._final_module.link_in(module)

    def finalize(self) -> None:
        self._raise_if_finalized()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    def _get_module_for_linking(self) -> Any:
        """Return this code and all that it calls, each function once."""
        if self._shared_module is None:
            whole = llvm.parse_assembly(str(self._codegen._create_empty_module(self.name)))
            libraries = self._needed()
            # Before they are declared as optional, which would leave them out.
            for part in (library for library in libraries if isinstance(library, _Part)):
                whole.link_in(part._final_module, preserve=True)
            for library in libraries:
                if not isinstance(library, _Part):
                    whole.link_in(library._get_module_for_linking(), preserve=True)
            for function in whole.functions:
                if not function.is_declaration and function.linkage == llvm.Linkage.external:
                    function.linkage = "linkonce_odr"
            self._shared_module = whole
        return self._shared_module

    def _needed(self) -> list[Any]:
        found, waiting = dict[Any, None](), [self]
        while waiting:
            library = waiting.pop()
            if library not in found:
                found[library] = None
                if isinstance(library, _Part):
                    library._ensure_finalized()
                    waiting += library._linking_libraries
        return [*found]


class _Codegen:
    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, *arguments: Any) -> None:
        return


@contextmanager
def as_parts() -> Iterator[None]:
    """Compile within this context functions that only other compiled functions call."""
    codegen: Any = cpu_target.target_context.codegen()
    before, codegen._library_class = codegen._library_class, _Part
    try:
        yield
    finally:
        codegen._library_class = before
