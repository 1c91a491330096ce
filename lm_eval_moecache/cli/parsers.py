"""The parsers of all commands: jsonargparse with help pages that fit a terminal."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from argparse import SUPPRESS, Action
from collections.abc import Iterable
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter


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
