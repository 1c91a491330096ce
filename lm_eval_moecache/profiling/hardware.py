"""The action `moecache profile hardware`, and how profiles are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.records.command import Report
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.sizes import parse_bandwidth, parse_bytes

ON_DEMAND = "on_demand"
MOST_EDGE = 65536
_LEAST_COPY = 2**16
"""Largest edge of the measured product: beyond it one takes minutes on any device."""


def profile_hardware(
    *,
    out: str,
    device: str = "auto",
    dtype: str = "bfloat16",
    size: str = "256MiB",
    matmul: int = 2048,
    pretrained: str | None = None,
    policy: str = ON_DEMAND,
    bandwidth: str | None = None,
) -> Report:
    """Measure the machine this runs on and write it down as a hardware profile.

    The host is the processor that this runs on: what `miss=host` computes absent experts with. The
    profile's `source` names the measurement behind each field.

    Args:
        out: the profile's file: NAME.yaml
        device: auto, cpu, cuda, xpu:1 ...
        dtype: compute dtype
        size: bytes of one measured copy
        matmul: edge of the measured matrix product (smaller if it is slow)
        pretrained: decode a model of this shape on the wall clock and measure its overheads
        policy: policy whose bookkeeping --pretrained measures
        bandwidth: throttled link bandwidth for --pretrained
    """
    path = profile_path(out)
    if not 1 <= matmul <= MOST_EDGE:
        raise ValueError(f"matmul={matmul} must be 1 or more and at most {MOST_EDGE}.")
    nbytes = parse_bytes(size, "size", unit="MB", least=_LEAST_COPY)
    wall_options = {"bandwidth": bandwidth, "policy": policy}
    for key, value in wall_options.items() if not pretrained else ():
        if value not in (None, ON_DEMAND):
            raise ValueError(f"{key}={value!r} has no effect without pretrained=.")
    rate = parse_bandwidth(bandwidth) if bandwidth else None
    load_policy(policy)
    try:
        # Only now is torch needed.
        from lm_eval_moecache.profiling._measure import decoding, measure

        place = (device, dtype)
        profile = measure(path.stem, *place, nbytes, matmul)
        if pretrained:
            profile = decoding(pretrained, *place, profile, policy, rate)
    except RuntimeError as error:  # as torch raises for missing memory, among others
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"size={size!r}, matmul={matmul}: cannot be measured here: {reason}"
        ) from error
    fields = dataclasses.asdict(profile)
    write_whole(path, as_yaml(fields))
    return Report(fields, as_yaml(fields))


def profile_path(out: str) -> Path:
    """Return the file of a profile to write. Raises ValueError where it is no YAML."""
    path = Path(out)
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"out={out!r} must end in .yaml.")
    return path


def as_yaml(fields: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(fields, sort_keys=False, width=100))
