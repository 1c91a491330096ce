"""Print a script that completes commands and options: `eval "$(moecache completion bash)"`."""

from __future__ import annotations

import argparse
import importlib
import sys

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.main import command_names, parser_of, summary_of

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help=" or ".join(SHELLS))


def run(arguments: Namespace) -> int:
    # Imported late, as all the commands are: only who asks for a script waits for them.
    import shtab

    sys.stdout.write(shtab.complete(whole_parser(), shell=arguments.shell) + "\n")
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Return one plain parser with every command below it, and all of their options."""
    whole = argparse.ArgumentParser(prog="moecache")
    whole.add_argument("--version", action="store_true", help="print the version")
    below = whole.add_subparsers()
    for name in command_names():
        plain = below.add_parser(name, help=summary_of(name).replace("%", "%%"), add_help=False)
        for action in _parser_of(name)._actions:
            # What argparse would fill in is left out, and so is the type: a shell has text alone.
            action.help = (action.help or "").replace("%%", "%").replace("%", "%%")
            plain._add_action(action)
    return whole


def _parser_of(name: str) -> argparse.ArgumentParser:
    module = importlib.import_module(f"lm_eval_moecache.cli.{name}")
    if name == "eval":
        from lm_eval._cli.harness import HarnessCLI

        run: argparse.ArgumentParser = HarnessCLI()._subparsers.choices["run"]
        return run
    if name == "replay":
        replay: argparse.ArgumentParser = module.parser()
        return replay
    if hasattr(module, "add_arguments"):
        return parser_of(name)
    # A command with actions of its own: of those of `profile` the names.
    plain = argparse.ArgumentParser(add_help=False)
    if name == "profile":
        plain.add_argument("artifact", choices=module.action_names())
    return plain
