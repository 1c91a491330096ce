"""Schemas of results: runs and analyses.

Files of other releases may have more fields than are read here; those that are read have the types
their readers rely on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, create_model, field_validator

from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.records.schemas import OpenSchema, check
from lm_eval_moecache.records.schemas.keys import HELP, RARE, REPORTED, ModelArguments, keys_with
from lm_eval_moecache.report.metrics import LATENCIES, METRICS

Number = float
Plain = str | bool | int | float | None
Name = Annotated[str, Field(min_length=1)]
# --- a results JSON: a sweep's own record, or lm-eval's of a moecache run ---


def _choice(value: object) -> object:
    names = [value.get(key) for key in ("name", "class_path")] if isinstance(value, dict) else []
    if not any(isinstance(name, str) for name in names):
        raise ValueError("must be a mapping with `name` (or `class_path`)")
    return value


Choice = Annotated[dict[str, Any], BeforeValidator(_choice)]
Score = bool | int | float
Pair = Annotated[list[Score], Field(min_length=2, max_length=2)]
Samples = dict[str, dict[str, Score | Pair]]


class AxesReport(OpenSchema):
    """The algorithm of each axis, with all its parameters."""

    routing: Choice
    prefetch: Choice
    eviction: Choice
    miss: Choice


class PolicyReport(AxesReport):
    """The policy of a run, in full."""

    name: str = Field(description="the composition, and what was replaced in it")
    phases: Literal["all", "decode"] = Field("all", description="when lossy algorithms act")
    source: str | None = Field(None, description="paper and section")


class Machine(OpenSchema):
    """The emulated device (virtual clock) or this machine (wall clock)."""

    name: str
    link_bytes_per_s: float | None = Field(None, description="None: a real, unthrottled link")
    peak_flops: float | None = None
    memory_bytes_per_s: float | None = None
    memory_bytes: float | None = None


class ModelSizes(OpenSchema):
    """The sizes that the engine charged for: the model's own, or those of `emulate`."""

    model: str | None = None
    num_layers: int | None = Field(None, description="MoE layers")
    num_experts: int | None = Field(None, description="routed experts of each layer")
    top_k: int | None = None
    expert_bytes: list[list[int]] = Field([], description="per layer, by stored precision")
    dense_bytes: list[int] = Field([], description="per layer, of all but routed experts")
    precision: list[str] = Field([], description="the stored precisions, best first")


class Percentiles(OpenSchema):
    """A time in milliseconds over requests (`itl_ms`: over tokens)."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    stderr: float | None = None


class AnyMetrics(OpenSchema):
    """The metrics of one task or of all tasks; rates are None where their denominator is 0."""

    __pydantic_extra__: dict[str, Score | dict[str, Score | None] | None] = Field(init=False)


def _metrics() -> Any:
    """Return the schema of metrics: the declared ones by name, others (by phase) by type."""
    fields: dict[str, Any] = {
        name: (
            Percentiles | float | None if name in LATENCIES else float | None,
            Field(None, description=metric.meaning),
        )
        for name, metric in METRICS.items()
    }
    return create_model("Metrics", __base__=AnyMetrics, **fields)


if TYPE_CHECKING:
    MetricsReport = AnyMetrics
else:
    MetricsReport = _metrics()


def _setting() -> Any:
    """Return the schema of our keys as they stand in a report; those of another release may not."""
    kinds: dict[str, Any] = {k: f.annotation for k, f in ModelArguments.model_fields.items()}
    fields: dict[str, Any] = {
        key: (kinds[key] | None, Field(None, description=HELP[key]))
        for key in keys_with(REPORTED | RARE)
    }
    return create_model("Setting", __base__=OpenSchema, **fields)


if TYPE_CHECKING:
    SettingReport = OpenSchema
else:
    SettingReport = _setting()


class MoecacheRecord(SettingReport):
    """`config.moecache` of a results JSON: the full setting of a run, and its metrics."""

    policy: PolicyReport
    capacity: str = Field(description="as given by the user")
    capacity_bytes: int | None = None
    hardware: Machine
    clock: Literal["virtual", "wall"]
    model: ModelSizes | None = None
    device: str | None = Field(None, description="where the model ran, whatever was emulated")
    warm: str | None = None
    emulate: dict[str, Any] | None = None
    draft: dict[str, Any] | None = None
    regime: dict[str, Any] | None = None
    warnings: list[str] = Field([], description="settings without effect")
    ranks: int | None = None
    load: dict[str, Any] | None = Field(None, description="wall clock: duration and peak memory")
    totals: MetricsReport
    tasks: dict[str, MetricsReport]


SCHEMA_VERSION = 1
"""Incremented when a field is renamed, removed or changes its meaning, not when one is added.

A test checks every record in `results/` against the schema, and the site publishes it."""


def published_schema() -> dict[str, Any]:
    """Return the schema of `config.moecache` as a JSON object (draft 2020-12)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "config.moecache",
        "version": SCHEMA_VERSION,
        **MoecacheRecord.model_json_schema(),
    }


class ReportedConfig(OpenSchema):
    """lm-eval's `config`, which contains ours."""

    moecache: MoecacheRecord
    model: Any = None
    model_args: dict[str, Any] | str | None = None
    limit: float | None = None


class Configuration(OpenSchema):
    """The model, arguments and tasks of a sweep's cell."""

    model: str
    model_args: dict[str, Any]
    tasks: list[str] = Field(default_factory=list)


def _file_name(value: str) -> str:
    if not value.strip(".") or set(value) & set("/\\\0") or len(value) > 200:
        raise ValueError("must be the name of a file in `runs/`: no path")
    return value


RunId = Annotated[str, AfterValidator(_file_name)]
"""Becomes a file's name, so that an id from elsewhere must not lead out of the folder."""


class Environment(OpenSchema):
    """When, where and by what versions a run was made."""

    machine: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, Plain] = Field(default_factory=dict)


class ResultsFile(OpenSchema):
    """A whole results JSON."""

    format: Literal[1] = 1
    run_id: RunId | None = None
    experiment: str | None = None
    label: str | None = None
    configuration_hash: str | None = None
    configuration: Configuration | None = None
    config: ReportedConfig
    results: dict[str, dict[str, Any]]
    higher_is_better: dict[str, dict[str, bool | None] | None] = Field(default_factory=dict)
    group_subtasks: dict[str, list[str]] = Field(default_factory=dict)
    scores: dict[str, Samples] = Field(default_factory=dict)
    environment: Environment = Field(default_factory=Environment)


def check_record(record: object, what: str) -> ResultsFile:
    """Return a results JSON that fits the schema.

    Raises ValueError that begins with `what` (the file) and names the field.
    """
    return check(ResultsFile, record, what)


# --- files of analyses, searches and trace replays, for tables and claims ---


class RowsFile(OpenSchema):
    """The JSON of `moecache analyze`: rows of one shape."""

    rows: Annotated[list[dict[str, Plain]], Field(min_length=1)]

    @field_validator("rows")
    @classmethod
    def _one_shape(cls, rows: list[dict[str, Plain]]) -> list[dict[str, Plain]]:
        for row in rows:
            if list(row) != list(rows[0]):
                raise ValueError(f"has a row with {shown(list(row))}, not {shown(list(rows[0]))}")
        return rows


class TraceCell(OpenSchema):
    """One cell of `cells.json.gz`: its setting in `cell`, its metrics next to it."""

    cell: dict[str, Plain]
