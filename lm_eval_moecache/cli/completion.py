"""What `moecache completion` prints: one parser of every command, in a shell's words."""

from __future__ import annotations

import argparse
from typing import Any, Literal

from lm_eval_moecache import api
from lm_eval_moecache.cli.main import summary_of
from lm_eval_moecache.cli.parser import parser_of
from lm_eval_moecache.records.command import Report


def completion(shell: Literal["bash", "zsh", "tcsh"]) -> Report:
    """Print a script that completes commands and options: `eval "$(moecache completion bash)"`.

    Args:
        shell: bash, zsh or tcsh
    """
    # Imported late, like all the commands: only `completion` itself waits for them.
    import shtab

    script = shtab.complete(whole_parser(), shell=shell)
    return Report({"script": script}, script)


def whole_parser() -> argparse.ArgumentParser:
    """Return one argparse parser with every command as a subparser, with all its options."""
    parser = argparse.ArgumentParser(prog="moecache")
    parser.add_argument("--version", action="store_true", help="print the version")
    subparsers = parser.add_subparsers()
    places = api.command_places()
    for name in api.command_names():
        about = api.GROUPS.get(name) or summary_of(places[name])
        subparser = subparsers.add_parser(name, help=about.replace("%", "%%"), add_help=False)
        for action in _actions_of(name, places):
            # Escaped, so that argparse fills in no default or type: a shell shows plain text.
            action.help = (action.help or "").replace("%%", "%").replace("%", "%%")
            subparser._add_action(action)
    return parser


def _actions_of(name: str, places: dict[str, str]) -> list[Any]:
    if name == "eval":
        from lm_eval._cli.harness import HarnessCLI

        return list(HarnessCLI()._subparsers.choices["run"]._actions)
    if name in api.GROUPS:
        parser = argparse.ArgumentParser(add_help=False)
        actions = [each.partition(" ")[2] for each in places if each.startswith(f"{name} ")]
        parser.add_argument("what", choices=actions)
        return parser._actions
    return list(parser_of(name, api.function_at(places[name]))._actions)
