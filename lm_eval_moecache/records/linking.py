"""How functions are compiled that only other compiled functions call. Imports numba.

By itself numba links each function with all that it calls, optimises the whole and makes it
executable: along a chain of calls the innermost functions many times over, which was more than half
of the time to compile `engine.core`. Here only the outermost function is.
"""

# mypy: disable-error-code="misc, no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
from numba.core import typed_passes as typed
from numba.core import untyped_passes as untyped
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.core.registry import cpu_target


class Part(JITCodeLibrary):
    """One function's code, to be linked: it has no address."""

    @property
    def codegen(self) -> Any:
        return SimpleNamespace(set_env=lambda *_: None)

    def add_llvm_module(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout
        self._final_module.link_in(module)

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    def _get_module_for_linking(self) -> Any:
        """Return this code and all that it calls, each function once."""
        if self._shared_module is None:
            whole = llvm.parse_assembly(str(self._codegen._create_empty_module(self.name)))
            # Parts go first: declared optional, code that nothing calls yet is left out.
            for library in sorted(self._needed(), key=lambda each: not isinstance(each, Part)):
                is_part = isinstance(library, Part)
                module = library._final_module if is_part else library._get_module_for_linking()
                whole.link_in(module, preserve=True)
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
                waiting += library._linking_libraries if isinstance(library, Part) else ()
        return [*found]


@contextmanager
def as_parts() -> Iterator[None]:
    """Compile within this context functions that only other compiled functions call."""
    codegen = cpu_target.target_context.codegen()
    before, codegen._library_class = codegen._library_class, Part
    try:
        yield
    finally:
        codegen._library_class = before


class Pipeline(CompilerBase):
    """numba's passes without those for what no function of tables has: closures, raises, arrays."""

    def define_pipelines(self) -> list[Any]:
        passes = PassManager("tables")
        for each in (
            *(untyped.TranslateByteCode, untyped.FixupArgs, untyped.IRProcessing),
            *(untyped.RewriteSemanticConstants, untyped.DeadBranchPrune, untyped.ReconstructSSA),
            *(typed.NopythonTypeInference, typed.PreLowerStripPhis, typed.IRLegalization),
            *(typed.NativeLowering, typed.NoPythonBackend),
        ):
            passes.add_pass(each, each._name)
        passes.finalize()
        return [passes]
