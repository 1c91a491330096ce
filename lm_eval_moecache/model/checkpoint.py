"""Which files a `pretrained=` stands for, whether they are whole, and the model they describe.

And which of their tensors experts are made of, so that a model is loaded without reading those.

A file that is shorter than its header says ends the process (SIGBUS) where its missing part is
first touched: it is named here instead.
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
from lm_eval_moecache.tiny import DRAFT_DIR, MODEL_DIR

SHIPPED = {TINY: str(MODEL_DIR), TINY_DRAFT: str(DRAFT_DIR)}

OWN_EXPERTS = ("fp8", "mxfp4")
"""Quantisation methods whose experts are modules of the quantiser's own."""
_EXPERT_PART = re.compile(r"expert|gate_up_proj")


def model_path(pretrained: Any) -> Any:
    """Return where a named model lies; a loaded model is returned as it is."""
    return SHIPPED.get(pretrained, pretrained) if isinstance(pretrained, str) else pretrained


def skeleton(pretrained: Any, theirs: Mapping[str, Any]) -> Any:
    """Build the model without weights; a loaded model describes itself."""
    if isinstance(pretrained, torch.nn.Module):
        return pretrained
    config = transformers.AutoConfig.from_pretrained(
        model_path(pretrained),
        revision=str(theirs.get("revision", "main")),
        subfolder=str(theirs.get("subfolder") or ""),
        trust_remote_code=bool(theirs.get("trust_remote_code", False)),
    )
    check_quantization(config, theirs)
    check_adapter(theirs.get("peft"))
    check_head(config)
    dtype = getattr(torch, str(theirs.get("dtype", "auto")).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (RuntimeError, TypeError, ArithmeticError) as error:
        raise ValueError(
            f"pretrained={pretrained!r}: no model can be built of its config.json: {error}"
        ) from error


def check_quantization(config: Any, theirs: Mapping[str, Any]) -> None:
    """Refuse checkpoints whose experts would stay encoded, in modules of the quantiser's own.

    Asks the quantiser itself what it will do here: without its kernels it decodes while loading.
    """
    settings = theirs.get("quantization_config") or getattr(config, "quantization_config", None)
    if settings is None:
        return
    given = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(given.get("quant_method"), "value", given.get("quant_method")))
    if method not in OWN_EXPERTS:
        return
    quantizer = AutoHfQuantizer.from_config(copy.deepcopy(given), pre_quantized=True)
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
    with open(file, encoding="utf-8") as stream:
        adapter = json.load(stream)
    targets: list[str] = []
    for key in ("target_modules", "target_parameters", "modules_to_save"):
        named = adapter.get(key) or []
        targets += [named] if isinstance(named, str) else named
    touched = [name for name in targets if _EXPERT_PART.search(name)]
    if touched or "all-linear" in targets:
        raise ValueError(
            f"peft={peft!r} changes {', '.join(touched) or 'all layers'}, but experts are moved "
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


def check_weights(key: str, model: str, theirs: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with a shard missing, cut short or with a damaged header.

    Of a hub id only what is downloaded is looked at. ValueError begins with `key`, which names the
    model, and names the file.
    """
    folder = None if theirs.get("gguf_file") else _folder_of(model, theirs)
    if folder is None:
        return
    what = f"{key}={model!r}"
    tensors = _shards(folder, what)
    again, absent = "Copy the checkpoint again.", list[str]()
    for path, names in tensors.items():
        if not path.is_file():
            if Path(model).is_dir():
                by = f"which {SAFE_WEIGHTS_INDEX_NAME} names"
                raise ValueError(f"{what}: {path.name} is missing, {by}. {again}")
            continue
        try:
            # Compares its header with the file's size, and reads no tensor.
            with safe_open(path, "pt") as file:
                absent = sorted(set(names) - set(file.keys()))
        except (SafetensorError, OSError) as error:
            size = f"({path.stat().st_size} bytes)"
            problem = f"{path.name} {size} is cut short or damaged"
            raise ValueError(f"{what}: {problem}: {error}. {again}") from error
        if absent:
            raise ValueError(
                f"{what}: {path.name} lacks {absent[0]} (and {len(absent) - 1} others), which the "
                f"index says it has. {again}"
            )
    for path in () if tensors else sorted(folder.glob("pytorch_model*.bin")):
        try:
            # To no device: of a file that torch can map nothing is read but its header.
            mapped = zipfile.is_zipfile(path)
            torch.load(path, map_location="meta", weights_only=True, mmap=mapped)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
            reason = str(error).split(". ")[0].split("\n")[0]
            raise ValueError(
                f"{what}: {path.name} is cut short, damaged, or no file that may be loaded: "
                f"{reason}. Copy the checkpoint again, or convert it to safetensors."
            ) from error


def _shards(folder: Path, what: str) -> dict[Path, list[str]]:
    """Return a checkpoint's safetensors files and which tensors its index, if any, says they have.

    They need not be there. Raises ValueError, which begins with `what`, for an index that is none.
    """
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if single.is_file() or not index.is_file():
        return {single: []} if single.is_file() else {}
    found = read_json(index, f"{what}: {index.name}")
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise ValueError(f"{what}: {index.name} has no weight_map of tensors to files.")
    shards: dict[Path, list[str]] = {folder / name: [] for name in sorted(set(places.values()))}
    for tensor, name in places.items():
        shards[folder / name].append(tensor)
    return shards


def weights_files(model: Any, theirs: Mapping[str, Any]) -> list[Path]:
    """Return the safetensors files that a model is loaded from; none where others are."""
    loads_others = not isinstance(model, str) or theirs.get("gguf_file")
    folder = None if loads_others else _folder_of(model, theirs)
    shards = {} if folder is None else _shards(folder, f"pretrained={model!r}")
    return [path for path in shards if path.is_file()]


def weights_identity(model: Any, theirs: Mapping[str, Any]) -> str:
    """Say which weights a model is loaded from: names, sizes and times of files, and revision.

    Empty where there are no files to tell: of a loaded model, or of one not downloaded yet.
    """
    folder = _folder_of(model, theirs) if isinstance(model, str) else None
    if folder is None:
        return ""
    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return json.dumps([str(folder.resolve()), str(theirs.get("revision", "main")), stats])


def _folder_of(model: str, theirs: Mapping[str, Any]) -> Path | None:
    """Return where a checkpoint lies: in its folder, or what is downloaded of a hub id."""
    subfolder = str(theirs.get("subfolder") or "")
    if Path(model).is_dir():
        return Path(model) / subfolder
    revision = str(theirs.get("revision", "main"))
    try:
        config = cached_file(
            model, "config.json", revision=revision, subfolder=subfolder, local_files_only=True
        )
    except OSError:
        return None
    return None if config is None else Path(config).parent


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors of a checkpoint that one parameter is made of."""

    keys: Sequence[str]
    groups: Sequence[Sequence[str]] | None
    """Matrices side by side along the rows, each with a tensor for every expert, or one for all.

    None where transformers does more than to stack experts and to join matrices.
    """


def sources_of(model: Any, names: Collection[str], keys: Collection[str]) -> dict[str, Source]:
    """Return what these parameters are made of, as transformers' rules of conversion say.

    `keys` are the checkpoint's tensors; a parameter that it does not have is left out.
    """
    rules = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
    shapes = model.state_dict()
    found: dict[str, dict[str | None, list[str]]] = {}
    for key in sorted(keys, key=core_model_loading.dot_natural_key):
        name, pattern = core_model_loading.rename_source_key(
            key, renamings, converters, model.base_model_prefix, shapes
        )
        if name in names:
            found.setdefault(name, {}).setdefault(pattern, []).append(key)
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    sources = {}
    for name, parts in found.items():
        (first, *_) = parts
        groups: list[list[str]] | None = list(parts.values())
        if first is not None:
            # Known is what stacks experts, and joins their matrices along the rows if several.
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
    """Let `from_pretrained` load all but these parameters, whose tensors are not even read.

    They become shapes without memory on the model's device, or stay on the meta device where a
    device map says that they are on disk. Where transformers loads in another way than the one
    that is known here, nothing is left out.
    """
    usual = PreTrainedModel._load_pretrained_model
    if not names or not can_leave_out():
        yield
        return

    def load(*given: Any, **more: Any) -> Any:
        bound = inspect.signature(usual).bind(*given, **more)
        said = bound.arguments
        with ExitStack() as files:
            rest = None
            if said.get("state_dict") is None and said["load_config"].hf_quantizer is None:
                rest = _without(said["model"], set(names), said["checkpoint_files"], files)
            if rest is None:
                return usual(*bound.args, **bound.kwargs)
            places = said["load_config"].device_map or {"": "cpu"}
            for name in names:
                path, _, own = name.rpartition(".")
                module = said["model"].get_submodule(path)
                if "" in places:
                    shape = shape_without_memory(module._parameters[own], places[""])
                    setattr(module, own, shape)
                # Else transformers would fill what it takes for a parameter that nobody loaded.
                module._parameters[own]._is_hf_initialized = True
            said["state_dict"] = rest
            info, index = usual(*bound.args, **bound.kwargs)
            info.missing_keys -= set(names)
            return info, index

    PreTrainedModel._load_pretrained_model = staticmethod(load)
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(usual)


def can_leave_out() -> bool:
    """Whether this release of transformers loads in the way that `leaving_out` knows."""
    known = {"model", "state_dict", "checkpoint_files", "load_config"}
    usual = getattr(PreTrainedModel, "_load_pretrained_model", None)
    return usual is not None and known <= set(inspect.signature(usual).parameters)


def _without(
    model: Any, names: set[str], paths: Sequence[str] | None, files: ExitStack
) -> dict[str, Any] | None:
    """Return the checkpoint's tensors, not read yet, without those of the parameters; None if .bin.

    What is left out has to be all there: else transformers shall say what is missing.
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
