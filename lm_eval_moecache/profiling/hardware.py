"""Measure the machine this runs on and write it down as a hardware profile.

The host is the processor that this runs on: what `miss=host` computes absent experts with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.setting import TOGETHER
from lm_eval_moecache.profiling._texts import say
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.sizes import parse_bandwidth, parse_bytes

if TYPE_CHECKING:
    pass

ON_DEMAND = "on_demand"
MOST_EDGE = 65536
"""Of the measured product: beyond it one takes minutes on any device."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str, required=True, help="the profile's file: NAME.yaml")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda, xpu:1 ...")
    parser.add_argument("--dtype", type=str, default="bfloat16", help="compute dtype")
    parser.add_argument("--size", type=str, default="256MiB", help="bytes of one measured copy")
    parser.add_argument(
        "--matmul",
        type=int,
        default=2048,
        help="edge of the measured matrix product (smaller if it is slow)",
    )
    parser.add_argument(
        "--pretrained",
        type=str,
        help="decode a model of this shape on the wall clock and measure its overheads",
    )
    text = "policy whose bookkeeping --pretrained measures"
    parser.add_argument("--policy", type=str, default=ON_DEMAND, help=text)
    parser.add_argument("--bandwidth", type=str, help="throttled link bandwidth for --pretrained")
    parser.add_argument(
        "--from",
        type=str,
        nargs="+",
        default=[],
        metavar="FILE",
        help="TRACE MEASURED [TRACE MEASURED ...]: fit the profile to any device's measurements",
    )
    parser.add_argument("--base", type=str | None, help="--from: the profile to begin with")
    parser.add_argument("--capacity", type=str | None, help="--from: cache capacity")
    parser.add_argument("--reads", type=str, default="1", help="--from: reads an expert, per pair")
    parser.add_argument("--tokens", type=str, default=":", help="--from: FIRST:LAST to fit on")
    parser.add_argument("--fit", type=str | None, help="--from: figures to fit, by commas")
    text = "--from: the engine's policy"
    parser.add_argument("--policy_of", type=str, default="on_demand", help=text)
    parser.add_argument("--eviction", type=str, default="lru", help="--from: the engine's eviction")
    text = "--from: the engine's execution order"
    parser.add_argument("--execute", type=str, default=TOGETHER, help=text)


def run(arguments: Namespace) -> int:
    """Measure and write; what was measured is said in `source`, field by field."""
    path = Path(arguments.out)
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"out={arguments.out!r} must end in .yaml.")
    if not 1 <= arguments.matmul <= MOST_EDGE:
        raise ValueError(f"matmul={arguments.matmul} must be 1 or more and at most {MOST_EDGE}.")
    if getattr(arguments, "from"):
        from lm_eval_moecache.profiling._fit import fit_to_files

        profile, report = fit_to_files(path.stem, arguments)
        fields = {k: v for k, v in dataclasses.asdict(profile).items() if v is not None}
        write_whole(path, _as_yaml(fields))
        say(report, [_as_yaml(report).rstrip("\n")], arguments.json)
        return 0
    nbytes = parse_bytes(arguments.size, "size")
    of_model = {"bandwidth": arguments.bandwidth, "policy": arguments.policy}
    for key, value in of_model.items() if not arguments.pretrained else ():
        if value not in (None, ON_DEMAND):
            raise ValueError(f"{key}={value!r} has no effect without pretrained=.")
    rate = parse_bandwidth(arguments.bandwidth) if arguments.bandwidth else None
    load_policy(arguments.policy)
    try:
        # Only now is torch needed.
        from lm_eval_moecache.profiling._measure import decoding, measure

        where = (arguments.device, arguments.dtype)
        profile = measure(path.stem, *where, nbytes, arguments.matmul)
        if arguments.pretrained:
            profile = decoding(arguments.pretrained, *where, profile, arguments.policy, rate)
    except RuntimeError as error:  # torch's word for memory that is not there, among others
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"size={arguments.size!r}, matmul={arguments.matmul}: cannot be measured here: {reason}"
        ) from error
    fields = dataclasses.asdict(profile)
    write_whole(path, _as_yaml(fields))
    say(fields, [_as_yaml(fields).rstrip("\n")], arguments.json)
    return 0


def _as_yaml(fields: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(fields, sort_keys=False, width=100))
