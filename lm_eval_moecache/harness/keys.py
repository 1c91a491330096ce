"""The keys of `--model_args` as a type, for editors and type checkers, and as a signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from os import PathLike
from typing import Any, Literal, TypedDict, TypeVar

from lm_eval_moecache.records.schemas.keys import DEFAULTS

Made = TypeVar("Made", bound=Callable[..., None])
Place = str | PathLike[str]
Rule = str | Mapping[str, Any]
"""An algorithm's name, its class path, or a mapping of its name (`name` or `class_path`) and its
parameters."""


class HFLMKeys(TypedDict, total=False):
    """The arguments of lm-eval's `hf` model, and those that it passes to `from_pretrained`."""

    add_bos_token: bool | None
    attn_implementation: str
    autogptq: bool | str
    backend: str
    batch_size: int | str
    cache_dir: Place
    chat_template_args: Mapping[str, Any]
    delta: str
    device: str
    device_map: Any
    dtype: Any
    enable_thinking: bool
    experts_implementation: str
    gguf_file: str
    gptqmodel: bool
    local_files_only: bool
    logits_cache: bool
    low_cpu_mem_usage: bool
    max_batch_size: int
    max_cpu_memory: int | str
    max_length: int
    max_memory_per_gpu: int | str
    mixed_precision_dtype: Any
    offload_folder: Place
    parallelize: bool
    peft: str
    prefix_token_id: int
    quantization_config: Any
    revision: str
    softmax_dtype: Any
    subfolder: str
    think_end_token: str | int
    token: str | bool
    tokenizer: Any
    tp_plan: str
    truncation: bool
    trust_remote_code: bool
    use_fast_tokenizer: bool
    use_safetensors: bool
    variant: str


class ModelKeys(HFLMKeys, total=False):
    """All keyword arguments of `MoECacheLM`: those of `ModelArguments`, which explains them, and
    HFLM's. An axis' parameters also go as `**{"eviction.order": "fifo"}`."""

    policy: Rule
    routing: Rule
    prefetch: Rule
    eviction: Rule
    miss: Rule
    capacity: str | int
    precision: str
    hardware: Place
    bandwidth: str
    link: Literal["priority", "fifo"]
    execute: Literal["together", "as_they_arrive"]
    reads_per_expert: int
    attention: Literal["none", "context"]
    runtime: Place
    emulate: Place
    warm: Place
    phases: Literal["all", "decode"]
    seed: int
    trace: Place
    trace_keep: Literal["lossless", "all", "routing"]
    clock: Literal["virtual", "wall"]
    store: Literal["ram", "disk"]
    store_dir: Place
    encoded_dir: Place
    scoring: Literal["parallel", "scan"]
    streams: int
    cache_reset: Literal["request", "never"]
    draft: Place
    draft_tokens: int


def shows_keys(constructor: Made) -> Made:
    """Make `help` and notebooks show a constructor's own keys with their defaults, not `**`."""
    *named, rest = signature(constructor).parameters.values()
    own = [Parameter(k, Parameter.KEYWORD_ONLY, default=v) for k, v in DEFAULTS.items()]
    others = rest.replace(name="hflm_arguments", annotation=Any)
    shown = signature(constructor).replace(parameters=[*named, *own, others])
    constructor.__signature__ = shown  # type: ignore[attr-defined]
    return constructor
