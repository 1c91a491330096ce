"""What the kills' server has ready before it forks a command.

Imported libraries and lm-eval's index of its own 10,000 tasks were nine tenths of a short command's
time, in which a kill meets none of our code. Workers of a pool are forked from their command, which
has all that: they hear of its end as spawned ones do, by a pipe that only it holds open.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval.__main__
import lm_eval.tasks
from lm_eval.tasks._index import TaskIndex

import lm_eval_moecache.harness.lm
import lm_eval_moecache.sweep.run
import lm_eval_moecache.tune.run  # noqa: F401
from lm_eval_moecache.sweep import pool

_build = TaskIndex.build


@cache
def _index(folder: Path) -> Any:
    return _build([folder])


def _built(paths: Iterable[Path], **options: Any) -> Any:
    """As `TaskIndex.build`, of which later folders go before earlier ones."""
    return {name: found for path in paths for name, found in _index(path).items()}


class _Worker(ForkProcess):
    """A forked worker. What only its command may hold open is closed in it."""

    held: tuple[Connection, ...] = ()

    def run(self) -> None:
        for end in self.held:
            end.close()
        super().run()


class _Forking(ForkContext):
    """Stands for the spawn context of one pool."""

    def __init__(self) -> None:
        super().__init__()
        self.Process = type("Worker", (_Worker,), {})  # type: ignore[assignment]

    def Pipe(self, duplex: bool = True) -> Any:
        ends = super().Pipe(duplex)
        self.Process.held = (ends[1],)  # type: ignore[attr-defined]
        return ends


def warm_workers() -> None:
    """From now on this process forks the workers of its pools."""
    pool.multiprocessing = SimpleNamespace(get_context=lambda method: _Forking())  # type: ignore


def warm_up() -> None:
    """Index lm-eval's tasks once, for this process and those that it forks."""
    TaskIndex.build = staticmethod(_built)  # type: ignore[method-assign]
    _index(Path(lm_eval.tasks.__file__).parent)


warm_up()
