"""The device of a run, resolved once: every check and every load is told the same one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env


def resolve_device(theirs: Mapping[str, Any]) -> str:
    """Return the device that HFLM would put the model on, given its arguments.

    lm-eval's command line asks for `cuda:0` by itself, and HFLM takes a device that the machine
    does not have as none given: then it is CUDA where there is CUDA, and else the CPU. Several
    processes of `accelerate launch` get theirs from accelerate; of theirs the type is known here.
    Raises ValueError for a text that names no device.
    """
    best = "cuda" if torch.cuda.is_available() else "cpu"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return "cpu" if parse_flag_from_env("ACCELERATE_USE_CPU") else best
    asked = theirs.get("device")
    if asked is None:
        return best
    try:
        device = torch.device(str(asked))
    except RuntimeError as error:
        raise ValueError(
            f"device={asked!r} is not the name of a device. Allowed: cpu, cuda, cuda:N, mps."
        ) from error
    return str(device) if _is_here(device) else best


def _is_here(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    accelerator = getattr(torch, device.type, None)
    if device.type == "mps":
        return torch.backends.mps.is_available()
    if accelerator is None or not hasattr(accelerator, "is_available"):
        return False
    return bool(accelerator.is_available()) and (device.index or 0) < accelerator.device_count()
