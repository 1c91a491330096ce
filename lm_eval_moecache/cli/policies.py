"""List compositions and algorithms, or explain one: its parameters, defaults and source."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.algorithms.policy import load_policy, policy_names, unmangle
from lm_eval_moecache.algorithms.registry import (
    AXES,
    algorithm_names,
    find_algorithm,
    parameters_of,
)
from lm_eval_moecache.cli.parsers import listed, print_result, terminal_width, wrapped
from lm_eval_moecache.records.hardware import profile_names
from lm_eval_moecache.records.paths import task_configs_dir
from lm_eval_moecache.report.explain import as_text, explain

_LEAD = 24


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="explain this composition or algorithm")
    parser.add_argument("--axis", choices=AXES, help="the algorithms of one axis, with a summary")
    parser.add_argument("--all", action="store_true", help="parameters and sources of everything")


def run(arguments: Namespace) -> int:
    axes = AXES if arguments.axis is None else (arguments.axis,)
    if arguments.name is not None:
        found = explain(arguments.name, axes)
        return print_result(arguments.json, found, as_text(found, terminal_width() - 1))
    listing, in_full = collect(axes), arguments.all or arguments.axis
    text = _in_full(listing, with_sources=arguments.all) if in_full else _in_short(listing)
    return print_result(arguments.json, listing, text)


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


def _in_short(listing: Mapping[str, Any]) -> str:
    """Return the names alone: what each is, `moecache policies NAME` says."""
    rows = [("policy=", [policy["name"] for policy in listing["compositions"]])]
    rows += [(f"{axis}=", [a["name"] for a in found]) for axis, found in _axes(listing)]
    rows += [("hardware=", listing["hardware"])]
    lines = []
    for key, names in rows:
        lines += [key, *wrapped(", ".join(names), 2), ""]
    lines += ["`moecache policies NAME` explains one, `--axis AXIS` summarises those of an"]
    lines += ["axis, `--all` lists everything with parameters and sources."]
    return "\n".join([*lines, f"Our tasks: --include_path {listing['task_configs']}", ""])


def _in_full(listing: Mapping[str, Any], with_sources: bool) -> str:
    lines = []
    if with_sources:
        lines += ["Compositions (policy=NAME)", ""]
        for policy in listing["compositions"]:
            choices = " + ".join(_shown(policy[axis]) for axis in AXES)
            lines += listed([(policy["name"], f"{choices}. {policy['source']}")], _LEAD)
        lines.append("")
    for axis, algorithms in _axes(listing):
        lines += [f"Algorithms: {axis} ({axis}=NAME, {axis}.PARAMETER=VALUE)", ""]
        for found in algorithms:
            text = found["summary"]
            if with_sources:
                defaults = ", ".join(f"{k}={v}" for k, v in found["parameters"].items())
                text += f" {defaults or 'No parameters'}. {found['source']}"
            lines += listed([(found["name"], text)], _LEAD)
        lines.append("")
    return "\n".join(lines)


def _axes(listing: Mapping[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    return list(listing["algorithms"].items())


def _shown(choice: Mapping[str, Any]) -> str:
    parameters = {k: v for k, v in choice.items() if k not in ("name", "class_path")}
    name = str(choice.get("name", choice.get("class_path")))
    if not parameters:
        return name
    return f"{name}({', '.join(f'{k}={v}' for k, v in parameters.items())})"
