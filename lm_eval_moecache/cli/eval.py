"""What `moecache eval` adds to `lm_eval run`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lm_eval_moecache.harness import hub
from lm_eval_moecache.harness.evaluation_options import check_command, options_of
from lm_eval_moecache.harness.plugin import register
from lm_eval_moecache.harness.saving import Unsaved
from lm_eval_moecache.records.command import listed
from lm_eval_moecache.records.files import task_configs_dir
from lm_eval_moecache.records.schemas.keys import KEYS
from lm_eval_moecache.records.schemas.keys import options_of as about


def eval_(*argv: str) -> int:
    """Run `lm_eval run ...` with our models and tasks registered, without the start-up hook.

    Everything is passed to lm-eval, with our model and task folder unless others are named.
    Returns the exit code.
    """
    from lm_eval.__main__ import cli_evaluate

    asks_help = bool({"-h", "--help"} & set(argv))
    words = ["run", *(argv if asks_help else completed(argv))]
    options = {} if asks_help else check_command(words)
    tasks, folders = (options.get(key, []) for key in ("tasks", "include_path"))
    hub.answers(tasks)
    register()
    sys.argv, unsaved = ["lm_eval", *words], Unsaved()
    try:
        with hub.naming_data_sets(), _indexing(tasks, folders):
            cli_evaluate()
    finally:
        if asks_help:
            # lm-eval has printed its own help, and is about to end the process.
            sys.stdout.write("\n".join(["", _KEYS, "", *_own_keys(), ""]))
    return unsaved.exit_code()


_KEYS = "keys of --model_args (--model moecache and moecache-spec), in addition to those of `hf`:"


def _own_keys() -> list[str]:
    """Return our keys with their help and defaults as lines for the terminal."""
    rows = [
        (key, text if default is None else f"{text} (default: {default})")
        for key, (_, default, text) in about(KEYS).items()
    ]
    return listed(rows, 20)


@contextmanager
def _indexing(names: Sequence[str], folders: Sequence[str]) -> Iterator[None]:
    """Let lm-eval index its own 15,000 task files only if a name needs them: that takes seconds."""
    from lm_eval import tasks as place

    whole: Any = place.TaskManager

    class OwnTasks(whole):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "include_defaults": False})

    own = whole(include_path=folders, include_defaults=False).task_index if names else ()
    if names and all(name in own for name in names):
        place.TaskManager = OwnTasks
    try:
        yield
    finally:
        place.TaskManager = whole


def completed(argv: Sequence[str]) -> list[str]:
    """Add `--include_path` and `--model` unless the arguments or their config file set them."""
    options = options_of(["run", *argv])
    defaults = {"include_path": str(task_configs_dir()), "model": "moecache"}
    added = [(f"--{key}", value) for key, value in defaults.items() if options.get(key) is None]
    return [*argv, *(word for pair in added for word in pair)]
