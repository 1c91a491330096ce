"""The form of a results JSON: a sweep's own record, or what lm-eval writes of a moecache run.

Both may hold more than is read here (lm-eval's facts differ by release), but what is read has the
kind that its readers count on.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lm_eval_moecache.records.schemas.base import OpenSchema


def _choice(value: object) -> object:
    names = [value.get(key) for key in ("name", "class_path")] if isinstance(value, dict) else []
    if not any(isinstance(name, str) for name in names):
        raise ValueError("must be a mapping with `name` (or `class_path`)")
    return value


def _metrics(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("must be a mapping of metrics")
    for name, figure in value.items():
        parts = figure.values() if isinstance(figure, dict) else [figure]
        if not all(part is None or isinstance(part, (int, float)) for part in parts):
            raise ValueError(f"has {name!r}, which is no figure, nor a mapping of figures")
    return value


def _score(value: object) -> object:
    pair = value if isinstance(value, list) and len(value) == 2 else [value]
    if not all(isinstance(part, (int, float)) for part in pair):
        raise ValueError("must be a score, or a pair of numbers")
    return value


Choice = Annotated[dict[str, Any], BeforeValidator(_choice)]
Metrics = Annotated[dict[str, Any], BeforeValidator(_metrics)]
Samples = dict[str, dict[str, Annotated[Any, BeforeValidator(_score)]]]


class PolicyReport(OpenSchema):
    """The policy of a run, in full."""

    name: str
    routing: Choice
    prefetch: Choice
    eviction: Choice
    miss: Choice


class NamedReport(OpenSchema):
    """Something with a name: the hardware."""

    name: str


class MoecacheReport(OpenSchema):
    """`config.moecache`: the setting and figures of a run."""

    policy: PolicyReport
    hardware: NamedReport
    capacity: str
    clock: str
    totals: Metrics
    tasks: dict[str, Metrics]


class ReportedConfig(OpenSchema):
    """lm-eval's `config`, with ours in it."""

    moecache: MoecacheReport
    model: Any = None
    model_args: dict[str, Any] | str | None = None
    limit: float | None = None


class Configuration(OpenSchema):
    """What a sweep's cell was given."""

    model: str
    model_args: dict[str, Any]
    tasks: list[str] = Field(default_factory=list)


class ResultsFile(OpenSchema):
    """The whole file."""

    format: Literal[1] = 1
    run_id: str | None = None
    experiment: str | None = None
    label: str | None = None
    configuration_hash: str | None = None
    configuration: Configuration | None = None
    config: ReportedConfig
    results: dict[str, dict[str, Any]]
    higher_is_better: dict[str, dict[str, bool | None] | None] = Field(default_factory=dict)
    group_subtasks: dict[str, list[str]] = Field(default_factory=dict)
    scores: dict[str, Samples] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
