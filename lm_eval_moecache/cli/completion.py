"""Print a script that completes commands and options: `eval "$(moecache completion bash)"`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.main import command, commands, parser_of, summary_of

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help=" or ".join(SHELLS))


def run(arguments: Namespace) -> int:
    # Imported late, like all the commands: only `completion` itself waits for them.
    import shtab

    sys.stdout.write(shtab.complete(whole_parser(), shell=arguments.shell) + "\n")
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Return one argparse parser with every command as a subparser, with all its options."""
    parser = argparse.ArgumentParser(prog="moecache")
    parser.add_argument("--version", action="store_true", help="print the version")
    subparsers = parser.add_subparsers()
    for name, path in commands().items():
        subparser = subparsers.add_parser(
            name, help=summary_of(path).replace("%", "%%"), add_help=False
        )
        for action in _parser_of(name)._actions:
            # Escaped, so that argparse fills in no default or type: a shell shows plain text.
            action.help = (action.help or "").replace("%%", "%").replace("%", "%%")
            subparser._add_action(action)
    return parser


def _parser_of(name: str) -> Any:
    module = command(name)
    if name == "eval":
        from lm_eval._cli.harness import HarnessCLI

        return HarnessCLI()._subparsers.choices["run"]
    if name == "replay":
        return module.parser()
    if hasattr(module, "add_arguments"):
        return parser_of(name)
    # A command that parses by itself: only the actions of `profile` are listed.
    parser = argparse.ArgumentParser(add_help=False)
    if name == "profile":
        parser.add_argument("artifact", choices=list(module.actions()))
    return parser
