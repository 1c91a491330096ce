"""Compositions: one algorithm per axis with its parameters, read from YAML and from overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import Any

from lm_eval_moecache.algorithms.registry import (
    AXES,
    find_algorithm,
    import_class,
    is_own,
    parameters_of,
    ranges_of,
    source_of,
)
from lm_eval_moecache.records.files import is_file, policies_dir, read_yaml
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.numbers import MOST_COUNT, nearest, read_number, unknown_name_error
from lm_eval_moecache.records.plugins import yaml_files

PHASES = ("all", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One axis of a composition: the algorithm and all of its parameters, defaults included."""

    axis: str
    name: str
    algorithm: type[Any]
    parameters: Mapping[str, Any]

    def build(self, geometry: Geometry, seed: int) -> Any:
        """Return an instance; ValueError names the axis and the algorithm."""
        try:
            for name, allowed in ranges_of(self.algorithm).items():
                key = f"{self.axis}.{unmangle(name)}"
                allowed.check(key, self.parameters[name], geometry)
            return self.algorithm(geometry, seed=seed, **self.parameters)
        except ValueError as error:
            raise ValueError(f"{self.axis}={self.name}: {error}") from error
        except Exception as error:
            if not self.is_outside:
                raise
            # A user's class may raise anything.
            raise ValueError(
                f"{self.axis}={self.name} ({source_of(self.algorithm)}): its constructor raised "
                f"{type(error).__name__}: {error}"
            ) from error

    @property
    def is_outside(self) -> bool:
        """Whether it is another package's, given by a class path or a name that package adds."""
        return "." in self.name or not is_own(self.algorithm)

    def as_dict(self) -> dict[str, Any]:
        """Return the choice as a policy's YAML spells it, with all parameters."""
        key = "name" if "." not in self.name else "class_path"
        return {key: self.name, **{unmangle(n): v for n, v in self.parameters.items()}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A composition: a choice on each axis, and the phases in which lossy algorithms act."""

    name: str
    """The composition's name, followed by the algorithms that replace its own."""
    composition: str
    source: str
    phases: str
    per_layer: bool
    """Whether each layer has its own cache, all of equal size, whatever form the capacity has."""
    placed: bool
    """Whether it starts from experts placed by a use profile (`warm=`)."""
    routing: Choice
    prefetch: Choice
    eviction: Choice
    miss: Choice

    @property
    def is_lossless(self) -> bool:
        """Whether routing and miss handling leave the model's results unchanged."""
        return bool(self.routing.algorithm.is_lossless and self.miss.algorithm.is_lossless)

    @property
    def draws(self) -> bool:
        """Whether any algorithm depends on the seed."""
        return any(getattr(self, axis).algorithm.draws for axis in AXES)

    def as_dict(self) -> dict[str, Any]:
        """Return the resolved composition, as it appears in a results JSON."""
        axes = {axis: getattr(self, axis).as_dict() for axis in AXES}
        named = {"name": self.name}
        if self.composition != self.name:
            named["composition"] = self.composition
        forms = {"cache": "layer"} if self.per_layer else {}
        forms |= {"placement": "use"} if self.placed else {}
        return {**named, "source": self.source, "phases": self.phases, **forms, **axes}


def mangle(name: str) -> str:
    """Return a parameter's Python name: the papers' `lambda` is a keyword, hence `lambda_`."""
    return "lambda_" if name == "lambda" else name


def unmangle(name: str) -> str:
    """Return a parameter's name as users write it, from its Python name."""
    return "lambda" if name == "lambda_" else name


def choice_text(axis: str, choice: Mapping[str, Any]) -> str:
    """Return a choice (`Choice.as_dict`) in words: `score(percentile=60)`.

    Of its parameters those that are not the algorithm's defaults; all, where its class is not here.
    """
    given = dict(choice)
    name = str(given.pop("name", None) or given.pop("class_path"))
    try:
        algorithm = import_class(axis, name) if "." in name else find_algorithm(axis, name)
        usual = {unmangle(n): p.default for n, p in parameters_of(algorithm).items()}
    except ValueError:
        usual = {}
    shown = {k: v for k, v in given.items() if k not in usual or v != usual[k]}
    texts = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items())
    return f"{name}({', '.join(texts)})" if shown else name


