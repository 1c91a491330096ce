"""List compositions and algorithms, or explain one: its parameters, defaults and source."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.algorithms.policy import load_policy, policy_names, unmangle
from lm_eval_moecache.algorithms.registry import (
    AXES,
    algorithm_names,
    find_algorithm,
    parameters_of,
)
from lm_eval_moecache.records.hardware import profile_names
from lm_eval_moecache.records.paths import task_configs_dir
from lm_eval_moecache.report.explain import as_text, explain


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="explain this composition or algorithm")
    parser.add_argument("--axis", choices=AXES, help="show the algorithms of one axis only")


def run(arguments: Namespace) -> int:
    if arguments.name is not None:
        found = explain(arguments.name, AXES if arguments.axis is None else (arguments.axis,))
        text = json.dumps(found, indent=2) + "\n" if arguments.json else as_text(found)
        sys.stdout.write(text)
        return 0
    listing = collect(AXES if arguments.axis is None else (arguments.axis,))
    if arguments.json:
        sys.stdout.write(json.dumps(listing, indent=2) + "\n")
    else:
        sys.stdout.write(_as_text(listing, arguments.axis))
    return 0


def collect(axes: Sequence[str] = AXES) -> dict[str, Any]:
    """Return what the folders hold (algorithms of these axes only), in the form `--json` prints."""
    return {
        "task_configs": str(task_configs_dir()),
        "hardware": profile_names(),
        "compositions": [load_policy(name).as_dict() for name in policy_names()],
        "algorithms": {
            axis: [_algorithm(axis, name) for name in algorithm_names(axis)] for axis in axes
        },
    }


def _algorithm(axis: str, name: str) -> dict[str, Any]:
    algorithm = find_algorithm(axis, name)
    return {
        "name": name,
        "parameters": {
            unmangle(key): _parameter(parameter)
            for key, parameter in parameters_of(algorithm).items()
        },
        "source": algorithm.source,
        "summary": (inspect.getdoc(algorithm) or "").split("\n")[0],
    }


def _parameter(parameter: inspect.Parameter) -> Any:
    return None if parameter.default is inspect.Parameter.empty else parameter.default


def _as_text(listing: dict[str, Any], axis: str | None) -> str:
    lines = []
    if axis is None:
        lines += ["Compositions (policy=NAME)", ""]
        for policy in listing["compositions"]:
            choices = " + ".join(_shown(policy[a]) for a in AXES)
            lines += [f"  {policy['name']:24s} {choices}", f"  {'':24s} {policy['source']}"]
        lines.append("")
    for name in AXES if axis is None else (axis,):
        lines += [f"Algorithms: {name} ({name}=NAME, {name}.PARAMETER=VALUE)", ""]
        for found in listing["algorithms"][name]:
            defaults = ", ".join(f"{k}={v}" for k, v in found["parameters"].items())
            lines += [f"  {found['name']:20s} {found['summary']}"]
            lines += [f"  {'':20s} {defaults or 'no parameters'}; {found['source']}"]
        lines.append("")
    if axis is None:
        lines += [f"Hardware profiles: {', '.join(listing['hardware'])}"]
        lines += [f"Tasks: --include_path {listing['task_configs']}", ""]
    return "\n".join(lines)


def _shown(choice: dict[str, Any]) -> str:
    parameters = {k: v for k, v in choice.items() if k not in ("name", "class_path")}
    name = str(choice.get("name", choice.get("class_path")))
    if not parameters:
        return name
    return f"{name}({', '.join(f'{k}={v}' for k, v in parameters.items())})"
