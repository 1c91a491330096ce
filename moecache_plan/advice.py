"""What to run on a machine: each runtime's placement, flags, speed and range for a model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lm_eval_moecache.emulate.stored import load_stored
from lm_eval_moecache.records.numbers import plain_number
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.runtimes import (
    BOTH,
    COPY,
    HOST,
    LAYER,
    READ,
    RESIDENT,
    Runtime,
    load_runtime,
)
from moecache_plan.forecast import (
    Forecast,
    forecast,
    prefill_tok_per_s,
    prompt_work,
    scale_by,
)
from moecache_plan.machines import CUDA, METAL, PHONE, SYSTEM, Machine, with_overrides
from moecache_plan.mechanisms import PROCESSOR, PROMPTS, mechanisms
from moecache_plan.placement import (
    AUTO,
    Placed,
    Placement,
    automatic,
    place,
    read_placement,
    room,
    settled,
    stored_for,
)

ON_CARDS = (
    *("llama.cpp", "ik_llama.cpp", "llama.cpp-expert-cache", "ktransformers", "freetoken"),
    *("imp", "vllm", "accelerate"),
)
ON_MACS = ("llama.cpp", "mlx", "slotstream", "ds4", "flash-moe")
ON_SHARED = ("llama.cpp", "ollama")
"""Programs of chips whose card shares the memory, and that are no Macs."""
ON_PHONES = ("bigmoeonedge",)
ON_PROCESSORS = ("llama.cpp", "ik_llama.cpp", "ollama")
_USUAL_ON = {PROCESSOR: ON_PROCESSORS, PHONE: ON_PHONES, METAL: ON_MACS}
_FEW_BITS = 6.0
_USUAL = ("q4_k_m", "q3_k_m", "q2_k")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What a measurement on the user's machine says: measured over forecast, and a drive's rate."""

    ratio: float = 1.0
    drive: float | None = None
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What is asked: a model with so many tokens of context and of prompt, on a machine."""

    model: RealModel
    machine: Machine
    context: int
    prompt: int
    scale: Scale = field(default_factory=Scale)
    placement: Placement | None = None
    """Where the user puts experts; None for the best that fits."""

    @property
    def is_mac(self) -> bool:
        """Whether it is a Mac, as every device that shares memory and whose chip is not known."""
        return usual_runtimes(self.machine) == ON_MACS


def usual_runtimes(machine: Machine) -> tuple[str, ...]:
    """Return the programs that people have on such a machine."""
    return _USUAL_ON.get(machine.platform, ON_SHARED if machine.is_unified else ON_CARDS)


def asked_runtimes(machine: Machine, names: Sequence[str]) -> list[Runtime]:
    """Return these programs, or else the usual ones that have kernels for the machine.

    Raises ValueError for one that is asked for and has none.
    """
    found = [load_runtime(name) for name in names or usual_runtimes(machine)]
    for runtime in found if names else ():
        if not machine.runs(runtime):
            usual = ", ".join(each.name for each in asked_runtimes(machine, ()))
            raise ValueError(
                f"runtime={runtime.name!r} does not run on {machine.title} ({machine.platform}), "
                f"but on {', '.join(map(_kernels, runtime.runs_on))} ({runtime.source}). Allowed: "
                f"{usual}."
            )
    return [runtime for runtime in found if machine.runs(runtime)]


def _kernels(entry: str) -> str:
    """Return one of `Runtime.runs_on` in words."""
    platform, _, rule = entry.partition(" ")
    some = f"of compute capability {rule} and more" if platform == CUDA else "of some cards"
    return f"{platform} {some}" if rule else platform


def advise(
    setup: Setup,
    *,
    measured: str | None = None,
    runtimes: Sequence[str] = (),
    placement: str | None = None,
) -> dict[str, Any]:
    """Return the runtimes' rows, what was assumed, and the line that says what to run.

    `measured` is a `RUNTIME PLACEMENT TOK_S` of this model on this machine, `runtimes` the
    programs that are asked for, by default those that such a machine has, and `placement` what
    their user types. Raises ValueError for a program without a profile, or a placement that none
    of them has.
    """
    if measured is not None:
        setup = replace(setup, scale=read_measured(setup, measured))
    asked = asked_runtimes(setup.machine, runtimes)
    if placement is not None and (where := read_placement(placement)).kind != AUTO:
        setup = replace(setup, placement=where)
        names = ", ".join(each.name for each in asked)
        asked = [each for each in asked if has_placement(each, where)]
        if not asked:
            raise ValueError(
                f"placement={placement!r} is none of {names}. Allowed: host_layers=N, "
                "gpu_layers=N, resident and cpu of llama.cpp, resident_experts=N of "
                "ktransformers, slots=N and cache=8GiB of programs with a cache of experts."
            )
    name = setup.model.name.lower()
    rows = [row_of(setup, runtime) for runtime in asked if re.search(runtime.models, name)]
    running = [row for row in rows if row["tok_per_s"] is not None]
    reads = any(row["needs_drive"] for row in running)
    is_whole = all(row["mechanism"] == RESIDENT for row in running)
    assumed = [
        text
        for text in setup.machine.assumed(asked[0])
        if text.startswith("memory") or reads or not (text.startswith("drive") or is_whole)
    ]
    alone = cpu_alone(setup) if setup.placement is None else None
    return {
        "runtimes": rows,
        "assumed": assumed,
        "measured": setup.scale.text or None,
        "cpu_alone_tok_per_s": alone,
        "first": first_line(setup.model, running, alone) + raised(setup, running),
    }


def usual_precision(model: RealModel, machine: Machine, context: int) -> RealModel:
    """Return a model in the bits that people run it in, however it was named.

    As published where all of it fits, or where it has few bits and its dense weights fit; else the
    first of `_USUAL` whose dense weights do. A file that is quantized stays as it is.
    """
    left, is_small = room(model, machine, context), model.stored.expert_bits <= _FEW_BITS
    if model.is_as_stored or left >= model.all_expert_bytes or (is_small and left > 0):
        return model
    # Experts of few bits stay, if only the rest is too large.
    names = ("mxfp4_moe", *_USUAL) if model.stored.name == "mxfp4" else _USUAL
    smaller = [replace(model, stored=load_stored(name)) for name in names]
    runs = [each for each in smaller if room(each, machine, context) > 0]
    return (runs or smaller)[0]


def raised(setup: Setup, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what a Mac would do whose GPU may take all memory but the system's."""
    if not setup.is_mac or not rows or rows[0]["mechanism"] == RESIDENT:
        return ""
    model, context, runtime = setup.model, setup.context, load_runtime("llama.cpp")
    machine = replace(setup.machine, memory_bytes=setup.machine.ram - SYSTEM)
    if automatic(model, machine, runtime, context).kind != RESIDENT:
        return ""
    placed = place(model, machine, runtime, Placement(kind=RESIDENT), context)
    tok_per_s = forecast(model, machine, runtime, placed, context).tok_per_s
    limit = math.floor(machine.memory_bytes / 2**20)
    return (
        f" All of it fits, at {two_digits(tok_per_s)} tok/s, where the GPU may take more of the "
        f"memory: sudo sysctl iogpu.wired_limit_mb={limit}."
    )


