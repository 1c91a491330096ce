"""Loads a model with its experts in a tier: the rest goes to the device, nothing is held twice.

Experts that a checkpoint has as they are executed are read from its files, where they lie.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lm_eval_moecache.model.device import CPU, peak_memory
from lm_eval_moecache.model.moe_layers import MoELayer, find_moe_layers
from lm_eval_moecache.model.precision.codecs import AsStored, Codec
from lm_eval_moecache.model.precision.encoded_store import EncodedExpertStore
from lm_eval_moecache.model.precision.loading import encoding, settle_layer, take
from lm_eval_moecache.model.precision.stored import (
    expert_bytes,
    expert_matrices,
    shape_without_memory,
)
from lm_eval_moecache.model.sources import Source, can_leave_out, leaving_out, sources_of
from lm_eval_moecache.model.wall.memory import available_host_bytes, own_bytes, watched
from lm_eval_moecache.model.wall.pools import expert_parameters, part_of, stored_parameters
from lm_eval_moecache.model.wall.tiers import (
    DiskTier,
    OnDisk,
    RamTier,
    Stored,
    Tier,
    joined,
    tensors_in,
)

PREFIX = "experts-"
"""Begins the name of a folder that goes when the experts in it have been opened."""


class ExpertLoader:
    """Takes the experts out of a model while transformers loads it, converted as it converts them.

    The rest goes on to the device. `ram`: experts are read into host memory. `disk`: they stay in
    the checkpoint where they lie there as they are executed (in one tensor or in several), and else
    are written once to files under `folder`, layer after layer, where later loads of the same
    weights find them. With `codecs` experts are encoded as they come, and both stores hold them so,
    level by level.
    """

    def __init__(
        self,
        store: str,
        folder: str | None,
        skeleton: nn.Module,
        codecs: Sequence[Codec] | None = None,
        kept: EncodedExpertStore | None = None,
        files: Sequence[Path] = (),
        identity: str = "",
    ) -> None:
        """`files`: the checkpoint's safetensors files, if it has any; `identity`: which they are.

        Experts on disk that nothing can tell from others' are written anew at each load.
        """
        self.codecs, self._kept = codecs, kept
        self._store = store
        self._folder = Path(folder or Path.home() / ".cache" / "lm-eval-moecache")
        self._skeleton = skeleton
        self._identity = identity
        self._files: EncodedExpertStore | None = None
        self._in_place: list[dict[str, OnDisk]] | None = None
        if store == "disk" and codecs is None:
            self._in_place = find_in_place(skeleton, files)
        self._device = CPU
        self.tiers: list[Tier] = []
        """Level -> where its experts lie."""
        self.parameters: list[dict[str, Tensor]]
        """Layer -> parameter name -> a tensor of its shape and type."""
        self.figures: dict[str, Any] = {}
        """Time and peak memory of loading."""

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Return what `from_pretrained` is told about places: the device gets its part later."""
        return {"device_map": {"": "cpu"}, "max_memory": None}

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Watch over a load, `take_experts` included: errors name the store."""
        start_s = time.perf_counter()
        try:
            with ExitStack() as stack:
                peak = stack.enter_context(watched())
                layers = find_moe_layers(self._skeleton)
                if self._in_place is not None:
                    names = {name for row in names_of(layers) for name in row.values()}
                    stack.enter_context(leaving_out(names))
                elif self._store == "disk":
                    self._write(stack, layers)
                elif self.codecs is not None:
                    stack.enter_context(encoding(layers, self.codecs, self._kept))
                yield
        except (OSError, SafetensorError, RuntimeError) as error:
            writes = self._store == "disk" and self._in_place is None
            raise ValueError(
                f"store={self._store!r}: the model cannot be loaded: {error}"
                + (f" (files are written to {self._folder})" if writes else "")
            ) from error
        self.figures = {"seconds": time.perf_counter() - start_s}
        if peak:
            self.figures |= {"peak_host_bytes": peak[0], "own_host_bytes": own_bytes()}
        if self._store == "disk":
            self.figures["past_page_cache"] = self._past_cache()
        peak_bytes = None if self._device.type == "cpu" else peak_memory(self._device)
        if peak_bytes is not None:
            self.figures["peak_device_bytes"] = peak_bytes

    def take_experts(self, model: nn.Module, device: torch.device) -> None:
        """Move a loaded model's experts into the tier; shapes without memory stay behind.

        All but the experts goes to the device; what that copies from is locked.
        """
        self._device = device
        layers = find_moe_layers(model)
        if self._in_place is not None:
            self.tiers = [DiskTier(self._in_place, past_cache=self._past_cache())]
        elif self._store == "disk":
            self.tiers = self._written(layers)
        elif self.codecs is not None:
            pairs = list(zip(layers, take(layers, self.codecs, self._kept), strict=True))
            self.tiers = [
                RamTier([stored_parameters(layer.experts, own, level) for layer, own in pairs])
                for level in range(len(self.codecs))
            ]
        else:
            self.tiers = [RamTier([expert_parameters(layer.experts) for layer in layers])]
        if device.type != "cpu":
            for layer in layers:
                for name, tensor in expert_parameters(layer.experts).items():
                    setattr(layer.experts, name, shape_without_memory(tensor, device))
            model.to(device)
            for tier in self.tiers:
                if isinstance(tier, RamTier):
                    tier.pin()
        self.parameters = [expert_parameters(layer.experts) for layer in layers]

    def copy_of(self, layer: int) -> dict[str, Tensor]:
        """Return a copy of a layer's experts [experts, ...] in host memory, as they are stored."""
        found = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in self.parameters[layer].items()}
        for expert in range(len(next(iter(found.values())))):
            target = {name: stacked[expert] for name, stacked in found.items()}
            self.tiers[0].fill(layer, expert, target)
        return found

    def _write(self, stack: ExitStack, layers: Sequence[MoELayer]) -> None:
        """Begin to write experts to files while they are loaded, unless they are there."""
        dtype = next(iter(expert_parameters(layers[0].experts).values())).dtype
        codecs = self.codecs or [AsStored(dtype)]
        if not self._identity:
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch = tempfile.TemporaryDirectory(prefix=PREFIX, dir=self._folder)
            self._folder = Path(stack.enter_context(scratch))
        elif self._kept is not None:
            self._folder = self._kept.parent
        needed = _bytes_at(layers, codecs)
        self._files = EncodedExpertStore(self._folder, self._identity, dtype, codecs, needed)
        stack.enter_context(encoding(layers, codecs, self._files, release=True))

    def _written(self, layers: Sequence[MoELayer]) -> list[Tier]:
        """Return the files of each level as a tier; what is no matrix stays in host memory."""
        assert self._files is not None
        levels = range(1 if self.codecs is None else len(self.codecs))
        rows: list[list[dict[str, OnDisk]]] = [[] for _ in levels]
        beside: list[dict[str, Tensor]] = []
        for index, layer in enumerate(layers):
            settle_layer(index, layer, self._files)
            matrices = expert_matrices(layer.experts)
            plain = expert_parameters(layer.experts).items()
            beside.append({name: t for name, t in plain if name not in matrices})
            for level in levels:
                found = tensors_in(self._files.file(level, index))
                if self.codecs is None:
                    found = {name: found[part_of(name, 0)] for name in matrices}
                rows[level].append({name: each.by_expert for name, each in found.items()})
        return [DiskTier(each, beside, self._past_cache()) for each in rows]

    def _past_cache(self) -> bool:
        """Whether files are read past the page cache: where it could not hold them all."""
        layers = find_moe_layers(self._skeleton)
        room = available_host_bytes()
        codecs = self.codecs or [AsStored(next(layers[0].experts.parameters()).dtype)]
        return room is not None and _bytes_at(layers, codecs) > room


