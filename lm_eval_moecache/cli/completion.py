"""Print a script that completes commands and options: `eval "$(moecache completion bash)"`."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

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
        plain = below.add_parser(name, help=_safe(summary_of(name)), add_help=False)
        for action in _actions(name):
            # What a shell can complete of an option: its names and its choices.
            choices = None if action.choices is None else [str(choice) for choice in action.choices]
            given: dict[str, Any] = {"help": _safe(action.help), "action": "store_true"}
            if action.nargs != 0:
                many = "*" if action.nargs in ("+", "*") else None
                given |= {"action": "store", "choices": choices, "nargs": many}
            if action.option_strings:
                plain.add_argument(*action.option_strings, **given)
            elif choices is not None:
                plain.add_argument(action.dest, choices=choices)
    return whole


def _actions(name: str) -> list[argparse.Action]:
    if name == "eval":
        from lm_eval._cli.harness import HarnessCLI

        found: list[argparse.Action] = HarnessCLI()._subparsers.choices["run"]._actions
        return found
    module = importlib.import_module(f"lm_eval_moecache.cli.{name}")
    if name == "profile":
        plain = argparse.ArgumentParser(add_help=False)
        plain.add_argument("artifact", choices=module.action_names())
        return plain._actions
    if name == "replay":
        return list(module.parser()._actions)
    # A command with actions of its own has none here.
    return list(parser_of(name)._actions) if hasattr(module, "add_arguments") else []


def _safe(text: str | None) -> str:
    """Drop what argparse would fill in."""
    return (text or "").replace("%", "%%")
