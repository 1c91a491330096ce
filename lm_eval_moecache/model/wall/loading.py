"""Loads a model with its experts in a tier: the rest goes to the device, nothing is held twice."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_submodules
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lm_eval_moecache.model.moe_layers import MoELayer, find_moe_layers
from lm_eval_moecache.model.precision.base import Codec
from lm_eval_moecache.model.precision.kept import KeptEncodings
from lm_eval_moecache.model.precision.loading import encoding, take_layer
from lm_eval_moecache.model.sources import leaving_out
from lm_eval_moecache.model.wall.in_place import find_in_place, names_of
from lm_eval_moecache.model.wall.ladder import stored_parameters
from lm_eval_moecache.model.wall.pools import expert_parameters
from lm_eval_moecache.model.wall.scratch import scratch
from lm_eval_moecache.model.wall.tiers import DiskTier, OnDisk, RamTier, Stored, Tier, find_stored

try:
    import resource
except ImportError:  # Windows: there the peak of host memory is left out
    resource = None  # type: ignore[assignment]


class ExpertLoader:
    """Takes the experts out of a model while transformers loads it, converted as it converts them.

    `ram`: the model is read into host memory and the rest moves on to the device. `disk`: the
    device gets the rest; experts stay in the checkpoint where they lie there as they are executed
    (in one tensor or in several), and else are written to files under `folder`, layer after layer.
    These have no name when loading ends: no later run can find them, and what a killed one leaves
    the next removes.
    With `codecs` experts are encoded as they come, and both stores hold them so, level by level.
    """

    def __init__(
        self,
        store: str,
        folder: str | None,
        skeleton: nn.Module,
        codecs: Sequence[Codec] | None = None,
        kept: KeptEncodings | None = None,
        files: Sequence[Path] = (),
    ) -> None:
        """`files`: the checkpoint's safetensors files, where it has any."""
        self.codecs, self._kept = codecs, kept
        self._store = store
        self._in_place: list[dict[str, OnDisk]] | None = None
        if store == "disk" and codecs is None:
            self._in_place = find_in_place(skeleton, files)
        self._folder = Path(folder or Path.home() / ".cache" / "lm-eval-moecache")
        self._skeleton = skeleton
        self._scratch: str | None = None
        self.tiers: list[Tier] = []
        """Level -> where its experts lie."""
        self.parameters: list[dict[str, Tensor]]
        """Layer -> parameter name -> a tensor of its shape and type."""
        self.figures: dict[str, Any] = {}
        """Time and peak memory of loading."""

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Return what `from_pretrained` has to be told about places."""
        if self._store == "ram" or self.codecs is not None or self._in_place is not None:
            return {"device_map": {"": "cpu"}, "max_memory": None}
        paths = {layer.path for layer in find_moe_layers(self._skeleton)}
        return {
            "device_map": device_map(self._skeleton, paths, str(device)),
            "max_memory": None,
            "offload_folder": self._scratch,
        }

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Watch over a load: errors name the store, and the scratch folder goes in the end."""
        start_s = time.perf_counter()
        try:
            with ExitStack() as stack:
                if self._in_place is not None:
                    stack.enter_context(leaving_out(self._names()))
                elif self._store == "disk":
                    place = scratch(self._folder, self._needed())
                    self._scratch = stack.enter_context(place)
                stack.enter_context(self._encoding())
                yield
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ValueError(
                f"store={self._store!r}: the model cannot be loaded: {error}"
                + (f" (files are written to {self._folder})" if self._scratch else "")
            ) from error
        self.figures = {"seconds": time.perf_counter() - start_s}
        if resource is not None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            # Pages of mapped files count there, which the system takes back when it needs them.
            self.figures["peak_host_bytes"] = peak
            self.figures["own_host_bytes"] = own_bytes()
        if torch.cuda.is_available():
            self.figures["peak_device_bytes"] = torch.cuda.max_memory_allocated()

    def take_experts(self, model: nn.Module, device: torch.device) -> None:
        """Move a loaded model's experts into the tier; shapes without memory stay behind."""
        layers = find_moe_layers(model)
        if self.codecs is not None:
            self._take_encoded(model, layers, device)
        elif self._in_place is not None:
            self._move_rest(model, layers, device, [DiskTier(self._in_place)])
        elif self._store == "disk":
            self.tiers = [DiskTier(self._stored(layers))]
            remove_hook_from_submodules(model)
            for name in ("hf_device_map", "forward"):
                vars(model).pop(name, None)
            _leave_shapes(layers, device)
        else:
            host = [expert_parameters(layer.experts) for layer in layers]
            self._move_rest(model, layers, device, [RamTier(host)])
        self.parameters = [expert_parameters(layer.experts) for layer in layers]

    def copy_of(self, layer: int) -> dict[str, Tensor]:
        """Return a copy of a layer's experts [experts, ...] in host memory, as they are stored."""
        found = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in self.parameters[layer].items()}
        for expert in range(len(next(iter(found.values())))):
            target = {name: stacked[expert] for name, stacked in found.items()}
            self.tiers[0].fill(layer, expert, target)
        return found

    def _encoding(self) -> AbstractContextManager[None]:
        if self.codecs is None:
            return nullcontext()
        return encoding(find_moe_layers(self._skeleton), self.codecs, self._kept)

    def _take_encoded(self, model: nn.Module, layers: Sequence[MoELayer], device: Any) -> None:
        """Put what was encoded while it was loaded into a tier for each level."""
        assert self.codecs is not None
        levels: list[list[dict[str, Tensor]]] = [[] for _ in self.codecs]
        files: list[list[dict[str, OnDisk]]] = [[] for _ in self.codecs]
        for index, layer in enumerate(layers):
            stored = take_layer(index, layer, self.codecs, self._kept)
            for level in range(len(self.codecs)):
                held = stored_parameters(layer.experts, stored, level)
                if self._scratch is None:
                    levels[level].append(held)
                    continue
                file = os.path.join(self._scratch, f"{index}-{level}.safetensors")
                save_file({name: t.contiguous() for name, t in held.items()}, file)
                files[level].append({name: find_stored(file, name) for name in held})
        if self._scratch is not None:
            self._move_rest(model, layers, device, [DiskTier(rows) for rows in files])
        else:
            self._move_rest(model, layers, device, [RamTier(rows) for rows in levels])

    def _move_rest(
        self, model: nn.Module, layers: Sequence[MoELayer], device: Any, tiers: Sequence[Tier]
    ) -> None:
        """Bring all but the experts to the device, and lock what it copies from."""
        self.tiers = list(tiers)
        if device.type != "cuda":
            return
        _leave_shapes(layers, device)
        model.to(device)
        for tier in tiers:
            if isinstance(tier, RamTier):
                tier.pin()

    def _names(self) -> set[str]:
        rows = names_of(find_moe_layers(self._skeleton))
        return {name for row in rows for name in row.values()}

    def _needed(self) -> int:
        """Return the bytes of all experts."""
        return sum(
            tensor.numel() * tensor.element_size()
            for layer in find_moe_layers(self._skeleton)
            for tensor in expert_parameters(layer.experts).values()
        )

    def _stored(self, layers: Sequence[MoELayer]) -> list[dict[str, OnDisk]]:
        """Find where transformers left each layer's experts, and bring them to the model's type."""
        found: list[dict[str, OnDisk]] = []
        for layer in layers:
            weights: Any = layer.experts._hf_hook.weights_map  # type: ignore[union-attr]
            row: dict[str, OnDisk] = {}
            for name, shape in expert_parameters(layer.experts).items():
                entry = weights.dataset.index[f"{weights.prefix}{name}"]
                stored = find_stored(entry["safetensors_file"], entry["weight_name"])
                if stored.dtype != shape.dtype:
                    stored = self._convert(stored, entry["weight_name"], shape.dtype)
                if stored.shape != tuple(shape.shape):
                    raise ValueError(
                        f"store='disk': {stored.file} has {name} of MoE layer {len(found)} as "
                        f"{stored.shape}, the model needs {tuple(shape.shape)}."
                    )
                row[name] = stored
            found.append(row)
        return found

    def _convert(self, stored: Stored, name: str, dtype: torch.dtype) -> Stored:
        assert self._scratch is not None
        with safe_open(stored.file, framework="pt") as file:
            tensor = file.get_tensor(name).to(dtype)
        path = os.path.join(self._scratch, f"{name}.{dtype}.safetensors")
        save_file({name: tensor.contiguous()}, path)
        return find_stored(path, name)


def own_bytes() -> int | None:
    """Return the memory that is this process' alone, without maps of files; None if not told."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    return None if found is None else int(found[1]) * 1024


def device_map(model: nn.Module, experts: set[str], device: str) -> dict[str, str]:
    """Return a place for every part of a model: `disk` for these modules, the device for others.

    Accelerate puts all that lies under a name in one place: parts that hold experts are divided.
    """
    places: dict[str, str] = {}

    def walk(prefix: str, module: nn.Module) -> None:
        inside = f"{prefix}." if prefix else ""
        if prefix in experts:
            places[prefix] = "disk"
        elif not any(path.startswith(inside) for path in experts):
            places[prefix] = device
        else:
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            places.update({inside + name: device for name, _ in own})
            for name, child in module.named_children():
                walk(inside + name, child)

    walk("", model)
    return places


def _leave_shapes(layers: Sequence[MoELayer], device: torch.device) -> None:
    """Replace experts by parameters of their shape that take one number's memory."""
    for layer in layers:
        for name, tensor in expert_parameters(layer.experts).items():
            shape = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
            setattr(layer.experts, name, nn.Parameter(shape, requires_grad=False))