def row_of(setup: Setup, runtime: Runtime) -> dict[str, Any]:
    """Return one runtime's row; `tok_per_s` is None, with the reason, where it cannot run."""
    row: dict[str, Any] = {
        "runtime": runtime.name,
        **dict.fromkeys(("flags", "placement", "mechanism", "tok_per_s", "low", "high")),
        **dict.fromkeys(("range", "ttft_s", "ttft_low_s", "ttft_high_s", "needs_drive", "why")),
    }
    model, machine = stored_for(runtime, setup.model), setup.machine
    try:
        placed = settled(model, machine, runtime, setup.context, setup.placement)
    except ValueError as error:
        return {**row, "why": str(error)}
    if placed.mechanism == LAYER:
        row["why"] = "they would copy whole layers for each token; use fewer bits"
    got = scaled(setup, runtime, placed)
    work = prompt_work(model, machine, runtime, placed, setup.prompt)
    spread = mechanisms().spreads.get(PROMPTS[placed.group == PROCESSOR])
    if work is not None and spread is not None:
        seconds = setup.prompt / prefill_tok_per_s(work, setup.prompt, runtime)
        row["ttft_s"] = seconds
        row |= {"ttft_low_s": seconds / spread.reach, "ttft_high_s": seconds * spread.reach}
    return {
        **row,
        "flags": flags(setup.model, machine, runtime, placed),
        "placement": str(placed.placement),
        "mechanism": placed.mechanism,
        "tok_per_s": got.tok_per_s,
        "low": got.ends[0],
        "high": got.ends[1],
        "range": str(got.spread),
        "needs_drive": placed.mechanism == READ,
    }


