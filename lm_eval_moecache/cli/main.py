"""Entry point of `moecache`: finds the subcommand's module and passes it the arguments.

A subcommand is a module of this folder, or one that a package names by an entry point of the group
`lm_eval_moecache.commands`. It has a docstring (its help), `add_arguments(parser)` and
`run(arguments)`, which returns the exit code. A module with `run_raw(argv)` parses by itself.
Only the chosen module is imported, so that `moecache replay` starts without torch. Below: helpers
with which commands parse and print.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import shutil
import sys
import textwrap
from argparse import SUPPRESS, Action
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from lm_eval_moecache.records import plugins
from lm_eval_moecache.records.files import check_place, check_writable, read_yaml
from lm_eval_moecache.records.numbers import (
    MOST_COUNT,
    finite,
    read_number,
    shown,
    unknown_name_error,
)
from lm_eval_moecache.records.sizes import check_one_word

RESUMING = {
    "eval": "Recorded traces hold the finished requests; the same command starts over.",
    "replay": "Nothing was written; the same command starts over.",
    "reproduce": "Finished runs are kept: the same command runs the others.",
    "sweep": "Finished runs are kept: the same command runs the others.",
    "tune": "The study and its runs are kept: the same command continues the search.",
}
"""What an interrupted command has kept, and how to resume it."""
WRITTEN = ("out", "output", "plot", "report", "work")
"""Options that name a file or folder the command writes."""
_HINTS = (
    "`moecache COMMAND --help` shows a command's options, `moecache --version` the\n"
    "version, `moecache completion bash` (zsh, tcsh) a script that completes both."
)
NOTHING_KEPT = "The same command starts over."


def commands() -> dict[str, str]:
    """Return name -> module of all subcommands, sorted: ours, and those that packages add."""
    found = modules_of("cli", "commands")
    del found["main"]
    return found


def modules_of(folder: str, kind: str) -> dict[str, str]:
    """Return name -> module of a folder of ours and of the entry points of a kind, sorted.

    Raises MoECacheError, naming the package, for a name that is taken.
    """
    package = importlib.import_module(f"lm_eval_moecache.{folder}")
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    own = {name: f"{package.__name__}.{name}" for name in names if name[0] != "_"}
    added = {name: point.value for name, point in plugins.added(kind, own).items()}
    return dict(sorted({**own, **added}.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit code, 2 with a one-line message for a user's error."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        code = _run(name, rest)
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
        message, code = f"interrupted. {RESUMING.get(name, NOTHING_KEPT)}", 130
    sys.stderr.write(f"moecache {name}: {message}\n")
    return code


def _run(name: str, argv: list[str]) -> int:
    if name in ("-h", "--help"):
        rows = [(command, summary_of(module)) for command, module in commands().items()]
        lines = ["usage: moecache COMMAND [options]", "", *listed(rows, 13), "", _HINTS, ""]
        sys.stdout.write("\n".join(lines))
        return 0
    if name == "--version" and not argv:
        sys.stdout.write(f"moecache {version('lm-eval-moecache')}\n")
        return 0
    module = command(name)
    if hasattr(module, "run_raw"):
        return int(module.run_raw(argv))
    return int(module.run(parsed(parser_of(name), argv)))


def command(name: str) -> ModuleType:
    """Return a subcommand's module; ValueError, with the nearest name, where there is none."""
    known = commands()
    if name not in known:
        raise unknown_name_error("command", name, list(known))
    return importlib.import_module(known[name])


def parser_of(name: str) -> ArgumentParser:
    """Return the parser of a command that has no `run_raw`."""
    module = command(name)
    parser = make_parser(f"moecache {name}", module.__doc__)
    module.add_arguments(parser)
    return parser


def parsed(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """Parse a command's options. Raises ValueError for a number or file that cannot be valid.

    Raises OSError where an output cannot be written, before any work is done.
    """
    for word, next_word in zip(argv, [*argv[1:], ""], strict=False):
        # Checked before jsonargparse reads it, which would expand a bomb of YAML aliases.
        file = next_word if word == "--config" else word.partition("--config=")[2]
        if file and not file.startswith("-"):
            what = f"config={file!r}"
            options = read_yaml(file, what)
            if not isinstance(options, dict):
                raise ValueError(
                    f"{what} must hold a mapping of options; it holds {shown(options)}."
                )
    check_one_word(argv)
    arguments = parser.parse_args(list(argv))
    if getattr(arguments, "pretrained", None) is not None:
        check_place("pretrained", arguments.pretrained)
    for key in WRITTEN:
        if getattr(arguments, key, None):
            check_writable(Path(getattr(arguments, key)))
    for key, value in vars(arguments).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                read_number(f"--{key}", number, least=0, most=MOST_COUNT)
    return arguments


def summary_of(module: str) -> str:
    """Return the first line of a module's docstring."""
    # Read, not imported: some commands import torch and lm-eval, seconds for a line of text.
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, f"no module {module!r}"
    source = Path(spec.origin).read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]


# --- jsonargparse, with help pages that fit a terminal ---


class PlainHelp(DefaultHelpFormatter):
    """Shows an option's help with its default, unless the text names it already."""

    def _expand_help(self, action: Action) -> str:
        text = (action.help or "").replace("%%", "%")
        default = action.default
        if default in (None, False, SUPPRESS) or not action.option_strings or "default" in text:
            return text
        return f"{text} (default: {default})"


def make_parser(prog: str, description: str | None, epilog: str | None = None) -> ArgumentParser:
    """Return a command's parser with the options that all commands share."""
    parser = ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=PlainHelp,
        print_config=None,
    )
    parser.add_argument("--config", action="config", help="read options from a YAML file")
    parser.add_argument("--json", action="store_true", help="print machine-readable output")
    return parser


def print_result(as_json: bool, result: Any, text: str) -> int:
    """Print a command's result as JSON or as text; return exit code 0."""
    if as_json:
        text = json.dumps(finite(result), indent=2, allow_nan=False) + "\n"
    sys.stdout.write(text)
    return 0


def terminal_width() -> int:
    """Return the columns of a line: COLUMNS, the terminal's, or 80, but 40 at least."""
    return max(shutil.get_terminal_size((80, 24)).columns, 40)


def wrapped(text: str, indent: int = 0) -> list[str]:
    """Return a paragraph as lines that fit the terminal."""
    lead = " " * indent
    return textwrap.wrap(
        text,
        terminal_width() - 1,
        initial_indent=lead,
        subsequent_indent=lead,
        break_on_hyphens=False,
    )


def listed(rows: Iterable[tuple[str, str]], lead: int) -> list[str]:
    """Return lines of names with their texts, wrapped to the terminal after `lead` columns."""
    lines: list[str] = []
    for name, text in rows:
        first, *others = wrapped(text, lead)
        lines += [f"  {name:{lead - 3}s} {first.lstrip()}", *others]
    return lines


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return lines of cells in columns, each aligned to its side: `<` or `>`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]
