"""The one table of our keys of `--model_args`: their types, defaults, help and roles.

Parsing, the reference of keys, `replay`'s options, what cells of a sweep share, what comparisons
vary, the report and its schema are derived from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Flag, auto
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field

from lm_eval_moecache.records.command import Options
from lm_eval_moecache.records.geometry import MOST_DRAFTED
from lm_eval_moecache.records.hardware import DEFAULT_PROFILE
from lm_eval_moecache.records.numbers import MOST_COUNT
from lm_eval_moecache.records.runtimes import IDEAL
from lm_eval_moecache.records.schemas import Count, Schema

MOST_READS = 64
"""Most read requests per expert."""


class Role(Flag):
    """What a key is to those who read a run's setting."""

    COMPARED = auto()
    """Comparisons vary it: it is no part of a run's identity."""
    REPLAYED = auto()
    """A replay can change it: under a lossless policy neither the answers nor what the model
    computes depend on it, so that cells of a sweep that differ in it share a live run."""
    LOADING = auto()
    """It decides how the model is loaded."""
    REPORTED = auto()
    """It stands in the report, `config.moecache`."""
    RARE = auto()
    """It does where it has not its default."""


COMPARED, REPLAYED, LOADING, REPORTED, RARE = Role
VARIED = COMPARED | REPLAYED
"""What runs are compared for, and a replay can change: a rule, the size of the cache ..."""


