"""The search space: which algorithms of each axis, and which of their parameters in what range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.policy import unmangle
from lm_eval_moecache.algorithms.registry import AXES, find_algorithm, parameters_of
from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.files import read_yaml
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.schemas.base import check
from lm_eval_moecache.records.schemas.inputs import SIZES, SpaceFile

DEFAULT_SPACE = Path(__file__).with_name("space.yaml")


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
                # The algorithm is part of the name: two may have a parameter of one name.
                drawn = _suggest(trial, f"{axis}.{name}.{parameter}", values)
                overrides[f"{axis}.{parameter}"] = drawn
        return overrides

    def fit(self, geometry: Geometry) -> Space:
        """Put a model's sizes in the place of their names."""
        sizes = {name: getattr(geometry, name) for name in SIZES}

        def fitted(values: Any) -> Any:
            if isinstance(values, list):
                return values
            return {k: sizes.get(v, v) if isinstance(v, str) else v for k, v in values.items()}

        return Space(
            {
                axis: {
                    name: {p: fitted(values) for p, values in parameters.items()}
                    for name, parameters in algorithms.items()
                }
                for axis, algorithms in self.axes.items()
            }
        )

    @property
    def max_depth(self) -> int:
        """The furthest that a prefetcher of the space looks ahead, in layers."""
        reach = 1
        for parameters in self.axes["prefetch"].values():
            depth = parameters.get("depth", [1])
            reach = max(reach, *map(int, [depth["high"]] if isinstance(depth, dict) else depth))
        return reach


def read_space(path: Path) -> Space:
    """Read a space file. Raises ValueError naming what is unknown or malformed."""
    what = f"space={str(path)!r}"
    found = check(SpaceFile, read_yaml(path, what), what)
    axes: dict[str, dict[str, dict[str, Any]]] = {axis: dict(getattr(found, axis)) for axis in AXES}
    for axis in AXES:
        for name, parameters in axes[axis].items():
            known = [unmangle(n) for n in parameters_of(find_algorithm(axis, name))]
            for parameter in parameters:
                if parameter not in known:
                    raise unknown(f"space: {axis}.{name}: parameter", parameter, known)
    return Space(axes)


def _suggest(trial: Any, name: str, values: Any) -> Any:
    if isinstance(values, list):
        return trial.suggest_categorical(name, values)
    low, high, log = values["low"], values["high"], bool(values.get("log", False))
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(name, low, high, log=log)
    return trial.suggest_float(name, float(low), float(high), log=log)
