"""All checks of a run that depend on the model, made before its weights are loaded.

They run on the model built without weights from its configuration. Four parts: the run as a whole
(`check_arguments`), the arguments of lm-eval's `hf` model, a model that is already loaded, and the
draft.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from accelerate.utils import parse_flag_from_env
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import cached_file

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.engine.setting import PROMPT_LOOKUP, SELF
from lm_eval_moecache.harness.arguments import (
    FROM_PRETRAINED,
    ROUTING,
    Config,
    as_arguments_error,
    hflm_keys,
    read_config,
    split_arguments,
)
from lm_eval_moecache.model.checkpoint import check_weights, model_path, skeleton
from lm_eval_moecache.model.device import best_device, device_of, devices
from lm_eval_moecache.model.moe_layers import MoELayer, describe, find_moe_layers
from lm_eval_moecache.model.precision.codecs import expert_bytes
from lm_eval_moecache.model.precision.ladder import codecs_of
from lm_eval_moecache.model.speculative import matching_layers, measure
from lm_eval_moecache.model.store import IMPLEMENTATION, STORE_ATTRIBUTE
from lm_eval_moecache.model.wall.loading import LOADS_OTHERWISE, check_wall
from lm_eval_moecache.model.weighting import check_rules
from lm_eval_moecache.records.files import TINY, check_place
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.numbers import read_count, shown, unknown_name_error
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.trace.use import placement

logger = logging.getLogger(__name__)

Bare = Callable[[Any, Mapping[str, Any]], Any]
"""(value of `pretrained=`, HFLM's arguments) -> the model without weights."""
BACKENDS = ("default", "causal", "seq2seq")
_LEAST = {"batch_size": 1, "max_batch_size": 1, "max_length": 2, "prefix_token_id": 0}
_TYPES = ("dtype", "softmax_dtype", "mixed_precision_dtype")
_SWITCHES = (
    *("trust_remote_code", "parallelize", "use_fast_tokenizer", "logits_cache", "truncation"),
    *("add_bos_token", "enable_thinking", "local_files_only", "low_cpu_mem_usage"),
    "use_safetensors",
)
_OF_LOADING = (
    *("revision", "subfolder", "dtype", "trust_remote_code", "parallelize", "tp_plan", "peft"),
    *("delta", "autogptq", "gptqmodel", "gguf_file", "max_memory_per_gpu", "max_cpu_memory"),
    *FROM_PRETRAINED,
)


def check_arguments(
    pretrained: str | nn.Module,
    arguments: Mapping[str, Any],
    bare: Bare = skeleton,
    *,
    speculative: bool = False,
) -> tuple[Config, dict[str, Any]]:
    """Return our checked setting and HFLM's arguments, with the device they resolve to.

    Loads no weights, and raises every ValueError that a setting can cause, so that a sweep fails
    before its first run: unknown or useless keys, values that are not allowed (HFLM's arguments
    included), a model without supported MoE layers, a capacity too small for one expert, algorithm
    parameters out of range, incomplete weights, another model's draft.

    Args:
        pretrained: A hub id, a folder, `tiny`, or a loaded model.
        arguments: All other arguments of `MoECacheLM`.
        bare: Builds the model without weights; a caller with many settings may cache it.
        speculative: Whether a draft model drafts (`moecache-spec`).
    """
    own_args, hflm_args = split_arguments(arguments, hflm_keys())
    hflm_args["device"] = resolve_device(hflm_args)
    if isinstance(pretrained, nn.Module):
        hflm_args["device"] = str(device_of(pretrained))
    config = read_config(own_args, speculative)
    if pretrained == TINY and config.clock == "virtual" and config.draft is None:
        # What it is stored in decides what it weighs; a CPU computes float32 twice as fast.
        hflm_args.setdefault("dtype", "float32")
    check_hflm_arguments(pretrained, config, hflm_args)
    if isinstance(pretrained, nn.Module):
        check_loaded(pretrained, config, hflm_args)
    model = bare(pretrained, hflm_args)
    check_kernels(model, hflm_args)
    layers = find_moe_layers(model)
    if config.ladder is not None:
        for key in LOADS_OTHERWISE:
            if hflm_args.get(key):
                raise ValueError(
                    f"{key}={hflm_args[key]!r} cannot be combined with "
                    f"precision={config.precision!r}, which encodes and places the experts itself. "
                    "Allowed: one of the two."
                )
        codecs_of(config.ladder, str(hflm_args["device"]).partition(":")[0])
    geometry = charged_geometry(model, pretrained, config, hflm_args, bare)
    capacity = parse_capacity(config.capacity, geometry, per_layer=config.policy.per_layer)
    warm = placement(config.policy, config.warm, geometry)
    if warm is not None:
        warm.check(geometry)
    if config.clock == "wall":
        check_wall(model, geometry, capacity, hflm_args, config.store)
    _check_algorithms(config, geometry, layers)
    if isinstance(pretrained, str):
        check_weights("pretrained", model_path(pretrained), hflm_args)
    if config.draft is not None:
        needs_layers = config.policy.prefetch.algorithm.needs_draft
        check_draft(config.draft, pretrained, hflm_args, needs_layers)
    return config, hflm_args


def _check_algorithms(config: Config, geometry: Geometry, layers: Sequence[MoELayer]) -> None:
    """Refuse parameters out of range, and policies that the model's routers cannot serve."""
    # Built only so that the constructors check their parameters' ranges.
    rules = {axis: getattr(config.policy, axis).build(geometry, config.seed) for axis in AXES}
    records_gates = config.trace is not None and config.trace_keep != ROUTING
    asks_gates = rules["routing"].depth or rules["prefetch"].depth or records_gates
    if rules["prefetch"].needs_draft or (asks_gates and not rules["prefetch"].uses_predictor):
        for gate in (layer.gate for layer in layers):
            if gate.missing:
                raise ValueError(
                    f"prefetch, routing, trace: the router {gate.name} needs "
                    f"{', '.join(gate.missing)} in addition to hidden states, so a "
                    "later layer's gate cannot be evaluated early. Allowed for this model: "
                    "prefetch=none, and no trace or trace_keep=routing."
                )
    if not (rules["routing"].is_lossless and rules["miss"].is_lossless):
        check_rules([layer.gate for layer in layers])


def charged_geometry(
    model: Any,
    pretrained: Any,
    config: Config,
    hflm_args: Mapping[str, Any],
    bare: Bare = skeleton,
) -> Geometry:
    """Return what a model weighs: as its checkpoint stores it, whatever `dtype` it computes in.

    The wall clock moves what it computes with, and a loaded model is taken as it is.
    """
    asked = hflm_args.get("dtype") not in (None, "auto")
    if asked and isinstance(pretrained, str) and config.clock == "virtual":
        model = bare(pretrained, {**hflm_args, "dtype": "auto"})
    return describe(model, find_moe_layers(model), model_name(pretrained), config.ladder)


def geometry_of(pretrained: str, *, trust_remote_code: bool = False) -> Geometry:
    """Return a model's geometry from its configuration alone."""
    with as_arguments_error(pretrained):
        model = skeleton(pretrained, {"trust_remote_code": trust_remote_code})
    return describe(model, find_moe_layers(model), model_name(pretrained))


# --- the arguments of lm-eval's `hf` model ---


BY_DEFAULT = ("cuda", "cuda:0")
"""The default `device` of lm-eval's command line and HFLM."""


def resolve_device(hflm_args: Mapping[str, Any]) -> str:
    """Return the device that the model goes to, given HFLM's arguments.

    The default is the machine's accelerator, else the CPU. lm-eval passes `cuda:0` by itself, so on
    a machine without CUDA that counts as no choice. Under `accelerate launch` with several
    processes accelerate assigns the devices, and only their type is returned. Raises ValueError for
    any other device that is missing here: HFLM would silently take the CPU.
    """
    default, available, name = best_device(), devices(), hflm_args.get("device")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "cpu" if parse_flag_from_env("ACCELERATE_USE_CPU") else default
    if name is None:
        return default
    try:
        device = str(torch.device(str(name)))
    except RuntimeError as error:
        raise ValueError(
            f"device={name!r} is not the name of a device. Allowed here: {', '.join(available)}."
        ) from error
    if device in available:
        return device
    if device in BY_DEFAULT:
        level = logging.INFO if default == "cpu" else logging.WARNING
        logger.log(level, "device=%r is not here; the run uses %s.", device, default)
        return default
    raise ValueError(
        f"device={name!r}: torch {torch.__version__} has no such device here. Allowed here: "
        f"{', '.join(available)}."
    )


def check_hflm_arguments(pretrained: object, config: Config, hflm_args: dict[str, Any]) -> None:
    """Refuse arguments on which HFLM or transformers would fail only later, naming the choices.

    Counts given as text become numbers in `hflm_args`; a `batch_size` of None is removed.
    """
    if hflm_args.get("batch_size", 1) is None:
        del hflm_args["batch_size"]
    if isinstance(pretrained, str):
        check_place("pretrained", pretrained)
    batch_size, streams = str(hflm_args.get("batch_size", 1)), config.streams
    is_auto = re.fullmatch(r"auto(:\d+)?", batch_size) is not None
    if batch_size.startswith("auto") and not is_auto:
        raise ValueError(
            f"batch_size={batch_size!r} is not known. Allowed: a whole number, auto, auto:N."
        )
    is_wall = config.clock == "wall"
    if (is_wall or streams > 1) and batch_size not in ("1", str(streams)):
        raise ValueError(
            f"batch_size={batch_size!r} with {'clock=wall and ' * is_wall}streams={streams}: as "
            "many requests are computed together as the device serves at once. Allowed: the same "
            "number for both, as streams=4,batch_size=4, or no batch_size."
        )
    alone = {
        "a draft (--model moecache-spec, prefetch=draft), which follows one request": config.draft,
        "scoring='scan', which reads one text": config.scoring == "scan",
    }
    for what, is_asked in alone.items():
        if is_asked and streams > 1:
            raise ValueError(
                f"streams={streams} cannot be combined with {what} at a time. Allowed: streams=1."
            )
    for key, least in _LEAST.items():
        if hflm_args.get(key) is not None and not (key == "batch_size" and is_auto):
            hflm_args[key] = read_count(key, hflm_args[key], least=least)
    for key in _TYPES:
        value = hflm_args.get(key)
        dtype = getattr(torch, str(value).removeprefix("torch."), None)
        is_type = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if not (is_type or value is None or value == "auto" or isinstance(value, torch.dtype)):
            allowed = ("bfloat16", "float16", "float32", "float64", *(["auto"] * (key == "dtype")))
            raise unknown_name_error(key, value, allowed)
    for key in _SWITCHES:
        if not isinstance(hflm_args.get(key), bool | None):
            raise ValueError(f"{key}={shown(hflm_args[key])} must be true or false.")
    if hflm_args.get("backend") is not None and hflm_args["backend"] not in BACKENDS:
        raise unknown_name_error("backend", hflm_args["backend"], BACKENDS)
    for key in ("tokenizer", "peft", "delta"):
        if isinstance(hflm_args.get(key), str):
            check_place(key, hflm_args[key])


def check_kernels(model: Any, hflm_args: Mapping[str, Any]) -> None:
    """Refuse kernel names that transformers does not have, or cannot run here.

    `model` has no weights; transformers makes the same check once it has loaded them.
    """
    experts_kernel = hflm_args.get("experts_implementation")
    if experts_kernel is not None:
        kernels = {"eager", *ALL_EXPERTS_FUNCTIONS.keys()} - {IMPLEMENTATION}
        if experts_kernel not in kernels:
            raise unknown_name_error("experts_implementation", experts_kernel, kernels)
        try:
            model.get_correct_experts_implementation(experts_kernel)
        except (ValueError, ImportError) as error:
            raise ValueError(f"experts_implementation={experts_kernel!r}: {error}") from error
    attention = hflm_args.get("attn_implementation")
    # A name with a slash is a kernel on the hub.
    if isinstance(attention, str) and "/" not in attention:
        kernels = {"eager", *ALL_ATTENTION_FUNCTIONS.keys()}
        if attention not in kernels:
            raise unknown_name_error("attn_implementation", attention, kernels)


# --- a model that is already loaded ---


def model_name(pretrained: str | nn.Module) -> str:
    """Return the model's name in the results: as requested, or the path it was loaded from."""
    if isinstance(pretrained, str):
        return pretrained
    return str(getattr(pretrained, "name_or_path", "") or type(pretrained).__name__)


def check_loaded(model: nn.Module, config: Config, hflm_args: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that take effect only while a model is being loaded."""
    useless = [key for key in _OF_LOADING if hflm_args.get(key)]
    if useless:
        raise ValueError(
            f"{useless[0]}={hflm_args[useless[0]]!r} has no effect on a model that is already "
            "loaded. Allowed with one: the arguments of the cache, tokenizer and batch_size."
        )
    if config.clock == "wall" or config.ladder is not None:
        key = "clock" if config.clock == "wall" else "precision"
        raise ValueError(
            f"{key}={getattr(config, key)!r} cannot be combined with a model that is already "
            "loaded: it decides where the experts lie while they are loaded. Allowed: pretrained= "
            "a folder or a hub id."
        )
    if any(hasattr(module, STORE_ATTRIBUTE) for module in model.modules()):
        raise ValueError(
            f"pretrained: the given {type(model).__name__} is inside an expert cache already. Call "
            "`wrapped.unwrap()` of the harness model that holds it first, or `install` there."
        )


# --- the draft ---


def check_draft(
    draft: str, pretrained: Any, hflm_args: Mapping[str, Any], needs_layers: bool
) -> None:
    """Refuse a draft that does not fit a model; ValueError names both values.

    A draft may have any layers and sizes, except under `prefetch=draft`, which needs the target's
    hidden size and number of layers.
    """
    if draft == PROMPT_LOOKUP:
        return
    target = skeleton(pretrained, hflm_args)
    if draft.startswith(SELF):
        device = str(hflm_args.get("device", "cpu")).partition(":")[0]
        try:
            codecs = codecs_of((draft.removeprefix(SELF),), device)
            for layer in find_moe_layers(target):
                expert_bytes(layer.experts, codecs)
        except ValueError as error:
            raise ValueError(f"draft={draft!r}: {error}") from error
        return
    try:
        model = skeleton(draft, {})
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"draft={draft!r} is not a model that can be read: {reason} Allowed: a folder, a hub "
            f"id, {SELF}int4 or {PROMPT_LOOKUP}."
        ) from error
    config, expected = (m.config.get_text_config() for m in (model, target))
    _check_vocabulary(draft, pretrained, config.vocab_size, expected.vocab_size)
    blocks, _ = measure(model, draft)
    if needs_layers:
        for key, what in (("num_hidden_layers", "layers"), ("hidden_size", "hidden size")):
            if getattr(config, key) != getattr(expected, key):
                raise ValueError(
                    f"draft={draft!r} has {key}={getattr(config, key)} and the model "
                    f"{getattr(expected, key)}: prefetch='draft' hands the output of each draft "
                    f"layer to the gate of the model's same layer, so the {what} must be equal. "
                    "Allowed: another prefetch with this draft, or another draft."
                )
        layers = find_moe_layers(target)
        if len(matching_layers(blocks, layers)) < len(layers):
            raise ValueError(
                f"draft={draft!r} has no feed-forward block at the place of each of the "
                f"{len(layers)} MoE layers, which prefetch='draft' predicts layer by layer. "
                "Allowed: another draft, or another prefetch."
            )
    check_weights("draft", model_path(draft), {})


def _check_vocabulary(draft: str, pretrained: Any, size: int, target_size: int) -> None:
    problem = ""
    if size != target_size:
        problem = f"a vocabulary of {size} tokens and the model one of {target_size}"
    else:
        # A draft may have no tokenizer.
        draft_ids, target_ids = _vocabulary(draft), _vocabulary(model_name(pretrained))
        if draft_ids is not None and target_ids is not None and draft_ids != target_ids:
            problem = f"a tokenizer of {size} tokens that are not the model's"
    if problem:
        raise ValueError(
            f"draft={draft!r} has {problem}: its token ids mean other tokens. Allowed: a draft "
            "with the model's tokenizer, or prompt_lookup."
        )


def _vocabulary(name: str) -> dict[str, int] | None:
    """Return token -> id of a model's tokenizer, or None where the model comes without one."""
    path = model_path(name)
    try:
        # Without this file transformers makes up a nearly empty tokenizer.
        cached_file(path, "tokenizer_config.json")
        return dict(transformers.AutoTokenizer.from_pretrained(path).get_vocab())
    except (OSError, ValueError):
        return None