def _text(value: object) -> str | None:
    """Return a name as text: lm-eval parses digits as integers, and a folder may be called 7."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, PurePath)):
        raise ValueError("must be text: a name, or a path")
    return str(value)


# `Any`: what a run has resolved is the object that the name stands for.
Name = Annotated[Any, BeforeValidator(_text)]


class ModelArguments(Schema):
    """Our keys of `--model_args`; the text below a key is its help."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    policy: Annotated[Any, VARIED] = "specmd"
    """a name that `moecache policies` lists, a YAML file, or a mapping"""
    routing: Annotated[Any, VARIED] = None
    """replaces the policy's routing algorithm: a name or a class path (`my_package.MyRouting`);
    parameters as `routing.NAME=value`"""
    prefetch: Annotated[Any, VARIED] = None
    """the same for prefetching"""
    eviction: Annotated[Any, VARIED] = None
    """the same for eviction"""
    miss: Annotated[Any, VARIED] = None
    """the same for miss handling"""
    capacity: Annotated[Any, VARIED] = "25%"
    """cache size: `5%` of all expert bytes, `2GiB`, `51experts`, `30/layer` (one cache per
    layer)"""
    precision: Annotated[Any, COMPARED | LOADING] = None
    """stored precisions of the experts, best first: `int8`, `int8:int4:int2` (default: the model's
    dtype)"""
    hardware: Annotated[Name, REPLAYED] = DEFAULT_PROFILE
    """device to emulate: name or YAML of a hardware profile"""
    runtime: Annotated[Name, REPLAYED] = IDEAL
    """program to forecast, which reaches a share of the device's rates (`llama.cpp`,
    `ktransformers` ...): name or YAML of a runtime profile"""
    bandwidth: Annotated[Any, REPLAYED] = None
    """link bandwidth, overrides the profile's: `5GB/s`"""
    link: Annotated[Literal["priority", "fifo"], VARIED | REPORTED] = "priority"
    """`priority` (demands first, stale prefetches cancelled) or `fifo`"""
    execute: Annotated[Literal["together", "as_they_arrive"], REPLAYED | RARE] = "together"
    """run an event's experts `together` once all have arrived, or `as_they_arrive`, resident ones
    first"""
    reads_per_expert: Annotated[int, Field(ge=1, le=MOST_READS), REPLAYED | RARE] = 1
    """read requests per expert (its projections), for links with several lanes"""
    attention: Annotated[Literal["none", "context"], REPLAYED | RARE] = "none"
    """`context` adds attention over the context and its KV cache, from the configuration of
    `emulate`; `none` omits both"""
    emulate: Annotated[Name, REPLAYED] = None
    """compute bytes and times with the sizes of this model: a name, a folder or a YAML"""
    warm: Annotated[Name, VARIED | RARE] = None
    """fill the cache before the first request: a trace, a JSON that `profile use` writes, or `tiny`
    (shipped use profile)"""
    phases: Annotated[Any, VARIED] = None
    """`all`, or `decode`: lossy algorithms act only while decoding (default: the policy's)"""
    seed: Annotated[Count, REPLAYED | REPORTED] = 0
    """seed of randomised algorithms"""
    trace: Annotated[Name, COMPARED] = None
    """folder to record a routing trace into, for `moecache replay`"""
    trace_keep: Annotated[Literal["lossless", "all", "routing"], COMPARED] = "lossless"
    """content of the trace: `lossless` (enough to replay lossless policies), `all` (lossy ones,
    too) or `routing` (experts only)"""
    clock: Annotated[Literal["virtual", "wall"], LOADING | REPORTED] = "virtual"
    """`virtual`, or `wall`: real transfers on this machine, measured"""
    store: Annotated[Literal["ram", "disk"], COMPARED | LOADING | RARE] = "ram"
    """with `clock=wall`: store non-resident experts in `ram` or on `disk`"""
    store_dir: Annotated[Name, COMPARED | LOADING] = None
    """folder for the files of `store=disk` (default: ~/.cache/lm-eval-moecache)"""
    encoded_dir: Annotated[Name, COMPARED] = None
    """with `precision`: folder in which encoded experts are kept for later loads"""
    scoring: Annotated[Literal["parallel", "scan"], REPORTED] = "parallel"
    """`parallel`, or `scan`: scored text is routed as if it were decoded (virtual clock, one
    precision, caches per layer)"""
    streams: Annotated[int, Field(ge=1, le=MOST_COUNT), REPORTED] = 1
    """requests that the emulated device serves at once, sharing its cache, link and clock (how many
    are computed together is `batch_size`: no request sees another)"""
    cache_reset: Annotated[Literal["request", "never"], REPLAYED | REPORTED] = "request"
    """`request`: each request starts with a fresh cache, link, clock and rules; `never`: a running
    server, where they carry over from request to request"""
    draft: Annotated[Name, COMPARED] = None
    """`moecache-spec`, `prefetch=draft`: a model, `tiny-draft`, `self:int4` or `prompt_lookup`
    (default: self:int4)"""
    draft_tokens: Annotated[Annotated[int, Field(ge=1, le=MOST_DRAFTED)] | None, COMPARED] = None
    """`moecache-spec`: tokens drafted for each verify pass (default: 1)"""


KEYS = tuple(ModelArguments.model_fields)
DEFAULTS: Mapping[str, Any] = {k: f.default for k, f in ModelArguments.model_fields.items()}
HELP: Mapping[str, str] = {
    key: " ".join(str(field.description).split())
    for key, field in ModelArguments.model_fields.items()
}
CHOICES: Mapping[str, tuple[str, ...]] = {
    key: get_args(field.annotation)
    for key, field in ModelArguments.model_fields.items()
    if getattr(field.annotation, "__origin__", None) is Literal
}
"""Key -> the values it may have, the default first."""


def roles_of(key: str) -> Role:
    """Return what a key is; nothing for a name that is no key of ours."""
    field = ModelArguments.model_fields.get(key)
    return next((r for r in field.metadata if isinstance(r, Role)), Role(0)) if field else Role(0)


def keys_with(role: Role) -> tuple[str, ...]:
    """Return the keys that have this role, or one of these, in the table's order."""
    return tuple(key for key in KEYS if roles_of(key) & role)


def options_of(keys: Iterable[str]) -> Options:
    """Return keys as options of a command: each with its type, its default and its help."""
    kinds = {key: ModelArguments.model_fields[key].annotation for key in keys}
    return {
        key: (kind if key in CHOICES else Any, DEFAULTS[key], HELP[key].replace("`", ""))
        for key, kind in kinds.items()
    }
