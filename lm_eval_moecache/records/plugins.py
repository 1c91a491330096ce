"""What other packages add by entry points: algorithms, formats, commands, and folders of YAMLs.

The groups are `lm_eval_moecache.KIND`, where KIND is an axis, `formats`, `commands`, `profile`,
`policies`, `hardware` or `runtimes`. An axis and `formats` name a class, `commands` and `profile`
(its actions) a function; the others name a module whose folder holds YAMLs. Nothing of a package is
imported before a name of its kind is looked up; a command's module not before the command runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from lm_eval_moecache.records.errors import MoECacheError

_GROUP = "lm_eval_moecache."


@cache  # reads the metadata of every package: milliseconds
def _of_kind(kind: str) -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=f"{_GROUP}{kind}"), key=lambda each: each.name))


def forget() -> None:
    """Look at the installed packages anew: for packages installed while this process runs."""
    for cached in (_of_kind, _folder_of):
        cached.cache_clear()


def added(kind: str, own: Collection[str]) -> Mapping[str, EntryPoint]:
    """Return name -> entry point of what packages add to our `own` names.

    Raises MoECacheError, naming the package, for a name that is taken or that has a dot, as class
    paths have.
    """
    found: dict[str, EntryPoint] = {}
    for point in _of_kind(kind):
        _check_free(point, point.name, own if point.name in own else found)
        if "." in point.name:
            raise MoECacheError(
                f"{described(point)}: a name has no dots, which are for class paths."
            )
        found[point.name] = point
    return found


def load(point: EntryPoint) -> Any:
    """Import what an entry point names; MoECacheError, naming the package, where that fails."""
    try:
        return point.load()
    except Exception as error:  # whatever the package's own code raises
        reason = f"{type(error).__name__}: {error}"
        raise MoECacheError(f"{described(point)} cannot be imported: {reason}") from error


def yaml_files(kind: str, folder: Path) -> dict[str, Path]:
    """Return name -> file of the YAMLs in our `folder` and in those that packages add, sorted.

    Raises MoECacheError, naming the package, for a name that is taken or a folder that is missing.
    """
    files = {path.stem: path for path in folder.glob("*.yaml")}
    for point in _of_kind(kind):
        for path in _folder_of(point).glob("*.yaml"):
            _check_free(point, path.stem, files)
            files[path.stem] = path
    return dict(sorted(files.items()))


@cache
def _folder_of(point: EntryPoint) -> Path:
    places = list(getattr(load(point), "__path__", ()))
    if not places:
        raise MoECacheError(f"{described(point)} must name a folder of YAMLs, as a package.")
    return Path(places[0])


def _check_free(point: EntryPoint, name: str, taken: Collection[str]) -> None:
    if name in taken:
        raise MoECacheError(
            f"{described(point)}: the name {name!r} is taken. Rename it there, or uninstall it."
        )


def described(point: EntryPoint) -> str:
    """Return an entry point and its package, for messages."""
    package = point.dist.name if point.dist is not None else "a package"
    return f"{point.group.removeprefix(_GROUP)}={point.name!r} of {package} ({point.value})"
