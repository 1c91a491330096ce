"""Say what a device can do with a model: what fits, in which regime, and at which speed."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from pytablewriter import MarkdownTableWriter

from lm_eval_moecache.analysis.plan import Fit, fit, speeds, stand_in
from lm_eval_moecache.records.emulation import RealModel, emulated_names, load_real_model
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.records.numbers import read_count
from lm_eval_moecache.trace.importers import load_trace


def add_arguments(parser: ArgumentParser) -> None:
    names = ", ".join(emulated_names())
    parser.add_argument("model", type=str, help=f"{names}; or a folder or YAML with its sizes")
    parser.add_argument("--hardware", type=str, default="rtx-4090", help="profile, or YAML")
    parser.add_argument("--bandwidth", type=str | None, help="replaces the profile's: '5GB/s'")
    parser.add_argument("--context", type=int, default=4096, help="tokens that the KV cache holds")
    parser.add_argument(
        "--trace", type=str | None, help="what is routed; default: the nearest shipped trace"
    )


def run(arguments: Namespace) -> int:
    context = read_count("--context", arguments.context, least=1)
    model = load_real_model(arguments.model, key="model")
    hardware = load_hardware(arguments.hardware, arguments.bandwidth)
    room = fit(model, hardware, context)
    path = arguments.trace or str(stand_in(model))
    trace = load_trace(path)
    rows = list(speeds(model, hardware, room, trace))
    routed = trace.geometry.model
    if arguments.json:
        found = {
            "model": model.name,
            "hardware": hardware.name,
            "context": context,
            "fit": {**dataclasses.asdict(room), "share": room.share},
            "routing": routed,
            "rows": rows,
        }
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        sys.stdout.write(_text(model, hardware, room, context, routed, rows))
    return 0


def _text(
    model: RealModel,
    hardware: Hardware,
    room: Fit,
    context: int,
    routed: str,
    rows: list[dict[str, Any]],
) -> str:
    gib = 1e9
    writer = MarkdownTableWriter()
    writer.headers = ["Capacity", "GB", "Cycles", "Policy", "Decode miss", "tok/s", "Bound by"]
    writer.value_matrix = [
        [
            row["capacity"],
            f"{row['capacity_bytes'] / gib:.2f}",
            f"{row['capacity_cycles']:.2f}",
            row["policy"],
            f"{row['decode_miss_rate']:.3f}",
            f"{row['tok_per_s']:.1f}",
            row["bound"],
        ]
        for row in rows
    ]
    return "\n".join(
        [
            f"{model.name} on {hardware.name}, link {hardware.link_bytes_per_s / 1e9:g} GB/s",
            f"memory {room.memory / gib:.1f} GB = dense weights {room.dense / gib:.1f}"
            f" + KV cache of {context} tokens {room.kv_cache / gib:.1f}"
            f" + experts {room.experts / gib:.1f} of {room.all_experts / gib:.1f}"
            f" ({100 * room.share:.0f}%), activations left out",
            f"one expert's transfer: {rows[0]['transfer_per_layer']:.3g} layers of decoding",
            writer.dumps(),
            f"Routing of {routed}, replayed; its layers charged as {model.name}'s.",
            "",
        ]
    )
