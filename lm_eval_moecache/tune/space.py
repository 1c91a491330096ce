"""The search space: which algorithms and parameters, and in which ranges (`space.yaml`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from lm_eval_moecache.algorithms.policy import unmangle
from lm_eval_moecache.algorithms.registry import find_algorithm, parameters_of
from lm_eval_moecache.records.files import read_yaml
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.numbers import plain_number, unknown_name_error
from lm_eval_moecache.records.schemas import Schema, check

DEFAULT_SPACE = Path(__file__).with_name("space.yaml")
MOST_CHOICES = 1000
SIZES = ("top_k", "num_experts")
"""Sizes of the model that may stand for numbers."""


@dataclass(frozen=True, slots=True)
class Space:
    """`axes[axis][algorithm][parameter]` is a list of choices or a range."""

    axes: Mapping[str, Mapping[str, Mapping[str, Any]]]

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Draw one composition from an Optuna trial, as the overrides of `load_policy`."""
        overrides: dict[str, Any] = {}
        for axis, algorithms in self.axes.items():
            name = trial.suggest_categorical(axis, list(algorithms))
            overrides[axis] = name
            for parameter, values in algorithms[name].items():
                # The algorithm is part of the name: two algorithms may share a parameter's name.
                value = _suggest(trial, f"{axis}.{name}.{parameter}", values)
                overrides[f"{axis}.{parameter}"] = value
        return overrides

    def fit(self, geometry: Geometry) -> Space:
        """Return the space with the names of sizes (`top_k`, ...) replaced by the model's."""
        sizes = {name: getattr(geometry, name) for name in SIZES}

        def fitted(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: fitted(inner) for key, inner in value.items()}
            return sizes.get(value, value) if isinstance(value, str) else value

        return Space(fitted(self.axes))

    @property
    def max_depth(self) -> int:
        """The furthest lookahead of the space's prefetchers, in layers."""
        reach = 1
        for parameters in self.axes["prefetch"].values():
            depth = parameters.get("depth", [1])
            reach = max(reach, *map(int, [depth["high"]] if isinstance(depth, dict) else depth))
        return reach


def read_space(path: Path) -> Space:
    """Read a space file. Raises ValueError naming what is unknown or malformed."""
    what = f"space={str(path)!r}"
    axes = check(SpaceFile, read_yaml(path, what), what).model_dump()
    for axis, algorithms in axes.items():
        for name, parameters in algorithms.items():
            known = [unmangle(n) for n in parameters_of(find_algorithm(axis, name))]
            for parameter in parameters:
                if parameter not in known:
                    raise unknown_name_error(f"space: {axis}.{name}: parameter", parameter, known)
    return Space(axes)


def _suggest(trial: Any, name: str, values: Any) -> Any:
    if isinstance(values, list):
        return trial.suggest_categorical(name, values)
    low, high, log = values["low"], values["high"], bool(values.get("log", False))
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(name, low, high, log=log)
    return trial.suggest_float(name, float(low), float(high), log=log)


def _values(value: object) -> object:
    choices = value if isinstance(value, list) else []
    plain = (isinstance(n, (str, bool)) or plain_number(n) is not None for n in choices)
    if 0 < len(choices) <= MOST_CHOICES and all(plain):
        return value
    if isinstance(value, dict) and {"low", "high"} <= set(value) <= {"low", "high", "log"}:
        ends, log = [value["low"], value["high"]], value.get("log", False)
        numbers = [n for n in ends if not isinstance(n, str) and plain_number(n) is not None]
        num_ends = len(numbers) + sum(end in SIZES for end in ends)
        is_range = num_ends == 2 and numbers == sorted(numbers)
        if is_range and isinstance(log, bool) and not (log and min(numbers, default=1) <= 0):
            return value
    raise ValueError(
        "must be a list of choices, or `low` and `high` (and `log: true`, above 0) as numbers or "
        f"{' or '.join(SIZES)}, low not above high"
    )


def _algorithms(value: object) -> object:
    if not isinstance(value, dict) or not value:
        raise ValueError("must map algorithms to their parameters")
    return {name: {} if parameters is None else parameters for name, parameters in value.items()}


Values = Annotated[Any, BeforeValidator(_values)]
Algorithms = Annotated[dict[str, dict[str, Values]], BeforeValidator(_algorithms)]


class SpaceFile(Schema):
    """A search space: the algorithms of each axis, and the range of each parameter."""

    routing: Algorithms
    prefetch: Algorithms
    eviction: Algorithms
    miss: Algorithms
