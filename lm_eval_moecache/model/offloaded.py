"""Parameters of models that accelerate offloads: on the meta device but during a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def is_hooked(module: nn.Module) -> bool:
    """Whether accelerate brings this module's inputs and weights together at each call."""
    return hasattr(module, "_hf_hook")


def value_of(module: nn.Module, name: str) -> Tensor:
    """Return a module's own parameter or buffer, from where it is kept if it is not there now."""
    tensor: Tensor = getattr(module, name)
    if not tensor.is_meta or not is_hooked(module):
        return tensor
    hook: Any = module._hf_hook
    for each in getattr(hook, "hooks", (hook,)):
        if getattr(each, "weights_map", None) is not None:
            kept: Tensor = each.weights_map[name]
            return kept
    return tensor


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Walk what `state_dict` holds, by name, with the values of what is offloaded."""
    found = dict(module.state_dict())
    for prefix, part in module.named_modules():
        own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        for name, _ in own:
            path = f"{prefix}.{name}" if prefix else name
            if path in found and found[path].is_meta:
                found[path] = value_of(part, name)
    yield from sorted(found.items())
