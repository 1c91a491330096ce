"""Make offline artifacts: buddy lists, predictors, a profile of this machine, and others."""

from __future__ import annotations

import importlib
import sys

from lm_eval_moecache.cli.main import (
    listed,
    make_parser,
    modules_of,
    parsed,
    print_result,
    summary_of,
    wrapped,
)
from lm_eval_moecache.records.numbers import unknown_name_error


def run_raw(argv: list[str]) -> int:
    """Pass the arguments to the action's module: `add_arguments(parser)`, `run(arguments)`.

    `run` returns what is printed with `--json`, and the text that is printed without.
    """
    known = actions()
    if not argv or argv[0] in ("-h", "--help"):
        head = ["usage: moecache profile WHAT [options]", "", *wrapped(str(__doc__)), ""]
        rows = [(name, summary_of(module)) for name, module in known.items()]
        last = ["", "`moecache profile WHAT --help` has its options.", ""]
        sys.stdout.write("\n".join([*head, *listed(rows, 16), *last]))
        return 0
    if argv[0] not in known:
        raise unknown_name_error("profile", argv[0], list(known))
    module = importlib.import_module(known[argv[0]])
    parser = make_parser(f"moecache profile {argv[0]}", module.__doc__)
    module.add_arguments(parser)
    arguments = parsed(parser, argv[1:])
    return print_result(arguments.json, *module.run(arguments))


def actions() -> dict[str, str]:
    """Return name -> module of the actions of `moecache profile`: ours, and those packages add."""
    return modules_of("profiling", "profile")
