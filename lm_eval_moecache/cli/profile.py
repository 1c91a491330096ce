"""Make offline artifacts: buddy lists, predictors, a profile of this machine, and others."""

from __future__ import annotations

import importlib
import pkgutil
import sys

from lm_eval_moecache.cli.main import listed, make_parser, parsed, summary_of, wrapped
from lm_eval_moecache.records.numbers import unknown_name_error

_RUNTIMES = "runtimes"


def run_raw(argv: list[str]) -> int:
    """Pass the arguments to the action's module: `add_arguments(parser)`, `run(arguments)`."""
    names = action_names()
    if not argv or argv[0] in ("-h", "--help"):
        head = ["usage: moecache profile WHAT [options]", "", *wrapped(str(__doc__)), ""]
        rows = [(name, summary_of(_module(name))) for name in names]
        last = ["", "`moecache profile WHAT --help` has its options.", ""]
        sys.stdout.write("\n".join([*head, *listed(rows, 16), *last]))
        return 0
    if argv[0] not in names:
        raise unknown_name_error("profile", argv[0], names)
    module = importlib.import_module(_module(argv[0]))
    parser = make_parser(f"moecache profile {argv[0]}", module.__doc__)
    module.add_arguments(parser)
    return int(module.run(parsed(parser, argv[1:])))


def action_names() -> list[str]:
    """Return the names of all actions of `moecache profile`, sorted."""
    folder = importlib.import_module("lm_eval_moecache.profiling").__path__
    found = [m.name for m in pkgutil.iter_modules(folder) if not m.name.startswith("_")]
    return sorted([*found, _RUNTIMES])


def _module(name: str) -> str:
    return "moecache_lab.runtimes" if name == _RUNTIMES else f"lm_eval_moecache.profiling.{name}"
