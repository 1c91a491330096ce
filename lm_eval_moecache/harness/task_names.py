"""Names of tasks that are nobody's, found without lm-eval's index of its 14,000 files."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from lm_eval_moecache.records.files import task_configs_dir
from lm_eval_moecache.records.numbers import nearest

_PLAIN = re.compile(r"[\w.+-]+(?<!\.yaml)(?<!\.yml)(?<!\.json)")
_NAMED = re.compile(rb"(?m)^[ \t-]*(?:task|group|tag)[ \t]*:[ \t]*[\"']?([\w.+-]+)[\"']?[ \t]*$")


def check_known(names: Collection[str], folders: Collection[str]) -> None:
    """Raise ValueError for a task's name that no file of these folders and of lm-eval has in it.

    Names the nearest. lm-eval's index takes ten times as long, as it parses its files. Of a name
    that is in one, only that index knows whether it is a task's. Paths and patterns pass.
    """
    unknown = {
        name: re.compile(rb"(?<![\w.+-])%s(?![\w.+-])" % re.escape(name.encode()))
        for name in names
        if _PLAIN.fullmatch(name) and not os.path.exists(name)
    }
    known: set[str] = set()
    for text in _texts(folders) if unknown else ():
        unknown = {name: pattern for name, pattern in unknown.items() if not pattern.search(text)}
        if not unknown:
            return
        known.update(name.decode() for name in _NAMED.findall(text))
    if unknown:
        name, ours = min(unknown), str(task_configs_dir())
        if any(unknown[name].search(text) for text in _texts_in(ours)):
            raise ValueError(
                f"tasks={name!r} is this package's own. Give --include_path {ours}, which "
                "`moecache eval` does where no other folder is given."
            )
        raise ValueError(
            f"tasks={name!r} is not known.{nearest(name, known)} Allowed: the tasks and groups of "
            "`lm_eval ls tasks`, and of the folders in include_path, as this package's "
            "task_configs/."
        )


def _texts(folders: Collection[str]) -> Iterator[bytes]:
    package = importlib.util.find_spec("lm_eval")
    assert package is not None and package.origin is not None, "lm-eval is not installed"
    for place in (*folders, str(Path(package.origin).parent / "tasks")):
        yield from _texts_in(place)


def _texts_in(place: str) -> Iterator[bytes]:
    for folder, _, files in os.walk(place):
        for file in files:
            if file.endswith((".yaml", ".yml", ".py")):
                yield Path(folder, file).read_bytes()
