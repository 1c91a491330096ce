"""Checkpoints: the files behind `pretrained=`, whether they are complete, and their model.

Also maps expert parameters to checkpoint tensors, so that a model loads without reading those.

Touching the missing part of a truncated file kills the process (SIGBUS): such a file is refused
here by name instead.
"""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, conversion_mapping, core_model_loading
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from lm_eval_moecache.model.precision.codecs import shape_without_memory
from lm_eval_moecache.records.files import TINY, TINY_DRAFT, read_json
from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.tiny import DRAFT_DIR, MODEL_DIR

SHIPPED = {TINY: str(MODEL_DIR), TINY_DRAFT: str(DRAFT_DIR)}

OWN_EXPERTS = ("fp8", "mxfp4")
"""Quantisation methods that replace experts modules by the quantiser's own."""
_EXPERT_PART = re.compile(r"expert|gate_up_proj")


def model_path(pretrained: Any) -> Any:
    """Return the folder of a shipped model's name; anything else passes through unchanged."""
    return SHIPPED.get(pretrained, pretrained) if isinstance(pretrained, str) else pretrained


def load_model(pretrained: str, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Load a model to be read or measured, and its tokenizer, from a name, a folder or a hub id."""
    path, trusted = model_path(pretrained), {"trust_remote_code": trust_remote_code}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, **trusted).eval()
    return model, transformers.AutoTokenizer.from_pretrained(path, **trusted)


def skeleton(pretrained: Any, hflm_args: Mapping[str, Any]) -> Any:
    """Build the model on the meta device, without weights; a loaded model is returned as is."""
    if isinstance(pretrained, torch.nn.Module):
        return pretrained
    trusted = bool(hflm_args.get("trust_remote_code", False))
    config = transformers.AutoConfig.from_pretrained(
        model_path(pretrained),
        revision=str(hflm_args.get("revision", "main")),
        subfolder=str(hflm_args.get("subfolder") or ""),
        trust_remote_code=trusted,
    )
    check_quantization(config, hflm_args)
    check_adapter(hflm_args.get("peft"))
    check_head(config)
    dtype = getattr(torch, str(hflm_args.get("dtype", "auto")).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trusted
            )
    except (RuntimeError, TypeError, ArithmeticError) as error:
        raise ValueError(
            f"pretrained={pretrained!r}: no model can be built of its config.json: {error}"
        ) from error


def check_quantization(config: Any, hflm_args: Mapping[str, Any]) -> None:
    """Refuse checkpoints whose experts would stay quantised, in the quantiser's own modules.

    Asks the quantiser what it will do on this machine: without its kernels it dequantises while
    loading.
    """
    settings = hflm_args.get("quantization_config") or getattr(config, "quantization_config", None)
    if settings is None:
        return
    if not (isinstance(settings, dict) or hasattr(settings, "to_dict")):
        raise ValueError(
            f"quantization_config={shown(settings)} must be a mapping with quant_method and its "
            "fields, or a configuration of transformers."
        )
    fields = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(fields.get("quant_method"), "value", fields.get("quant_method")))
    if method not in OWN_EXPERTS:
        return
    quantizer = AutoHfQuantizer.from_config(copy.deepcopy(fields), pre_quantized=True)
    problem = ""
    try:
        quantizer.validate_environment()
    except (ImportError, RuntimeError, ValueError) as error:
        problem = f" ({error})"
    if not quantizer.quantization_config.dequantize:
        raise ValueError(
            f"pretrained: a checkpoint with quant_method={method!r}, whose experts transformers "
            f"runs with kernels of their own here{problem}; an expert cache cannot take them over. "
            "Allowed: a checkpoint in bf16 or fp16 (with precision=int8 or int4 for small experts),"
            " or quantization_config with dequantize=True."
        )


def check_adapter(peft: Any) -> None:
    """Refuse an adapter that changes experts: the cache would run them without it."""
    if not peft:
        return
    file = cached_file(str(peft), "adapter_config.json")
    adapter = read_json(file, f"peft={peft!r}")
    targets: list[str] = []
    for key in ("target_modules", "target_parameters", "modules_to_save"):
        entry = adapter.get(key) or []
        targets += [entry] if isinstance(entry, str) else entry
    on_experts = [name for name in targets if _EXPERT_PART.search(name)]
    if on_experts or "all-linear" in targets:
        raise ValueError(
            f"peft={peft!r} changes {', '.join(on_experts) or 'all layers'}, but experts are moved "
            "and run as the checkpoint has them. Allowed: adapters of other parts, or a checkpoint "
            "into which the adapter has been merged."
        )


def check_head(config: Any) -> None:
    """Refuse a model type that transformers has no causal language model for."""
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping and not hasattr(
        config, "auto_map"
    ):
        raise ValueError(
            f"pretrained: transformers has no causal language model for the model type "
            f"{config.model_type!r}. Allowed: types that AutoModelForCausalLM can load."
        )


_WEIGHTS = ("*.safetensors", f"*{SAFE_WEIGHTS_INDEX_NAME}", "*.bin", "config.json")


def check_weights(key: str, model: str, hflm_args: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with a shard that is missing, truncated or has a damaged header.

    For a hub id, only downloaded files are checked. The ValueError begins with `key` and the
    model, and names the file.
    """
    folder = None if hflm_args.get("gguf_file") else folder_of(model, hflm_args)
    if folder is None:
        return
    label = f"{key}={model!r}"
    tensors = _shards(folder, label)
    remedy, absent = "Copy the checkpoint again.", list[str]()
    for path, names in tensors.items():
        if not path.is_file():
            if Path(model).is_dir():
                referrer = f"which {SAFE_WEIGHTS_INDEX_NAME} names"
                raise ValueError(f"{label}: {path.name} is missing, {referrer}. {remedy}")
            continue
        try:
            # Opening compares the header with the file's size and reads no tensor.
            with safe_open(path, "pt") as file:
                absent = sorted(set(names) - set(file.keys()))
        except (SafetensorError, OSError) as error:
            size = f"({path.stat().st_size} bytes)"
            problem = f"{path.name} {size} is cut short or damaged"
            raise ValueError(f"{label}: {problem}: {error}. {remedy}") from error
        if absent:
            raise ValueError(
                f"{label}: {path.name} lacks {absent[0]} (and {len(absent) - 1} others), which the "
                f"index says it has. {remedy}"
            )
    for path in () if tensors else sorted(folder.glob("pytorch_model*.bin")):
        try:
            # To the meta device: of a file that torch can map, only the header is read.
            can_map = zipfile.is_zipfile(path)
            torch.load(path, map_location="meta", weights_only=True, mmap=can_map)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
            reason = str(error).split(". ")[0].split("\n")[0]
            raise ValueError(
                f"{label}: {path.name} is cut short, damaged, or no file that may be loaded: "
                f"{reason}. Copy the checkpoint again, or convert it to safetensors."
            ) from error


def _shards(folder: Path, what: str) -> dict[Path, list[str]]:
    """Return safetensors file -> the tensors that the index places there; [] without an index.

    Listed files need not exist. Raises ValueError, which begins with `what`, for a malformed index.
    """
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if single.is_file() or not index.is_file():
        return {single: []} if single.is_file() else {}
    index_json = read_json(index, f"{what}: {index.name}")
    weight_map = index_json.get("weight_map") if isinstance(index_json, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(x, str) for x in weight_map.values()):
        raise ValueError(f"{what}: {index.name} has no weight_map of tensors to files.")
    shards: dict[Path, list[str]] = {folder / name: [] for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        shards[folder / name].append(tensor)
    return shards


def weights_files(model: Any, hflm_args: Mapping[str, Any]) -> list[Path]:
    """Return the safetensors files that a model loads from; [] if it loads from other formats."""
    loads_others = not isinstance(model, str) or hflm_args.get("gguf_file")
    folder = None if loads_others else folder_of(model, hflm_args)
    shards = {} if folder is None else _shards(folder, f"pretrained={model!r}")
    return [path for path in shards if path.is_file()]


def weights_identity(model: Any, hflm_args: Mapping[str, Any]) -> str:
    """Return JSON identifying a model's weights: folder, revision, and files by size and mtime.

    Empty where there are no files: for a loaded model, or one not downloaded yet.
    """
    folder = folder_of(model, hflm_args) if isinstance(model, str) else None
    if folder is None:
        return ""
    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return json.dumps([str(folder.resolve()), str(hflm_args.get("revision", "main")), stats])


def folder_of(model: str, hflm_args: Mapping[str, Any]) -> Path | None:
    """Return a checkpoint's folder, local or downloaded; None for a hub id not downloaded yet."""
    subfolder = str(hflm_args.get("subfolder") or "")
    if Path(model).is_dir():
        return Path(model) / subfolder
    revision = str(hflm_args.get("revision", "main"))
    try:
        config = cached_file(
            model, "config.json", revision=revision, subfolder=subfolder, local_files_only=True
        )
    except OSError:
        return None
    return None if config is None else Path(config).parent


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint tensors that one parameter is assembled from."""

    keys: Sequence[str]
    groups: Sequence[Sequence[str]] | None
    """Matrices joined along the rows, each as one tensor per expert or one for all experts.

    None where transformers does more than stack experts and join matrices.
    """


def sources_of(model: Any, names: Collection[str], keys: Collection[str]) -> dict[str, Source]:
    """Map these parameters to their checkpoint tensors by transformers' conversion rules.

    `keys` names the checkpoint's tensors; parameters that it lacks are left out.
    """
    rules = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
    shapes = model.state_dict()
    keys_by_pattern: dict[str, dict[str | None, list[str]]] = {}
    for key in sorted(keys, key=core_model_loading.dot_natural_key):
        name, pattern = core_model_loading.rename_source_key(
            key, renamings, converters, model.base_model_prefix, shapes
        )
        if name in names:
            keys_by_pattern.setdefault(name, {}).setdefault(pattern, []).append(key)
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    sources = {}
    for name, parts in keys_by_pattern.items():
        (first, *_) = parts
        groups: list[list[str]] | None = list(parts.values())
        if first is not None:
            # Supported rules stack experts and, given several matrices, join them along the rows.
            rule = by_pattern[first]
            patterns = rule.source_patterns
            steps = [(type(step).__name__, getattr(step, "dim", None)) for step in rule.operations]
            joins = [("MergeModulelist", 0), ("Concatenate", 1)][: 1 + (len(patterns) > 1)]
            fits = set(parts) == set(patterns) and steps == joins
            groups = [parts[pattern] for pattern in patterns] if fits else None
        sources[name] = Source([key for part in parts.values() for key in part], groups)
    return sources


@contextmanager
def leaving_out(names: Collection[str]) -> Iterator[None]:
    """Let `from_pretrained` load everything but these parameters, whose tensors are never read.

    They become shapes without memory on the model's device, or stay on the meta device where a
    device map has more than one place. Where transformers' loader has changed, nothing is left
    out.
    """
    original = PreTrainedModel._load_pretrained_model
    if not names or not can_leave_out():
        yield
        return

    def load(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        call = bound.arguments
        with ExitStack() as files:
            tensors = None
            if call.get("state_dict") is None and call["load_config"].hf_quantizer is None:
                tensors = _without(call["model"], set(names), call["checkpoint_files"], files)
            if tensors is None:
                return original(*bound.args, **bound.kwargs)
            device_map = call["load_config"].device_map or {"": "cpu"}
            for name in names:
                path, _, attribute = name.rpartition(".")
                module = call["model"].get_submodule(path)
                if "" in device_map:
                    shape = shape_without_memory(module._parameters[attribute], device_map[""])
                    setattr(module, attribute, shape)
                # Else transformers would initialise it as a missing parameter.
                module._parameters[attribute]._is_hf_initialized = True
            call["state_dict"] = tensors
            info, index = original(*bound.args, **bound.kwargs)
            info.missing_keys -= set(names)
            return info, index

    PreTrainedModel._load_pretrained_model = staticmethod(load)
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(original)


def can_leave_out() -> bool:
    """Whether transformers' loader has the signature that `leaving_out` relies on."""
    required = {"model", "state_dict", "checkpoint_files", "load_config"}
    loader = getattr(PreTrainedModel, "_load_pretrained_model", None)
    return loader is not None and required <= set(inspect.signature(loader).parameters)


def _without(
    model: Any, names: set[str], paths: Sequence[str] | None, files: ExitStack
) -> dict[str, Any] | None:
    """Return the checkpoint's unread tensors except those of `names`; None for .bin files.

    Also None where the checkpoint lacks any of `names`: transformers then reports it.
    """
    if not paths or not all(str(path).endswith(".safetensors") for path in paths):
        return None
    tensors: dict[str, Any] = {}
    for path in paths:
        file = files.enter_context(safe_open(path, framework="pt"))
        keys = file.keys()
        tensors.update({key: file.get_slice(key) for key in keys})
    sources = sources_of(model, names, tensors)
    if set(sources) != names:
        return None
    for key in {key for source in sources.values() for key in source.keys}:
        del tensors[key]
    return tensors