def scaled(setup: Setup, runtime: Runtime, placed: Placed) -> Forecast:
    """Return the forecast, scaled by a measurement on the same machine where there is one."""
    model, machine, scale = stored_for(runtime, setup.model), setup.machine, setup.scale
    # Whether the user gave what matters most to the mechanism.
    is_stated = placed.mechanism == RESIDENT
    if placed.mechanism == HOST:
        is_stated = machine.is_host_given
    if scale.drive is not None:
        machine = with_overrides(machine, drive=scale.drive)
    found = forecast(model, machine, runtime, placed, setup.context, is_stated=is_stated)
    if not scale.text:
        return found
    parts = found.work.seconds(mechanisms().constants)
    drive = parts.pop("drive")
    tok_per_s = 1 / (sum(parts.values()) / scale.ratio + drive)
    spread = mechanisms().spreads.get(f"{placed.group}, measured")
    usual = found.spread
    if spread is None or (placed.mechanism == READ and scale.drive is None):
        spread = usual
    spread = min(spread, usual, key=lambda each: each.reach)
    return replace(found, tok_per_s=tok_per_s, spread=spread)


def read_measured(setup: Setup, text: str) -> Scale:
    """Return what `--measured` says. Raises ValueError where it cannot be read.

    Decoding scales by measured over forecast; where the drive is read, the difference is the
    drive's.
    """
    match = re.fullmatch(
        r"(?P<runtime>.+?)(?: (?P<placement>[a-z_]+(?:=\S+)?))? (?P<speed>[\d.]+)", text.strip()
    )
    value = plain_number(match["speed"]) if match else None
    if match is None or not value:
        raise ValueError(
            f"measured={text!r} is not a measurement. Allowed: RUNTIME PLACEMENT TOK_S, like "
            "'llama.cpp host_layers=all 21.3'."
        )
    runtime = load_runtime(match["runtime"])
    model = stored_for(runtime, setup.model)
    where = read_placement(match["placement"] or AUTO, "measured")
    if where.kind == AUTO:
        placed = settled(model, setup.machine, runtime, setup.context)
    else:
        placed = place(model, setup.machine, runtime, where, setup.context)
    got = forecast(model, setup.machine, runtime, placed, setup.context)
    parts = got.work.seconds(mechanisms().constants)
    drive_s = parts.pop("drive")
    ratio, share = scale_by(value, sum(parts.values()), drive_s)
    assumed = " (assumed)" if where.kind == AUTO else ""
    said = f"measured {runtime.name} {placed.placement}{assumed}: {value:g} tok/s"
    drive = None if share == 1 else setup.machine.drive_rate * share
    return Scale(ratio=ratio, drive=drive, text=said)


