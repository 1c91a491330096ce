"""Schemas of results: runs, analyses and searches.

Files of other releases may have more fields than are read here; those that are read have the types
their readers rely on.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
)

from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.records.schemas import OpenSchema, check

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
MetricsMapping = dict[str, Score | dict[str, Score | None] | None]
Pair = Annotated[list[Score], Field(min_length=2, max_length=2)]
Samples = dict[str, dict[str, Score | Pair]]


class NamedReport(OpenSchema):
    """A named part of a report: the hardware."""

    name: str


class AxesReport(OpenSchema):
    """The algorithm of each axis, with all its parameters."""

    routing: Choice
    prefetch: Choice
    eviction: Choice
    miss: Choice


class PolicyReport(NamedReport, AxesReport):
    """The policy of a run."""


class MoecacheReport(OpenSchema):
    """`config.moecache`: the setting and the metrics of a run."""

    policy: PolicyReport
    hardware: NamedReport
    capacity: str
    clock: str
    model: dict[str, Any] = Field(default_factory=dict)
    emulate: dict[str, Any] | None = None
    totals: MetricsMapping
    tasks: dict[str, MetricsMapping]


class ReportedConfig(OpenSchema):
    """lm-eval's `config`, which contains ours."""

    moecache: MoecacheReport
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


class Found(OpenSchema):
    """One policy that a search has measured."""

    name: str
    policy: AxesReport
    accuracy: Number
    stderr: Number | None
    speed: Number
    measured_by: str
    within_budget: bool


class Confirmation(OpenSchema):
    """The best policy of a search, on documents held out from it."""

    documents: dict[str, int]
    points_lost: Number
    accuracy: Number
    reference_accuracy: Number
    within_budget: bool
    speed: Number
    reference_speed: Number


class Question(OpenSchema):
    """The question that a search answers."""

    metric: str


class FrontFile(OpenSchema):
    """The JSON of `moecache tune`."""

    question: Question
    verdict: str
    best: Found | None
    front: list[Found]
    shipped: list[Found]
    left_out: dict[str, str]
    confirmation: Confirmation | None = None


class TraceCell(OpenSchema):
    """One cell of `cells.json.gz`: its setting in `cell`, its metrics next to it."""

    cell: dict[str, Plain]


# --- the JSON schema of `config.moecache` that we publish ---

SCHEMA_VERSION = 1
"""Incremented when a field is renamed, removed or changes its meaning, not when one is added.

A test checks every record in `results/` against the schema, and the site publishes it."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")


class AlgorithmOfAxis(_Part):
    """The algorithm of one axis: its name or the path of its class, and all of its parameters."""

    name: str | None = Field(None, description="an algorithm that `moecache policies` lists")
    class_path: str | None = Field(None, description="a class of the user's own")


class ResolvedPolicy(_Part):
    """The full composition of the run."""

    name: str = Field(description="the composition, and what was replaced in it")
    routing: AlgorithmOfAxis
    prefetch: AlgorithmOfAxis
    eviction: AlgorithmOfAxis
    miss: AlgorithmOfAxis
    phases: Literal["all", "decode"] = Field(description="when lossy algorithms act")
    source: str | None = Field(None, description="paper and section")


class Machine(_Part):
    """The emulated device (virtual clock) or this machine (wall clock)."""

    name: str
    link_bytes_per_s: float | None = Field(description="None: a real, unthrottled link")
    peak_flops: float | None = None
    memory_bytes_per_s: float | None = None
    memory_bytes: float | None = None


class ModelSizes(_Part):
    """The sizes that the engine charged for: the model's own, or those of `emulate`."""

    model: str
    num_layers: int = Field(description="MoE layers")
    num_experts: int = Field(description="routed experts of each layer")
    top_k: int
    expert_bytes: list[list[int]] = Field(description="per layer, a size for each stored precision")
    dense_bytes: list[int] = Field(description="per layer, bytes that are not routed experts")
    precision: list[str] = Field(description="the stored precisions, best first")


class Percentiles(_Part):
    """A time in milliseconds over requests (`itl_ms`: over tokens)."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    stderr: float | None = None


class Metrics(_Part):
    """The metrics of one task or of all tasks; rates are None where their denominator is 0."""

    requests: int
    ttft_ms: Percentiles | None = None
    tpot_ms: Percentiles | None = None
    itl_ms: Percentiles | None = None
    e2el_ms: Percentiles | None = None
    tok_per_s: float | None = Field(description="output tokens / time in generation")
    prompt_tok_per_s: float | None
    hit_rate: float | None = Field(description="resident share of the unique experts per event")
    miss_rate: float | None = Field(description="late and absent experts")
    late_rate: float | None
    collision_miss_rate: float | None
    decode_miss_rate: float | None
    stall_ms_per_token: float | None
    bytes_moved: int
    evictions: int
    routing_fidelity: float | None = Field(
        description="share of assignments executed as the unmodified router chose"
    )
    peak_cache_bytes: int


class MoecacheRecord(_Part):
    """`config.moecache` of a results JSON: the full setting of a run, and its metrics."""

    policy: ResolvedPolicy
    capacity: str = Field(description="as given by the user")
    capacity_bytes: int
    hardware: Machine
    clock: Literal["virtual", "wall"]
    scoring: Literal["parallel", "scan"]
    streams: int = Field(1, description="requests that the emulated device serves at once")
    cache_reset: Literal["never", "request"]
    link: Literal["priority", "fifo"] = "priority"
    execute: Literal["together", "as_they_arrive"] = "together"
    reads_per_expert: int = Field(1, description="read requests per expert")
    attention: Literal["none", "context"] = "none"
    seed: int
    model: ModelSizes
    device: str | None = Field(None, description="where the model ran, whatever was emulated")
    warm: str | None = None
    emulate: dict[str, Any] | None = None
    draft: dict[str, Any] | None = None
    regime: dict[str, Any] | None = None
    warnings: list[str] = Field(default_factory=list, description="settings without effect")
    ranks: int | None = None
    store: Literal["ram", "disk"] | None = None
    load: dict[str, Any] | None = Field(
        None, description="wall clock: duration and peak memory of loading"
    )
    totals: Metrics
    tasks: dict[str, Metrics]


def published_schema() -> dict[str, Any]:
    """Return the schema as a JSON object (draft 2020-12)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "config.moecache",
        "version": SCHEMA_VERSION,
        **MoecacheRecord.model_json_schema(),
    }