def _bytes_at(layers: Sequence[MoELayer], codecs: Sequence[Codec]) -> int:
    """Return what all experts take, at all levels together."""
    return sum(sum(expert_bytes(layer.experts, codecs)) * layer.num_experts for layer in layers)


def names_of(layers: Sequence[MoELayer]) -> list[dict[str, str]]:
    """Return each layer's parameters with an entry for each expert: name -> name in the model."""
    return [{n: f"{layer.path}.{n}" for n in expert_parameters(layer.experts)} for layer in layers]


def find_in_place(skeleton: Any, files: Sequence[Path]) -> list[dict[str, OnDisk]] | None:
    """Return where each layer's experts lie in these files, of the type and order they have there.

    None where any would have to be converted: another type, a transposition, a quantised model, no
    safetensors.
    """
    if not files or not can_leave_out() or hasattr(skeleton.config, "quantization_config"):
        return None
    tensors = {key: tensor for file in files for key, tensor in tensors_in(file).items()}
    layers = find_moe_layers(skeleton)
    names = names_of(layers)
    sources = sources_of(skeleton, {name for row in names for name in row.values()}, tensors)
    found: list[dict[str, OnDisk]] = []
    for layer, row in zip(layers, names, strict=True):
        parameters = expert_parameters(layer.experts).items()
        places = {n: _place(sources.get(row[n]), p, tensors) for n, p in parameters}
        if None in places.values():
            return None
        found.append({name: place for name, place in places.items() if place is not None})
    return found


def _place(
    source: Source | None, parameter: Tensor, tensors: Mapping[str, Stored]
) -> OnDisk | None:
    if source is None or source.groups is None:
        return None
    groups = [[tensors[key] for key in group] for group in source.groups]
    if any(part.dtype != parameter.dtype for group in groups for part in group):
        return None
    whole = groups[0][0]
    if len(groups) == len(groups[0]) == 1 and whole.shape == tuple(parameter.shape):
        return whole.by_expert
    num_experts, rows, *rest = parameter.shape
    if any(len(group) != num_experts for group in groups):
        return None
    experts = list(zip(*groups, strict=True))
    fits = all(
        sum(part.shape[0] for part in parts) == rows
        and all(part.shape[1:] == tuple(rest) for part in parts)
        for parts in experts
    )
    return [joined(parts) for parts in experts] if fits else None
