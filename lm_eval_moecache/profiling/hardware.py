"""Measure the machine this runs on and write it down as a hardware profile.

The host is the processor that this runs on: what `miss=host` computes absent experts with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.profiling._texts import Told, add_options
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.sizes import parse_bandwidth, parse_bytes

ON_DEMAND = "on_demand"
MOST_EDGE = 65536
_LEAST_COPY = 2**16
"""Largest edge of the measured product: beyond it one takes minutes on any device."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str, required=True, help="the profile's file: NAME.yaml")
    add_options(
        parser,
        ("device", "auto", "auto, cpu, cuda, xpu:1 ..."),
        ("dtype", "bfloat16", "compute dtype"),
        ("size", "256MiB", "bytes of one measured copy"),
        ("matmul", 2048, "edge of the measured matrix product (smaller if it is slow)"),
        (
            "pretrained",
            None,
            "decode a model of this shape on the wall clock and measure its overheads",
        ),
        ("policy", ON_DEMAND, "policy whose bookkeeping --pretrained measures"),
        ("bandwidth", None, "throttled link bandwidth for --pretrained"),
    )


def run(arguments: Namespace) -> Told:
    """Measure and write; the profile's `source` names the measurement behind each field."""
    path = profile_path(arguments.out)
    if not 1 <= arguments.matmul <= MOST_EDGE:
        raise ValueError(f"matmul={arguments.matmul} must be 1 or more and at most {MOST_EDGE}.")
    nbytes = parse_bytes(arguments.size, "size", unit="MB", least=_LEAST_COPY)
    wall_options = {"bandwidth": arguments.bandwidth, "policy": arguments.policy}
    for key, value in wall_options.items() if not arguments.pretrained else ():
        if value not in (None, ON_DEMAND):
            raise ValueError(f"{key}={value!r} has no effect without pretrained=.")
    rate = parse_bandwidth(arguments.bandwidth) if arguments.bandwidth else None
    load_policy(arguments.policy)
    try:
        # Only now is torch needed.
        from lm_eval_moecache.profiling._measure import decoding, measure

        place = (arguments.device, arguments.dtype)
        profile = measure(path.stem, *place, nbytes, arguments.matmul)
        if arguments.pretrained:
            profile = decoding(arguments.pretrained, *place, profile, arguments.policy, rate)
    except RuntimeError as error:  # as torch raises for missing memory, among others
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"size={arguments.size!r}, matmul={arguments.matmul}: cannot be measured here: {reason}"
        ) from error
    fields = dataclasses.asdict(profile)
    write_whole(path, as_yaml(fields))
    return fields, as_yaml(fields)


def profile_path(out: str) -> Path:
    """Return the file of a profile to write. Raises ValueError where it is no YAML."""
    path = Path(out)
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"out={out!r} must end in .yaml.")
    return path


def as_yaml(fields: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(fields, sort_keys=False, width=100))
