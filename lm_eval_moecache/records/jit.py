"""Compiles functions of arrays with numba, with what they leave open bound to a rule's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import isfunction
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


@cache
def has_numba() -> bool:
    """Whether functions are compiled; without numba they run as they are, and slower."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def specialise(
    modules: Sequence[ModuleType], entry: str, bound: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the function `entry` of these modules with `bound` in place of their own globals.

    All functions of the modules are made anew, so that each sees what is bound, and calls the
    others as they are made here. What was compiled is kept on disk beside the module (or in the
    user's cache folder) under a name that follows from the sources and from what is bound: numba
    itself looks neither at other files than the entry's nor at globals.
    """
    scopes = {module.__name__: dict(vars(module)) for module in modules}
    own = [f for f in map(_as_function, bound.values()) if f is not None]
    for module in modules:
        own += [f for f in vars(module).values() if isfunction(f) and f.__module__ in scopes]
    sources = {
        file: Path(file).read_bytes() for file in {__file__, *(f.__code__.co_filename for f in own)}
    }
    told = [f"{n}={getattr(v, '__qualname__', v)}" for n, v in sorted(bound.items())]
    digest = hashlib.sha256(b"".join(sources[file] for file in sorted(sources)))
    digest.update(" ".join(told).encode())
    made = {}
    for name, value in bound.items():
        is_rule = isfunction(value)
        made[name] = _compiled(value, value.__globals__, "") if is_rule else value
    for function in own:
        name, home = function.__name__, function.__module__
        if home in scopes and name not in made:
            key = digest.hexdigest()[:16] if name == entry else ""
            made[name] = _compiled(function, scopes[home], key)
    for scope in scopes.values():
        scope.update({name: value for name, value in made.items() if name in scope})
    return made[entry]  # type: ignore[no-any-return]


def _as_function(value: object) -> Any:
    return value if isfunction(value) else None


def _compiled(function: Any, scope: dict[str, Any], kept_as: str) -> Any:
    """Return the function with these globals, compiled; an entry is kept under a name."""
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    if not has_numba():
        return made
    import numba

    # Without counting references, which costs more than all the rest: nothing here makes arrays.
    options: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
    if not kept_as:
        return numba.njit(forceinline=True, **options)(made)
    made.__qualname__ = f"{function.__name__}_{kept_as}"
    try:
        return numba.njit(cache=True, nogil=True, **options)(made)
    except RuntimeError:  # no folder that it may write to: compiled anew in each process
        return numba.njit(nogil=True, **options)(made)
