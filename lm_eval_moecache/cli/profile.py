"""Make offline artifacts: a calibrated hardware profile of this machine, and others."""

from __future__ import annotations

import importlib
import pkgutil
import sys

from jsonargparse import ArgumentParser

from lm_eval_moecache.cli.main import parsed
from lm_eval_moecache.records.errors import unknown


def run_raw(argv: list[str]) -> int:
    """Hand the arguments to the action's module: `add_arguments(parser)`, `run(arguments)`."""
    names = action_names()
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(f"usage: moecache profile {{{','.join(names)}}} [options]\n\n{__doc__}\n")
        return 0
    if argv[0] not in names:
        raise unknown("profile", argv[0], names)
    module = importlib.import_module(f"lm_eval_moecache.profiling.{argv[0]}")
    parser = ArgumentParser(prog=f"moecache profile {argv[0]}", description=module.__doc__)
    parser.add_argument("--config", action="config", help="read options from a YAML file")
    parser.add_argument("--json", action="store_true", help="print machine-readable output")
    module.add_arguments(parser)
    return int(module.run(parsed(parser, argv[1:])))


def action_names() -> list[str]:
    folder = importlib.import_module("lm_eval_moecache.profiling").__path__
    return sorted(m.name for m in pkgutil.iter_modules(folder) if not m.name.startswith("_"))
