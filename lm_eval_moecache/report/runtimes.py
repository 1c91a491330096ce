"""What to run on a machine: each runtime's placement, flags, speed and range for a model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from lm_eval_moecache.engine.forecast import (
    SYSTEM,
    Forecast,
    Machine,
    Placed,
    Placement,
    automatic,
    forecast,
    hit_rate,
    machine,
    place,
    prefill_tok_per_s,
    prompt_work,
    read_placement,
    room,
    stored_for,
)
from lm_eval_moecache.records.emulation import RealModel
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.runtime import (
    BOTH,
    COPY,
    HOST,
    LAYER,
    READ,
    RESIDENT,
    Runtime,
    load_runtime,
    mechanisms,
)
from lm_eval_moecache.records.sizes import parse_bandwidth, parse_bytes
from lm_eval_moecache.records.stored import load_stored
from lm_eval_moecache.report.speeds import rate, read_rows, scale_by, speed

ON_CARDS = (
    *("llama.cpp", "ik_llama.cpp", "llama.cpp-expert-cache", "ktransformers", "freetoken"),
    *("imp", "vllm", "accelerate"),
)
ON_UNIFIED = ("llama.cpp", "mlx", "slotstream", "ds4", "flash-moe")
ON_PHONES = ("bigmoeonedge",)
_PHONE_FLOPS = 1e12
"""A device with unified memory and less is a phone."""
_FEW_BITS = 6.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What a user says of a machine; None where the profile's figures or assumptions stand."""

    cards: int = 1
    ram: float | None = None
    host: float | None = None
    disk: float | None = None
    link: float | None = None
    measured: str | None = None
    """`RUNTIME PLACEMENT TOK_S` of this model on this machine, or a CSV of speeds."""