def cpu_alone(setup: Setup) -> float | None:
    """Return the speed of the host's processor alone, None where its RAM is too small."""
    runtime, context, machine = load_runtime("llama.cpp"), setup.context, setup.machine
    model = stored_for(runtime, setup.model)
    needed = model.all_expert_bytes + model.dense_bytes + model.kv_bytes(context) + SYSTEM
    if machine.is_unified or needed > machine.ram:
        return None
    placed = place(model, machine, runtime, Placement(kind="cpu"), context)
    return scaled(setup, runtime, placed).tok_per_s


def has_placement(runtime: Runtime, placement: Placement) -> bool:
    """Whether a program's user can put experts so."""
    match placement.kind:
        case "resident":
            return True
        case "cpu":
            return bool(runtime.processor_flags)
        case "resident_experts":
            return runtime.placement == "resident_experts"
        case "host_layers" | "gpu_layers":
            return f"{{{placement.kind}}}" in f"{runtime.flags} {runtime.layer_flags}"
    return runtime.absent in (COPY, READ, BOTH)


def flags(model: RealModel, machine: Machine, runtime: Runtime, placed: Placed) -> str:
    """Return the flags that a user types for this placement, and for several cards."""
    kind, amount = placed.placement.kind, placed.placement.amount
    if placed.mechanism == RESIDENT:
        text = runtime.resident_flags
    elif kind == "cpu":
        text = runtime.processor_flags
    else:
        text = (runtime.layer_flags if kind == "gpu_layers" else "") or runtime.flags
    if placed.by_faults:
        text = text.replace(" --no-mmap", "")  # what RAM cannot hold must stay a mapped file
    if machine.is_split(runtime):
        text = f"{text} {runtime.tensor_flags}".strip()
    host_layers = model.num_layers
    if kind == "gpu_layers":
        host_layers -= math.floor(min(amount, host_layers))
    elif kind == "host_layers" and math.isfinite(amount):
        host_layers = math.ceil(amount)
    slots = math.floor(placed.cached * model.num_experts)
    cache = placed.cached * model.all_expert_bytes
    return text.format(
        host_layers=host_layers,
        gpu_layers=model.num_layers - host_layers,
        slots=slots,
        cache_gib=f"{cache / 2**30:.0f}",
        cache_mib=f"{cache / 2**20:.0f}",
        cpu_gib=f"{(1 - placed.cached) * model.all_expert_bytes / 2**30:.0f}",
        memory_gb=f"{(cache + model.dense_bytes) / 1e9:.0f}",
        cards=machine.cards,
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


def usual_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the row of what to run: llama.cpp, unless it reads the drive and another is faster."""
    usual = next((row for row in rows if row["runtime"] == "llama.cpp"), rows[0] if rows else None)
    if usual is not None and usual["needs_drive"]:
        best = max(rows, key=lambda row: row["tok_per_s"])
        usual = best if best["tok_per_s"] > 1.5 * usual["tok_per_s"] else usual
    return usual


def first_line(model: RealModel, rows: Sequence[Mapping[str, Any]], alone: float | None) -> str:
    """Return what to run, with which flags, how fast, and in which range."""
    usual = usual_row(rows)
    if usual is None:
        return f"No known program runs {model.name} this way on this machine."
    if alone is not None and usual["mechanism"] == HOST and alone > usual["tok_per_s"]:
        return (
            f"llama.cpp -ngl 0: {two_digits(alone)} tok/s; do not split: adding the card makes "
            f"{two_digits(usual['tok_per_s'])}."
        )
    text = f"{usual['runtime']} {usual['flags']}".rstrip() + f": {ranged(usual)}"
    if usual["mechanism"] == RESIDENT:
        return f"{text}; all of it fits."
    if usual["needs_drive"]:
        text += "; RAM is too small, and the drive decides"
    cache = next((row for row in rows if row["runtime"] == "llama.cpp-expert-cache"), None)
    if cache is not None and cache["mechanism"] == BOTH and cache["tok_per_s"] > usual["tok_per_s"]:
        low, high = two_digits(cache["low"]), two_digits(cache["high"])
        text += f"; with a cache of experts {low} to {high}"
    return f"{text}."
