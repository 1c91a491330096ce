"""The JSON schema of `config.moecache`, for who reads results: made from these models, versioned.

Every record in `results/` is held to it by a test, and the site publishes it. `SCHEMA_VERSION`
rises when a field is renamed, removed or changes its meaning; fields may be added without.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")


class AlgorithmOfAxis(_Part):
    """The algorithm of one axis: its name or the path of its class, and all of its parameters."""

    name: str | None = Field(None, description="an algorithm that `moecache policies` lists")
    class_path: str | None = Field(None, description="a class of the user's own")


class ResolvedPolicy(_Part):
    """The whole composition that ran."""

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
    """What the engine was charged for: the model's own sizes, or those of `emulate`."""

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
    """The figures of one task or of all; None is a rate of nothing. See the page of metrics."""

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
    """`config.moecache` of a results JSON: the full setting of a run, and its figures."""

    policy: ResolvedPolicy
    capacity: str = Field(description="as given by the user")
    capacity_bytes: int
    hardware: Machine
    clock: Literal["virtual", "wall"]
    scoring: Literal["parallel", "scan"]
    cache_reset: Literal["never", "request"]
    link: Literal["priority", "fifo"] = "priority"
    execute: Literal["together", "as_they_arrive"] = "together"
    reads_per_expert: int = Field(1, description="read requests per expert")
    attention: Literal["flat", "context"] = "flat"
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
