"""Entry point of `moecache`: finds the subcommand's module and hands it its arguments.

A subcommand is a module of this folder with a docstring (its help), `add_arguments(parser)` and
`run(arguments)`, which returns the exit code. A module with `run_raw(argv)` parses for itself.
Only the chosen module is imported, so that `moecache replay` starts without torch. Below: what
commands parse and print with.
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
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from lm_eval_moecache.records.files import check_place, check_writable, read_yaml
from lm_eval_moecache.records.numbers import MOST_COUNT, read_number, shown, unknown

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
NOTHING_KEPT = "The same command begins anew."


def command_names() -> list[str]:
    folder = importlib.import_module("lm_eval_moecache.cli").__path__
    return sorted(m.name for m in pkgutil.iter_modules(folder) if m.name != "main")


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
        rows = [(each, summary_of(each)) for each in command_names()]
        lines = ["usage: moecache COMMAND [options]", "", *listed(rows, 13), "", _HINTS, ""]
        sys.stdout.write("\n".join(lines))
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


def summary_of(name: str) -> str:
    # Read, not imported: some commands bring torch and lm-eval, seconds for a line of text.
    module = name if "." in name else f"cli.{name}"
    found = find_spec(f"lm_eval_moecache.{module}")
    assert found is not None and found.origin is not None, f"no module for {name!r}"
    source = Path(found.origin).read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]


# --- jsonargparse with help pages that fit a terminal ---


class PlainHelp(DefaultHelpFormatter):
    """Says of an option what it does and its default, once; a type where the help names none."""

    def _expand_help(self, action: Action) -> str:
        text = (action.help or "").replace("%%", "%")
        default = action.default
        if default in (None, False, SUPPRESS) or not action.option_strings or "default" in text:
            return text
        return f"{text} (default: {default})"


def make_parser(prog: str, description: str | None, epilog: str | None = None) -> ArgumentParser:
    """Return the parser of a command, with the options that all of them have."""
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


def print_result(as_json: bool, found: Any, text: str) -> int:
    """Print what a command has found in the form asked for; return its exit code."""
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if as_json else text)
    return 0


def terminal_width() -> int:
    """Return how many columns a line may have: COLUMNS, the terminal's, or 80."""
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
    """Return lines of names and what they are, wrapped to the terminal beside `lead` columns."""
    lines: list[str] = []
    for name, text in rows:
        first, *others = wrapped(text, lead)
        lines += [f"  {name:{lead - 3}s} {first.lstrip()}", *others]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
