"""Which tensors of a checkpoint experts are made of, and loading a model without reading them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel, conversion_mapping, core_model_loading

from lm_eval_moecache.model.precision.stored import shape_without_memory


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
