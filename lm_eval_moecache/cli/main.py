"""Entry point of `moecache`: finds a command's function, calls it and prints what it returns.

`api` names the functions; a package adds its own by an entry point `name = "module:function"` of
the group `lm_eval_moecache.commands` (`.profile` for an action of `moecache profile`). Only the
chosen command's module is imported, so that `moecache replay` starts without torch.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lm_eval_moecache import api
from lm_eval_moecache.cli.parser import given
from lm_eval_moecache.records.command import listed, wrapped
from lm_eval_moecache.records.numbers import finite, unknown_name_error

RESUMING = {
    "eval": "Recorded traces hold the finished requests; the same command starts over.",
    "replay": "Nothing was written; the same command starts over.",
    "reproduce": "Finished runs are kept: the same command runs the others.",
    "sweep": "Finished runs are kept: the same command runs the others.",
    "tune": "The study and its runs are kept: the same command continues the search.",
}
"""What an interrupted command has kept, and how to resume it."""
_HINTS = (
    "`moecache COMMAND --help` shows a command's options, `moecache --version` the\n"
    "version, `moecache completion bash` (zsh, tcsh) a script that completes both."
)
NOTHING_KEPT = "The same command starts over."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit code, 2 with a one-line message for a user's error."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    return answered(f"moecache {name}", lambda: _run(name, rest), RESUMING.get(name, NOTHING_KEPT))


def answered(title: str, command: Callable[[], int], kept: str = NOTHING_KEPT) -> int:
    """Run a command; return its exit code, 2 with a one-line message for a user's error."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except ValueError as error:
        message, code = str(error), 2
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Flushing at exit would fail again, so discard it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141  # the code of a process that SIGPIPE ended
    except OSError as error:
        # The machine refused: a full disk, a folder without write permission.
        reason = error.strerror or str(error)
        place = f"{error.filename}: " if error.filename is not None and error.strerror else ""
        message, code = f"{place}{reason}", 2
    except KeyboardInterrupt:
        message, code = f"interrupted. {kept}", 130
    sys.stderr.write(f"{title}: {message}\n")
    return code


def _run(name: str, argv: list[str]) -> int:
    names = api.command_places()
    if name in ("-h", "--help"):
        firsts = api.command_names()
        rows = [(each, api.GROUPS.get(each) or summary_of(names[each])) for each in firsts]
        lines = ["usage: moecache COMMAND [options]", "", *listed(rows, 13), "", _HINTS, ""]
        sys.stdout.write("\n".join(lines))
        return 0
    if name == "--version" and not argv:
        sys.stdout.write(f"moecache {version('lm-eval-moecache')}\n")
        return 0
    if name in api.GROUPS:
        actions = {
            n.partition(" ")[2]: place for n, place in names.items() if n.startswith(f"{name} ")
        }
        if not argv or argv[0] in ("-h", "--help"):
            rows = [(action, summary_of(place)) for action, place in actions.items()]
            head = [f"usage: moecache {name} WHAT [options]", "", *wrapped(api.GROUPS[name]), ""]
            last = ["", f"`moecache {name} WHAT --help` has its options.", ""]
            sys.stdout.write("\n".join([*head, *listed(rows, 16), *last]))
            return 0
        if argv[0] not in actions:
            raise unknown_name_error(name, argv[0], list(actions))
        name, argv = f"{name} {argv[0]}", argv[1:]
    elif name not in names:
        raise unknown_name_error("command", name, api.command_names())
    return run(name, api.function_at(names[name]), argv)


def run(name: str, function: Callable[..., Any], argv: Sequence[str]) -> int:
    """Call a command's function with these words, print what it returns, return the exit code."""
    if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(function).parameters.values()):
        return int(function(*argv))  # another program's words: `eval`
    keywords, as_json = given(name, function, argv)
    found = function(**keywords)
    data = found if isinstance(found, dict) else found.as_dict()
    text = json.dumps(finite(data), indent=2, allow_nan=False) if as_json else str(found)
    sys.stdout.write(f"{text}\n" if text else "")
    return int(getattr(found, "code", 0))


def summary_of(place: str) -> str:
    """Return the first line of the docstring of a function at `module:name`."""
    # Read, not imported: some commands import torch and lm-eval, seconds for a line of text.
    module, _, name = place.partition(":")
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, f"no module {module!r}"
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return (ast.get_docstring(node) or "").split("\n")[0]
    return ""