def known(
    *,
    cards: int,
    ram: str | None,
    host_memory: str | None,
    disk: str | None,
    bandwidth: str | None,
    measured: str | None,
) -> Known:
    """Read the options. Raises ValueError naming the option."""
    return Known(
        cards=cards,
        ram=None if ram is None else parse_bytes(ram, "ram"),
        host=None if host_memory is None else rate(host_memory, "host_memory"),
        disk=None if disk is None else rate(disk, "disk"),
        link=None if bandwidth is None else parse_bandwidth(bandwidth),
        measured=measured,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What a measurement on the user's machine says: measured over forecast, and a drive's rate."""

    ratio: float = 1.0
    drive: float | None = None
    text: str = ""


def advise(
    model: RealModel, hardware: Hardware, given: Known, context: int, prompt: int
) -> dict[str, Any]:
    """Return the runtimes' rows, what was assumed, and the line that says what to run."""
    scale = read_measured(model, hardware, given, context)
    names: tuple[str, ...] = ON_UNIFIED if hardware.is_unified else ON_CARDS
    if hardware.is_unified and hardware.peak_flops < _PHONE_FLOPS:
        names = ON_PHONES
    runtimes = [load_runtime(name) for name in names]
    rows = [
        row_of(model, hardware, given, runtime, scale, context, prompt)
        for runtime in runtimes
        if re.search(runtime.models, model.name.lower())
    ]
    running = [row for row in rows if row["tok_per_s"] is not None]
    assumed = [
        text
        for text in machine_of(hardware, given, load_runtime(names[0])).assumed
        if any(row["needs_drive"] for row in running)
        or (not text.startswith("drive") and any(row["mechanism"] != RESIDENT for row in running))
    ]
    alone = cpu_alone(model, hardware, given, scale, context)
    return {
        "runtimes": rows,
        "assumed": assumed,
        "measured": scale.text or None,
        "cpu_alone_tok_per_s": alone,
        "first": first_line(model, running, alone)
        + raised(model, hardware, given, running, context),
    }


def usual_precision(model: RealModel, hardware: Hardware, cards: int, context: int) -> RealModel:
    """Return a model in the bits that people run it in: as published where all of it fits, or
    where it has few bits, else Q4_K_M."""
    box = machine(hardware, load_runtime("llama.cpp"), cards=cards)
    fits = room(model, box, context) >= model.all_expert_bytes
    if model.stored.expert_bits <= _FEW_BITS or fits:
        return model
    return replace(model, stored=load_stored("q4_k_m"))


def raised(
    model: RealModel,
    hardware: Hardware,
    given: Known,
    rows: Sequence[Mapping[str, Any]],
    context: int,
) -> str:
    """Return what a Mac would do whose GPU may take all memory but the system's."""
    if not (hardware.is_unified and hardware.peak_flops >= _PHONE_FLOPS):
        return ""
    if not rows or rows[0]["mechanism"] == RESIDENT:
        return ""
    runtime = load_runtime("llama.cpp")
    box = machine_of(hardware, given, runtime)
    box = replace(box, card_bytes=box.ram - SYSTEM)
    if automatic(model, box, runtime, context).kind != RESIDENT:
        return ""
    placed = place(model, box, runtime, Placement(kind=RESIDENT), context)
    speed = forecast(model, box, runtime, placed, context).tok_per_s
    limit = math.floor(box.card_bytes / 2**20)
    return (
        f" All of it fits, at {two_digits(speed)} tok/s, where the GPU may take more of the "
        f"memory: sudo sysctl iogpu.wired_limit_mb={limit}."
    )


def machine_of(hardware: Hardware, given: Known, runtime: Runtime) -> Machine:
    """Return the machine with what is known of it."""
    return machine(
        hardware,
        runtime,
        cards=given.cards,
        host=given.host,
        link=given.link,
        drive=given.disk,
        ram=given.ram,
    )


def row_of(
    model: RealModel,
    hardware: Hardware,
    given: Known,
    runtime: Runtime,
    scale: Scale,
    context: int,
    prompt: int,
) -> dict[str, Any]:
    """Return one runtime's row; `tok_per_s` is None, with the reason, where it cannot run."""
    found = machine_of(hardware, given, runtime)
    row: dict[str, Any] = {
        "runtime": runtime.name,
        **dict.fromkeys(("flags", "placement", "mechanism", "tok_per_s", "low", "high")),
        **dict.fromkeys(("ttft_s", "ttft_low_s", "ttft_high_s", "needs_drive", "why")),
    }
    model = stored_for(runtime, model)
    try:
        placed = settled(model, found, runtime, context)
    except ValueError as error:
        return {**row, "why": str(error)}
    if placed.mechanism == LAYER:
        row["why"] = "each token would copy whole layers: choose bits that fit"
    got = scaled(model, found, runtime, placed, scale, context, _is_stated(placed, given))
    work = prompt_work(model, found, runtime, placed, prompt)
    first = {}
    if work is not None:
        spread = mechanisms().spreads.get("prefill")
        seconds = prompt / prefill_tok_per_s(work, prompt, runtime)
        if spread is not None:
            first = {
                "ttft_s": seconds,
                "ttft_low_s": seconds / spread.high,
                "ttft_high_s": seconds / spread.low,
            }
    return {
        **row,
        **first,
        "flags": flags(model, runtime, placed),
        "placement": str(placed.placement),
        "mechanism": placed.mechanism,
        "tok_per_s": got.tok_per_s,
        "low": got.low,
        "high": got.high,
        "needs_drive": placed.mechanism == READ,
    }


def settled(model: RealModel, machine: Machine, runtime: Runtime, context: int) -> Placed:
    """Return where the runtime puts the model, the drive included where RAM is too small.

    Raises ValueError where it cannot run.
    """
    is_unified = machine.host_bytes_per_s is None
    if runtime.devices == "card" and is_unified:
        raise ValueError("needs a card of its own memory")
    placement = automatic(model, machine, runtime, context)
    if placement.kind == "slots" and placement.amount < 1:
        raise ValueError("no expert fits on the card")
    placed = place(model, machine, runtime, placement, context)
    every = model.all_expert_bytes
    absent = (1 - placed.cached) * every
    if placed.mechanism == RESIDENT or not absent:
        return placed
    if placed.mechanism == READ and not is_unified and machine.card_bytes_per_s:
        return placed
    if is_unified:
        # The processor may use more of the one memory than the card: what is absent from both
        # lies on the drive.
        held = (machine.ram - SYSTEM - model.dense_bytes - model.kv_bytes(context)) / every
        held = max(held, placed.cached)
        if held >= 1 and placed.mechanism == HOST:
            return placed
        return _from_drive(model, placed, held, by_faults=runtime.absent != READ)
    # A program that copies, or maps its file without locking it, needs RAM for what is absent.
    dense = model.dense_bytes if placed.placement.kind == "cpu" else 0
    space = machine.ram - SYSTEM - dense
    if absent <= space:
        return placed
    if placed.mechanism in (COPY, LAYER):
        raise ValueError(
            f"needs {(absent + SYSTEM) / 1e9:.0f} GB of RAM, and there are {machine.ram / 1e9:.0f}"
        )
    held = placed.cached + max(space, 0.0) / every
    return _from_drive(model, placed, held, by_faults=True)


def _from_drive(model: RealModel, placed: Placed, held: float, *, by_faults: bool) -> Placed:
    hit = hit_rate(model, min(held, 1.0))
    return replace(placed, mechanism=READ, on_host=0.0, moved=1 - hit, hit=hit, by_faults=by_faults)


def _is_stated(placed: Placed, given: Known) -> bool:
    """Whether the user gave what matters most to the mechanism."""
    match placed.mechanism:
        case "resident":
            return True
        case "host":
            return given.host is not None
    return False


def scaled(
    model: RealModel,
    machine: Machine,
    runtime: Runtime,
    placed: Placed,
    scale: Scale,
    context: int,
    is_stated: bool,
) -> Forecast:
    """Return the forecast, scaled by a measurement on the same machine where there is one."""
    if scale.drive is not None:
        machine = replace(machine, drive_bytes_per_s=scale.drive)
    found = forecast(model, machine, runtime, placed, context, is_stated=is_stated)
    if not scale.text:
        return found
    parts = found.work.seconds(mechanisms().constants)
    drive = parts.pop("drive")
    tok_per_s = 1 / (sum(parts.values()) / scale.ratio + drive)
    name = "measured" if placed.mechanism != READ else "read, measured"
    spread = mechanisms().spreads.get(name)
    low, high = found.low / found.tok_per_s, found.high / found.tok_per_s
    if spread is not None and (placed.mechanism != READ or scale.drive is not None):
        low, high = max(low, spread.low), min(high, spread.high)
    return replace(found, tok_per_s=tok_per_s, low=tok_per_s * low, high=tok_per_s * high)


def read_measured(model: RealModel, hardware: Hardware, given: Known, context: int) -> Scale:
    """Return what `--measured` says. Raises ValueError where it cannot be read.

    Decoding scales by measured over forecast; where the drive is read, the difference is the
    drive's. Of a CSV, the geometric means over its rows, whatever models they have.
    """
    text = given.measured
    if text is None:
        return Scale()
    if text.endswith(".csv"):
        rows, _ = read_rows(Path(text))
        ratios, drives = [], []
        for row in rows:
            if row.decode is None:
                continue
            parts = row.forecast().work.seconds(mechanisms().constants)
            on_drive = parts["drive"]
            rest = sum(parts.values()) - on_drive
            ratio, share = scale_by(row.decode / row.runtime.factor, rest, on_drive)
            if on_drive and share != 1:
                drives.append(math.log(row.machine.drive_bytes_per_s * share))
            else:
                ratios.append(math.log(ratio))
        if not ratios and not drives:
            raise ValueError(f"measured={text!r} has no row with a decode speed that is forecast.")
        return Scale(
            ratio=math.exp(mean(ratios)) if ratios else 1.0,
            drive=math.exp(mean(drives)) if drives else None,
            text=f"{len(ratios) + len(drives)} measured rows of {text}",
        )
    match = re.fullmatch(
        r"(?P<runtime>.+?)(?: (?P<placement>[a-z_]+(?:=\S+)?))? (?P<speed>[\d.]+)", text.strip()
    )
    value = speed(match["speed"]) if match else None
    if match is None or value is None:
        raise ValueError(
            f"measured={text!r} is not a measurement. Allowed: RUNTIME PLACEMENT TOK_S, like "
            "'llama.cpp host_layers=all 21.3', or a CSV of `moecache validate --speeds`."
        )
    runtime = load_runtime(match["runtime"])
    model = stored_for(runtime, model)
    found = machine_of(hardware, given, runtime)
    where = read_placement(match["placement"] or "auto", "measured")
    if where.kind == "auto":
        placed = settled(model, found, runtime, context)
    else:
        placed = place(model, found, runtime, where, context)
    got = forecast(model, found, runtime, placed, context)
    parts = got.work.seconds(mechanisms().constants)
    drive = parts["drive"]
    rest = sum(parts.values()) - drive
    said = f"measured {runtime.name} {placed.placement}: {value:g} tok/s"
    ratio, share = scale_by(value, rest, drive)
    return Scale(
        ratio=ratio, drive=None if share == 1 else found.drive_bytes_per_s * share, text=said
    )


def cpu_alone(
    model: RealModel, hardware: Hardware, given: Known, scale: Scale, context: int
) -> float | None:
    """Return the speed of the host's processor alone, None where its RAM is too small."""
    runtime = load_runtime("llama.cpp")
    model = stored_for(runtime, model)
    found = machine_of(hardware, given, runtime)
    needed = model.all_expert_bytes + model.dense_bytes + model.kv_bytes(context) + SYSTEM
    if found.host_bytes_per_s is None or needed > found.ram:
        return None
    placed = place(model, found, runtime, Placement(kind="cpu"), context)
    return scaled(model, found, runtime, placed, scale, context, is_stated=False).tok_per_s


def flags(model: RealModel, runtime: Runtime, placed: Placed) -> str:
    """Return the flags that a user types for this placement."""
    if placed.mechanism == RESIDENT:
        return runtime.resident_flags
    kind, amount = placed.placement.kind, placed.placement.amount
    host_layers = math.ceil(amount) if kind == "host_layers" else model.num_layers
    slots = math.floor(placed.cached * model.num_experts)
    cache = placed.cached * model.all_expert_bytes
    # What RAM cannot hold must stay a mapped file.
    text = runtime.flags.replace(" --no-mmap", "") if placed.by_faults else runtime.flags
    return text.format(
        host_layers=host_layers,
        gpu_layers=model.num_layers - host_layers,
        slots=slots,
        cache_gib=f"{cache / 2**30:.0f}",
        cache_mib=f"{cache / 2**20:.0f}",
        cpu_gib=f"{(1 - placed.cached) * model.all_expert_bytes / 2**30:.0f}",
        memory_gb=f"{(cache + model.dense_bytes) / 1e9:.0f}",
    )


def two_digits(number: float) -> str:
    """Return a number to two significant digits, without an exponent."""
    if number == 0:
        return "0"
    rounded = float(f"{number:.2g}")
    return f"{rounded:.0f}" if rounded >= 10 else f"{rounded:#.2g}"


def ranged(row: Mapping[str, Any]) -> str:
    """Return `27 tok/s (21 to 34)`."""
    low, high = two_digits(row["low"]), two_digits(row["high"])
    return f"{two_digits(row['tok_per_s'])} tok/s ({low} to {high})"


def first_line(model: RealModel, rows: Sequence[Mapping[str, Any]], alone: float | None) -> str:
    """Return what to run, with which flags, how fast, and in which range."""
    by_name = {row["runtime"]: row for row in rows}
    usual = by_name.get("llama.cpp") or (rows[0] if rows else None)
    if usual is None:
        return f"No runtime known here runs {model.name} on this machine."
    if usual["needs_drive"] and (
        better := [row for row in rows if row["tok_per_s"] > 1.5 * usual["tok_per_s"]]
    ):
        usual = max(better, key=lambda row: row["tok_per_s"])
    if alone is not None and usual["mechanism"] == HOST and alone > usual["tok_per_s"]:
        return (
            f"llama.cpp -ngl 0: {two_digits(alone)} tok/s; do not split: the card beside it makes "
            f"{two_digits(usual['tok_per_s'])}."
        )
    text = f"{usual['runtime']} {usual['flags']}".rstrip() + f": {ranged(usual)}"
    if usual["mechanism"] == RESIDENT:
        return f"{text}; all of it fits."
    if usual["needs_drive"]:
        text += "; RAM is too small, and the drive decides"
    cache = by_name.get("llama.cpp-expert-cache")
    if cache is not None and cache["mechanism"] == BOTH and cache["tok_per_s"] > usual["tok_per_s"]:
        low, high = two_digits(cache["low"]), two_digits(cache["high"])
        text += f"; with a cache of experts {low} to {high}"
    return f"{text}."
