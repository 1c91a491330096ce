"""Entry point of `moecache`: finds the subcommand's module and hands it its arguments.

A subcommand is a module of this folder with a docstring (its help), `add_arguments(parser)` and
`run(arguments)`, which returns the exit code. A module with `run_raw(argv)` parses for itself.
Only the chosen module is imported, so that `moecache replay` starts without torch.
"""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.files import check_writable, read_yaml
from lm_eval_moecache.records.numbers import MOST_COUNT, is_plain, read_number, shown
from lm_eval_moecache.records.paths import check_place

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


RESUMING = {
    "eval": "Recorded traces hold the finished requests; the same command begins anew.",
    "replay": "Nothing was written; the same command begins anew.",
    "reproduce": "Finished runs are kept: the same command goes on with the others.",
    "sweep": "Finished runs are kept: the same command goes on with the others.",
    "tune": "The study and its runs are kept: the same command goes on with the search.",
}
"""What an interrupt leaves of a command, and how to go on."""
WRITTEN = ("out", "output", "plot", "work")
"""Options that name what a command writes."""
_HINTS = (
    "`moecache COMMAND --help` shows a command's options, `moecache --version` the\n"
    "version, `moecache completion bash` (zsh, tcsh) a script that completes both."
)
_NO_COMMANDS = ("main", "parsers")
NOTHING_KEPT = "The same command begins anew."


def command_names() -> list[str]:
    folder = importlib.import_module("lm_eval_moecache.cli").__path__
    return sorted(m.name for m in pkgutil.iter_modules(folder) if m.name not in _NO_COMMANDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; what a user got wrong is said in one line, with exit code 2."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        code = _run(name, rest)
        sys.stdout.flush()
        return code
    except ValueError as error:
        said, code = str(error), 2
    except BrokenPipeError:
        # Who read has enough, as in `| head`. What waits to be written would fail again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141  # as of a process that SIGPIPE has ended
    except OSError as error:
        # What the machine does not let us do: a full disk, a folder that may not be written.
        reason = error.strerror or str(error)
        place = f"{error.filename}: " if error.filename is not None and error.strerror else ""
        said, code = f"{place}{reason}", 2
    except KeyboardInterrupt:
        said, code = f"interrupted. {RESUMING.get(name, NOTHING_KEPT)}", 130
    sys.stderr.write(f"moecache {name}: {said}\n")
    return code


def _run(name: str, argv: list[str]) -> int:
    if name in ("-h", "--help"):
        width = shutil.get_terminal_size((80, 24)).columns - 1
        lines = ["usage: moecache COMMAND [options]", ""]
        for each in command_names():
            lead, rest = f"  {each:10s} ", " " * 13
            text = summary_of(each)
            lines += textwrap.wrap(text, width, initial_indent=lead, subsequent_indent=rest)
        sys.stdout.write("\n".join([*lines, "", _HINTS, ""]))
        return 0
    if name == "--version" and not argv:
        sys.stdout.write(f"moecache {version('lm-eval-moecache')}\n")
        return 0
    if name not in command_names():
        raise unknown("command", name, command_names())
    module = importlib.import_module(f"lm_eval_moecache.cli.{name}")
    if hasattr(module, "run_raw"):
        return int(module.run_raw(argv))
    return int(module.run(parsed(parser_of(name), argv)))


def parser_of(name: str) -> ArgumentParser:
    """Return the parser of a command that does not parse for itself."""
    from lm_eval_moecache.cli.parsers import make_parser

    module = importlib.import_module(f"lm_eval_moecache.cli.{name}")
    parser = make_parser(f"moecache {name}", module.__doc__)
    module.add_arguments(parser)
    return parser


def parsed(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """Parse the options of a command. ValueError names a number or a file that none can be.

    OSError says where nothing can be written, before the work whose result would go there.
    """
    for word, after in zip(argv, [*argv[1:], ""], strict=False):
        # Looked at before jsonargparse reads it, to whom a file with exploding aliases is a file.
        file = after if word == "--config" else word.partition("--config=")[2]
        if file and not file.startswith("-"):
            what = f"config={file!r}"
            found = read_yaml(file, what)
            if not isinstance(found, dict):
                raise ValueError(f"{what} must hold a mapping of options; it holds {shown(found)}.")
    arguments = parser.parse_args(list(argv))
    check_plain_numbers(argv, arguments)
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


def check_plain_numbers(argv: Sequence[str], arguments: Namespace) -> None:
    """Refuse what YAML and Python take for numbers and readers do not: `0x10`, `010`, `1_000`."""
    key = ""
    for word in argv:
        option, equals, text = word.partition("=")
        if option.startswith("--"):
            key = option[2:].replace("-", "_")
            if not equals:
                continue
        else:
            text = word
        value = vars(arguments).get(key)
        values = value if isinstance(value, list) else [value]
        numeric = all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in values)
        parts = [part.strip() for part in text.strip("[] ").split(",")]
        digits = [part for part in parts if any(map(str.isdigit, part))]
        if numeric and not all(map(is_plain, digits)):
            raise ValueError(f"--{key}={shown(text)} must be a number in plain digits.")
        if equals or not isinstance(value, list):
            key = ""  # What follows is no value of it.


def summary_of(name: str) -> str:
    # Read, not imported: some commands bring torch and lm-eval, seconds for a line of text.
    module = name if "." in name else f"cli.{name}"
    found = find_spec(f"lm_eval_moecache.{module}")
    assert found is not None and found.origin is not None, f"no module for {name!r}"
    source = Path(found.origin).read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]


if __name__ == "__main__":
    raise SystemExit(main())
