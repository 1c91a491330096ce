"""Entry point of `moecache`: finds the subcommand's module and hands it its arguments.

A subcommand is a module of this folder with a docstring (its help), `add_arguments(parser)` and
`run(arguments)`, which returns the exit code. A module with `run_raw(argv)` parses for itself.
Only the chosen module is imported, so that `moecache replay` starts without torch.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence

from lm_eval_moecache.records.errors import unknown


def command_names() -> list[str]:
    folder = importlib.import_module("lm_eval_moecache.cli").__path__
    return sorted(m.name for m in pkgutil.iter_modules(folder) if m.name != "main")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; what a user got wrong is said in one line, with exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return 0
    name, rest = arguments[0], arguments[1:]
    try:
        if name not in command_names():
            raise unknown("command", name, command_names())
        return _run(name, rest)
    except (ValueError, FileNotFoundError) as error:
        sys.stderr.write(f"moecache {name}: {error}\n")
        return 2


def _run(name: str, argv: list[str]) -> int:
    module = importlib.import_module(f"lm_eval_moecache.cli.{name}")
    if hasattr(module, "run_raw"):
        return int(module.run_raw(argv))
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog=f"moecache {name}", description=module.__doc__)
    parser.add_argument("--config", action="config", help="read options from a YAML file")
    parser.add_argument("--json", action="store_true", help="print machine-readable output")
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(argv)))


def _overview() -> str:
    lines = ["usage: moecache COMMAND [options]", ""]
    for name in command_names():
        summary = (importlib.import_module(f"lm_eval_moecache.cli.{name}").__doc__ or "").split(
            "\n"
        )[0]
        lines.append(f"  {name:10s} {summary}")
    return "\n".join([*lines, "", "`moecache COMMAND --help` shows a command's options.", ""])


if __name__ == "__main__":
    raise SystemExit(main())
