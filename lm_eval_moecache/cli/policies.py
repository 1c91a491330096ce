"""What `moecache policies` lists and explains."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from lm_eval_moecache.algorithms.policy import choice_text, load_policy, policy_names, unmangle
from lm_eval_moecache.algorithms.registry import (
    AXES,
    algorithm_names,
    find_algorithm,
    parameters_of,
)
from lm_eval_moecache.records.command import Report, listed, wrapped
from lm_eval_moecache.records.files import task_configs_dir
from lm_eval_moecache.records.hardware import profile_names
from lm_eval_moecache.records.numbers import unknown_name_error

_LEAD = 30


def policies(
    name: str | None = None,
    *,
    axis: Literal["routing", "prefetch", "eviction", "miss"] | None = None,
    all: bool = False,
) -> Report:
    """List compositions and algorithms, or explain one: its parameters, defaults and source.

    Args:
        name: explain this composition or algorithm
        axis: the algorithms of one axis, with a summary
        all: include parameters and sources of all algorithms
    """
    axes = AXES if axis is None else (axis,)
    if name is not None:
        explanation = explain(name, axes)
        return Report(explanation, lambda: _explained(explanation))
    listing = collect(axes)
    if all or axis is not None:
        return Report(listing, lambda: _in_full(listing, with_sources=all))
    return Report(listing, lambda: _in_short(listing))


# --- listing ---


def collect(axes: Sequence[str] = AXES) -> dict[str, Any]:
    """Return all compositions and the algorithms of these axes, as `--json` prints them."""
    return {
        "task_configs": str(task_configs_dir()),
        "hardware": profile_names(),
        "compositions": [load_policy(name).as_dict() for name in policy_names()],
        "algorithms": {axis: [_entry(axis, n) for n in algorithm_names(axis)] for axis in axes},
    }


def _entry(axis: str, name: str) -> dict[str, Any]:
    algorithm = find_algorithm(axis, name)
    return {
        "name": name,
        "parameters": {key: default for key, default, _ in _parameters(algorithm)},
        "source": algorithm.source,
        "summary": (inspect.getdoc(algorithm) or "").split("\n")[0],
    }


def _parameters(algorithm: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield each parameter's name, default (None where it has none) and annotation."""
    for key, parameter in parameters_of(algorithm).items():
        default = None if parameter.default is parameter.empty else parameter.default
        kind = inspect.formatannotation(parameter.annotation).replace("typing.", "")
        yield unmangle(key), default, kind


def _in_short(listing: Mapping[str, Any]) -> str:
    """Return the names alone, with a pointer to `moecache policies NAME`."""
    named = {"policy": listing["compositions"], **listing["algorithms"]}
    rows = {key: [each["name"] for each in entries] for key, entries in named.items()}
    lines = []
    for key, names in {**rows, "hardware": listing["hardware"]}.items():
        lines += [f"{key}=", *wrapped(", ".join(names), 2), ""]
    lines += ["`moecache policies NAME` explains one, `--axis AXIS` summarises those of an"]
    lines += ["axis, `--all` lists everything with parameters and sources."]
    return "\n".join([*lines, f"Our tasks: --include_path {listing['task_configs']}", ""])


def _in_full(listing: Mapping[str, Any], with_sources: bool) -> str:
    lines = []
    if with_sources:
        lines += ["Compositions (policy=NAME)", ""]
        for policy in listing["compositions"]:
            choices = " + ".join(choice_text(axis, policy[axis]) for axis in AXES)
            lines += listed([(policy["name"], f"{choices}. {policy['source']}")], _LEAD)
        lines.append("")
    for axis, algorithms in listing["algorithms"].items():
        lines += [f"Algorithms: {axis} ({axis}=NAME, {axis}.PARAMETER=VALUE)", ""]
        for algorithm in algorithms:
            text = algorithm["summary"]
            if with_sources:
                defaults = ", ".join(f"{k}={v}" for k, v in algorithm["parameters"].items())
                text += f" {defaults or 'No parameters'}. {algorithm['source']}"
            lines += listed([(algorithm["name"], text)], _LEAD)
        lines.append("")
    return "\n".join(lines)


# --- explaining one name ---


def explain(name: str, axes: Sequence[str] = AXES) -> dict[str, Any]:
    """Return the algorithms of this name on these axes, and the composition with its algorithms."""
    algorithms = [_explain(axis, name, {}) for axis in axes if name in algorithm_names(axis)]
    composition = None
    if name in policy_names():
        policy = load_policy(name)
        composition = policy.as_dict()
        parts = [(axis, getattr(policy, axis).name) for axis in axes]
        algorithms += [_explain(a, n, composition[a]) for a, n in parts if n != name]
    elif not algorithms:
        names = {*policy_names(), *(n for axis in axes for n in algorithm_names(axis))}
        raise unknown_name_error("policies", name, names, "`moecache policies`")
    return {"composition": composition, "algorithms": algorithms}


def _explain(axis: str, name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    algorithm = find_algorithm(axis, name)
    doc = inspect.getdoc(algorithm) or ""
    parameters = [
        {"name": key, "default": default, "value": overrides.get(key), "type": kind}
        | {"meaning": meaning_of(key, doc)}
        for key, default, kind in _parameters(algorithm)
    ]
    about = {"source": algorithm.source, "description": doc}
    return {"axis": axis, "name": name, **about, "parameters": parameters}


def meaning_of(parameter: str, doc: str) -> str:
    """Return the sentences of a docstring on a parameter: those that quote `name`, else any."""
    text = " ".join(doc.split())
    # Do not split inside brackets or after an abbreviation such as "et al.".
    sentences = re.split(r"(?<=[.;])(?<!et al\.)(?<!e\.g\.)(?<!eq\.)(?<!sec\.) (?![^(]*\))", text)
    quoted = re.compile(rf"`(?:\w+\.)?{re.escape(parameter)}\b[^`]*`")
    plain = re.compile(rf"(?<![\w`]){re.escape(parameter)}(?![\w`])")
    for form in (quoted, plain):
        mentions = [sentence for sentence in sentences if form.search(sentence)]
        if mentions:
            return " ".join(mentions).replace("Parameters: ", "")
    return ""


def _explained(explanation: Mapping[str, Any]) -> str:
    lines = []
    if (composition := explanation["composition"]) is not None:
        lines += wrapped(f"policy={composition['name']}: {composition['source']}")
        lines += [f"phases={composition['phases']}", ""]
    for algorithm in explanation["algorithms"]:
        axis = algorithm["axis"]
        lines += [*wrapped(f"{axis}={algorithm['name']}   ({algorithm['source']})"), ""]
        for paragraph in algorithm["description"].split("\n\n"):
            lines += [*wrapped(" ".join(paragraph.split()), 2), ""]
        for parameter in algorithm["parameters"]:
            value, default = parameter["value"], parameter["default"]
            current = "" if value is None or value == default else f", here {value}"
            lines.append(f"  {axis}.{parameter['name']}={default}{current}   {parameter['type']}")
            lines += [*wrapped(parameter["meaning"], 6), ""]
    return "\n".join(lines).rstrip() + "\n"
