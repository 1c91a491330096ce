"""What a user got wrong, said in one line: the error type, and how a command ends with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_COMMANDS = ("lm_eval", "lm-eval", "lm_eval.__main__")


class ArgumentsError(ValueError):
    """A setting that cannot run: the message names the key, the value and what is allowed."""


@contextmanager
def as_arguments_error(pretrained: object) -> Iterator[None]:
    """Turn what a check raises into an ArgumentsError, and a model that cannot be read as well."""
    try:
        yield
    except ArgumentsError:
        raise
    except ValueError as error:
        raise ArgumentsError(str(error)) from None
    except OSError as error:
        reason = " ".join(str(error).split())
        raise ArgumentsError(f"pretrained={pretrained!r} cannot be read: {reason}") from None


@contextmanager
def ending_lm_eval_in_one_line() -> Iterator[None]:
    """End the process with the message alone where it is lm-eval's command.

    From Python, and under `moecache eval`, the ArgumentsError goes on like any other ValueError.
    """
    try:
        yield
    except ArgumentsError as error:
        if not is_lm_eval_command():
            raise
        sys.stderr.write(f"moecache: {error}\n")
        raise SystemExit(1) from None


def is_lm_eval_command() -> bool:
    """Return whether this process is `lm_eval ...` or `python -m lm_eval ...`."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return (spec.name if spec else Path(getattr(main, "__file__", None) or "").stem) in _COMMANDS
