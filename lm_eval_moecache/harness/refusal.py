"""What a user got wrong, said in one line: the error type, and how a command ends with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

_COMMAND_LINE = ("lm_eval._cli", "lm_eval.__main__")


class ArgumentsError(ValueError):
    """A setting that cannot run: the message names the key, the value and what is allowed.

    Where lm-eval's command line would end in a traceback of its own frames, it ends in the message
    alone. Raised from Python it is a ValueError like any other.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        _end_commands_in_one_line()


@contextmanager
def refusing(pretrained: object) -> Iterator[None]:
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


Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


def _end_commands_in_one_line() -> None:
    before: Hook = sys.excepthook
    if getattr(before, "ends_in_one_line", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ArgumentsError) and _is_command(trace):
            sys.stderr.write(f"moecache: {error}\n")
        else:
            before(kind, error, trace)

    hook.ends_in_one_line = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _is_command(trace: TracebackType | None) -> bool:
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).startswith(_COMMAND_LINE):
            return True
        trace = trace.tb_next
    return False