def policy_names() -> list[str]:
    """Return the names of the compositions, sorted: the shipped ones, and what packages add."""
    return list(yaml_files("policies", policies_dir()))


def load_policy(
    given: str | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Policy:
    """Load a composition by name, path or mapping, and apply overrides.

    A mapping has the form of a policy's file. Overrides are `{"eviction": "lru", "eviction.order":
    "fifo", "phases": "decode"}`; a name with a dot is the path of a class. Replacing an algorithm
    drops the old one's parameters and shows in the policy's name. Raises ValueError for anything
    unknown, and for a parameter that the chosen algorithm does not have.
    """
    data, stem = _read(given)
    composed: dict[str, dict[str, Any]] = {axis: data[axis] for axis in AXES}
    merged = _override(composed, overrides or {})
    phases = (overrides or {}).get("phases", data.get("phases", "all"))
    if phases not in PHASES:
        raise unknown_name_error("phases", phases, PHASES)
    choices = {axis: _choose(axis, merged[axis]) for axis in AXES}
    # Parameters of a composition's own algorithm are settings of a run, with columns of their own.
    replaced = [
        f"{axis}={choice.name}"
        for axis, choice in choices.items()
        if choice.name != composed[axis].get("class_path", composed[axis].get("name"))
        or (axis in (overrides or {}) and choice != _choose(axis, composed[axis]))
    ]
    composition = str(data.get("name", stem))
    # Placement is for experts that stay in place, which a replaced miss algorithm need not do.
    own_miss = choices["miss"].name == composed["miss"].get("name")
    policy = Policy(
        name=" + ".join([composition, *replaced]),
        composition=composition,
        source=str(data.get("source", "")).strip(),
        phases=phases,
        per_layer=data.get("cache") == "layer",
        placed=data.get("placement") == "use" and own_miss,
        **choices,
    )
    if phases == "decode" and policy.is_lossless:
        if "phases" in (overrides or {}):
            raise ValueError(
                "phases='decode' has no effect: every algorithm of this policy is lossless. "
                "Leave it out, or choose a lossy routing or miss algorithm."
            )
        # An override made the composition lossless, so its phases no longer matter.
        policy = replace(policy, phases="all")
    _check_pairs(choices, policy.is_lossless)
    return policy


def check_cache_form(policy: Policy, per_layer: bool) -> None:
    """Refuse an eviction that compares layers if each layer has its own cache (`n/layer`)."""
    eviction = policy.eviction
    if (per_layer or policy.per_layer) and eviction.algorithm.compares_layers:
        raise ValueError(
            f"eviction={eviction.name!r} chooses between layers, so it has no effect in a cache of "
            "one layer. Give a capacity for all layers together (a share, a size or a number of "
            "experts), or another eviction."
        )


def _read(given: str | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return a composition's checked fields, each axis as a mapping, and a default name."""
    from lm_eval_moecache.records.schemas import check
    from lm_eval_moecache.records.schemas.inputs import PolicyFile

    if isinstance(given, Mapping):
        data, where, stem = given, "policy mapping", "custom"
    else:
        name, files = str(given), yaml_files("policies", policies_dir())
        is_path = name.endswith((".yaml", ".yml"))
        if not is_path and name not in files:
            raise unknown_name_error("policy", name, files, "`moecache policies`")
        path = Path(name) if is_path else files[name]
        if not is_file(path):
            raise ValueError(f"policy={name!r}: there is no such file.")
        where, stem = f"policy file {path.name}", path.stem
        data = read_yaml(path, f"policy={str(path)!r}")
        if not isinstance(data, dict):
            raise ValueError(f"policy={str(path)!r} must hold a mapping with {', '.join(AXES)}.")
    checked = check(PolicyFile, dict(data), where)
    return checked.model_dump(exclude_none=True, exclude_unset=True), stem


def _check_pairs(choices: Mapping[str, Choice], is_lossless: bool) -> None:
    """Refuse pairings that the algorithms themselves exclude."""
    for axis, choice in choices.items():
        for other, allowed in choice.algorithm.pairs_with.items():
            name = choices[other].name
            # An outside algorithm is its author's responsibility.
            if name not in allowed and not choices[other].is_outside:
                raise ValueError(
                    f"{other}={name!r} cannot be combined with {axis}={choice.name!r}: "
                    f"{choice.algorithm.pairs_because}. Allowed: {', '.join(allowed)}."
                )
    for choice in (choices["prefetch"], choices["eviction"]):
        if choice.algorithm.is_offline and not is_lossless:
            is_routed = choices["routing"].algorithm.is_lossless
            lossy = choices["miss"] if is_routed else choices["routing"]
            raise ValueError(
                f"{lossy.axis}={lossy.name!r} cannot be combined with "
                f"{choice.axis}={choice.name!r}, which knows the future of the router's own "
                "choices; lossy algorithms change them. Allowed: routing=standard with miss=fetch."
            )
    miss, prefetch = choices["miss"], choices["prefetch"]
    if miss.parameters.get("late") == "await" and not prefetch.algorithm.is_active:
        raise ValueError(
            f"miss.late='await' has no effect with prefetch={prefetch.name!r}, with which no "
            "expert is ever on its way. Leave it out, or choose another prefetch algorithm."
        )


def _override(
    composed: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the axes with overrides applied: first algorithms, then parameters."""
    from lm_eval_moecache.records.schemas import check_as
    from lm_eval_moecache.records.schemas.inputs import Algorithm

    merged = {axis: dict(mapping) for axis, mapping in composed.items()}
    for axis, value in overrides.items():
        if axis in merged and isinstance(value, Mapping):
            merged[axis] = check_as(dict[str, Algorithm], {axis: dict(value)}, "policy")[axis]
        elif axis in merged:
            merged[axis] = {"name": value}
    for key, value in overrides.items():
        axis, dot, parameter = key.partition(".")
        if dot and not parameter:
            raise ValueError(f"{key}={value!r} names no parameter. Allowed: {axis}.NAME=VALUE.")
        if parameter:
            merged[axis][parameter] = value
    return merged


def _choose(axis: str, given: Mapping[str, Any]) -> Choice:
    given = dict(given)
    name = str(given.pop("class_path" if "class_path" in given else "name"))
    algorithm = import_class(axis, name) if "." in name else find_algorithm(axis, name)
    inner = given.pop("init_args", {})
    if not isinstance(inner, Mapping):
        raise ValueError(
            f"{axis}.init_args={inner!r} must be a mapping of {axis}={name}'s parameters."
        )
    # A parameter set by an override takes precedence over `init_args`.
    given = {**inner, **given}
    known = parameters_of(algorithm)
    for key in given:
        if mangle(key) not in known:
            allowed = [unmangle(n) for n in known]
            raise ValueError(
                f"{axis}.{key}={given[key]!r} is not used by {axis}={name}."
                f"{nearest(key, allowed)} Allowed: {', '.join(sorted(allowed)) or 'none'}."
            )
    mangled = {mangle(key): value for key, value in given.items()}
    return Choice(
        axis=axis,
        name=name,
        algorithm=algorithm,
        parameters=_validated(axis, name, algorithm, mangled),
    )


def _validated(
    axis: str, name: str, algorithm: type[Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Check types against the constructor's hints and fill in the defaults."""
    known = parameters_of(algorithm)
    values = {n: given.get(n, p.default) for n, p in known.items()}
    for key, value in values.items():
        if value is Parameter.empty:
            raise ValueError(
                f"{axis}.{unmangle(key)} must be given: {axis}={name} has no default for it."
            )
    if not given:
        return values
    # Refuse numbers that no algorithm can mean: infinite, NaN, beyond every count.
    for key, value in given.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, (int, float)) and not isinstance(each, bool):
                read_number(f"{axis}.{unmangle(key)}", each, least=-MOST_COUNT, most=MOST_COUNT)
    # Imported only when there are parameters to check: it is the slowest import of a replay.
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    for key in given:
        annotation, default = known[key].annotation, known[key].default
        parser.add_argument(
            f"--{key}",
            type=Any if annotation is Parameter.empty else annotation,
            default=None if default is Parameter.empty else default,
        )
    try:
        checked = parser.parse_object(dict(given))
    except (ArgumentError, ValueError, TypeError) as error:
        shown = ", ".join(f"{axis}.{unmangle(k)}={v!r}" for k, v in given.items())
        raise ValueError(f"{shown} does not fit {axis}={name}: {error}") from error
    return values | {key: checked[key] for key in given}
