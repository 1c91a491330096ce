"""What `moecache policies NAME` says of one composition or algorithm."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_moecache.algorithms.policy import load_policy, policy_names, unmangle
from lm_eval_moecache.algorithms.registry import (
    AXES,
    algorithm_names,
    find_algorithm,
    parameters_of,
)
from lm_eval_moecache.records.errors import unknown


def explain(name: str, axes: Sequence[str] = AXES) -> dict[str, Any]:
    """Return the algorithms of this name on these axes, and the composition with its own."""
    algorithms = [_algorithm(axis, name) for axis in axes if name in algorithm_names(axis)]
    composition = None
    if name in policy_names():
        policy = load_policy(name)
        composition = policy.as_dict()
        parts = [(axis, getattr(policy, axis).name) for axis in axes]
        algorithms += [_algorithm(a, n, composition[a]) for a, n in parts if n != name]
    elif not algorithms:
        known = {*policy_names(), *(n for axis in axes for n in algorithm_names(axis))}
        raise unknown("policies", name, known)
    return {"composition": composition, "algorithms": algorithms}


def _algorithm(axis: str, name: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    algorithm = find_algorithm(axis, name)
    doc = inspect.getdoc(algorithm) or ""
    return {
        "axis": axis,
        "name": name,
        "source": algorithm.source,
        "description": doc,
        "parameters": [
            {
                "name": unmangle(key),
                "default": None if parameter.default is parameter.empty else parameter.default,
                "value": (given or {}).get(unmangle(key)),
                "type": _type(parameter.annotation),
                "meaning": meaning_of(unmangle(key), doc),
            }
            for key, parameter in parameters_of(algorithm).items()
        ],
    }


def _type(annotation: Any) -> str:
    return inspect.formatannotation(annotation).replace("typing.", "")


def meaning_of(parameter: str, doc: str) -> str:
    """Return the sentences of a docstring that speak of a parameter: by `name` where they can."""
    text = " ".join(doc.split())
    # Not inside brackets.
    # Nor after an abbreviation: "HOBBIT et al." goes on.
    sentences = re.split(r"(?<=[.;])(?<!et al\.)(?<!e\.g\.)(?<!eq\.)(?<!sec\.) (?![^(]*\))", text)
    quoted = re.compile(rf"`(?:\w+\.)?{re.escape(parameter)}\b[^`]*`")
    plain = re.compile(rf"(?<![\w`]){re.escape(parameter)}(?![\w`])")
    for form in (quoted, plain):
        found = [sentence for sentence in sentences if form.search(sentence)]
        if found:
            return " ".join(found).replace("Parameters: ", "")
    return ""


def as_text(found: Mapping[str, Any], width: int = 80) -> str:
    """Return the explanation for a terminal of this many columns."""
    lines = []
    if (composition := found["composition"]) is not None:
        lines += [textwrap.fill(f"policy={composition['name']}: {composition['source']}", width)]
        lines += [f"phases={composition['phases']}", ""]
    for algorithm in found["algorithms"]:
        head = f"{algorithm['axis']}={algorithm['name']}   ({algorithm['source']})"
        lines += [textwrap.fill(head, width, subsequent_indent="  "), ""]
        for paragraph in algorithm["description"].split("\n\n"):
            lines += [textwrap.fill(" ".join(paragraph.split()), width, **_indent(2)), ""]
        for parameter in algorithm["parameters"]:
            lines += _parameter(algorithm["axis"], parameter, width)
    return "\n".join(lines).rstrip() + "\n"


def _parameter(axis: str, parameter: Mapping[str, Any], width: int) -> list[str]:
    value, default = parameter["value"], parameter["default"]
    here = "" if value is None or value == default else f", here {value}"
    head = f"  {axis}.{parameter['name']}={default}{here}   {parameter['type']}"
    return [head, textwrap.fill(parameter["meaning"], width, **_indent(6)), ""]


def _indent(width: int) -> dict[str, Any]:
    return {"initial_indent": " " * width, "subsequent_indent": " " * width}
