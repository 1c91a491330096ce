"""What `moecache plan` forecasts and prints."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from functools import partial
from os import PathLike, fspath
from typing import Any

from lm_eval_moecache.emulate.models import as_stored, emulated_names, load_real_model
from lm_eval_moecache.emulate.stored import load_stored
from lm_eval_moecache.records.command import Report, aligned, terminal_width
from lm_eval_moecache.records.numbers import listed_names, read_count
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.runtimes import READ, load_runtime
from moecache_plan.advice import Setup, advise, ranged, two_digits, usual_precision, usual_row
from moecache_plan.detect import parse_machine, with_measured_drive
from moecache_plan.machines import Machine
from moecache_plan.models import load_model
from moecache_plan.placement import BUFFERS, room, stored_for

MOST_CONTEXT = 2**24
_LINES, _NAMES = 15, 24
"""Most lines of the answer, and letters of the programs that share one."""
_WIDEST = 100
_PAGE_CACHE = (
    "not modelled: what a large cache takes from the system's page cache. A smaller one may be "
    "faster (GLM-5.2 on 128 GB: 0.57 tok/s with 30 GB, 0.17 with 75)"
)
_SAYS = {"weights": "--precision", "memory": "--host_memory", "RAM": "--ram", "drive": "--disk"}
"""What may be assumed of a machine -> the option that says it."""


def plan(
    model: str | PathLike[str] | None = None,
    *,
    hardware: str | None = None,
    ram: str | None = None,
    host_memory: str | None = None,
    disk: str | None = None,
    precision: str | None = None,
    context: int = 4096,
    prompt: int = 512,
    measured: str | None = None,
    runtime: str | None = None,
    placement: str | None = None,
) -> Report:
    """Forecast what a machine does with a model: what to run, with which flags, and how fast.

    Without a MODEL it lists those that this machine runs.

    Args:
        model: a name, such as gpt-oss-120b (an unknown one is refused with the nearest), a hub id,
            or a config.json, a model's folder, a GGUF or its index
        hardware: a card, Mac or chip as its box has it (rtx-4090-24gb, M4 Max 64GB), or a YAML;
            several cards: '2x rtx-3090'; none: a processor alone; default: the machine it runs on
        ram: the machine's RAM: 64GB
        host_memory: nominal rate of the RAM: 83GB/s, or channels and MT/s: 2x5600
        disk: the drive's scattered reads: 3.5GB/s
        precision: stored weights: bf16, int4, a GGUF type such as q4_k_m, mxfp4, awq, 4.5bpw;
            default: as published
        context: tokens in the KV cache
        prompt: prompt tokens (for TTFT)
        measured: a speed of this model here: 'llama.cpp host_layers=all 21.3'
        runtime: programs, separated by commas: 'llama.cpp,ollama'; default: those of such a machine
        placement: where experts are kept: host_layers=25 (--n-cpu-moe), cpu, resident, slots=39;
            default: the best that fits
    """
    read_count("--context", context, least=1, most=MOST_CONTEXT)
    read_count("--prompt", prompt, least=1, most=MOST_CONTEXT)
    chosen = None if model is None else load_model(fspath(model))
    stored = None if precision is None else load_stored(precision)
    machine = parse_machine(hardware, ram=ram, host_memory=host_memory, disk=disk)
    if chosen is not None and hardware is None and disk is None:
        usual = usual_precision(chosen, machine, context)
        sized = usual if stored is None else as_stored(chosen, stored)
        if sized.all_expert_bytes + sized.dense_bytes > machine.ram + machine.card_bytes:
            machine = with_measured_drive(machine, fspath(model or ""))
    asked = {"measured": measured, "placement": placement, "runtime": runtime}
    if chosen is not None:
        report = _of_model(chosen, stored, precision, machine, (context, prompt), asked)
        return Report(report, lambda: "\n".join(_answer(report, _width())))
    for key, value in asked.items():
        if value is not None:
            raise ValueError(f"--{key}={value!r} needs a MODEL.")
    runnable = _runnable(machine, stored, context, prompt)
    return Report(runnable, lambda: "\n".join(_list(runnable, _width())))


def _width() -> int:
    return max(min(terminal_width(), _WIDEST), 60)


def _of_model(
    model: RealModel,
    stored: Any,
    precision: str | None,
    machine: Machine,
    tokens: tuple[int, int],
    asked: Mapping[str, str | None],
) -> dict[str, Any]:
    context, prompt = tokens
    taken = []
    if stored is None:
        run_as = usual_precision(model, machine, context)
        if run_as is not model:
            why = f"(as published, {model.stored.name}, they do not fit)"
            taken = [f"weights in {run_as.stored.name} {why}"]
    else:
        run_as = model = as_stored(model, stored)
        if precision is not None and stored.name.lower() != precision.lower():
            taken = [f"weights in {stored.name} (--precision {precision})"]
    advice = advise(
        Setup(model=run_as, machine=machine, context=context, prompt=prompt),
        measured=asked["measured"],
        runtimes=listed_names(asked["runtime"]),
        placement=asked["placement"],
    )
    return {
        "model": model.name,
        "precision": model.stored.name,
        "runtimes_precision": run_as.stored.name,
        "hardware": machine.name if machine.is_processor else machine.title,
        "machine": _where(machine),
        "context": context,
        "prompt": prompt,
        **advice,
        "assumed": [*taken, *advice["assumed"]],
        "memory": memory_of(stored_for(load_runtime("llama.cpp"), run_as), machine, context),
    }


def memory_of(model: RealModel, machine: Machine, context: int) -> dict[str, Any]:
    """Return how the memory is divided, in bytes: dense weights, a KV cache, buffers, experts.

    Raises ValueError where not one expert fits.
    """
    memory = int(machine.memory_bytes) * machine.cards
    kv_cache = model.kv_bytes(context)
    buffers = 0 if machine.is_processor else int(BUFFERS * machine.cards)
    left = memory - model.dense_bytes - kv_cache - buffers
    if left < model.expert_bytes:
        raise ValueError(
            f"{model.name} does not run on {machine.title}: of {memory / 1e9:.1f} GB the dense "
            f"weights take {model.dense_bytes / 1e9:.1f} ({model.stored.name}) and a KV cache of "
            f"{context} tokens {kv_cache / 1e9:.1f}, buffers {buffers / 1e9:.1f}, and one expert "
            f"needs {model.expert_bytes / 1e9:.2f}. Allowed: a shorter --context, fewer bits "
            "(--precision), or a device with more memory."
        )
    every = model.all_expert_bytes
    parts = {"dense": model.dense_bytes, "kv_cache": kv_cache, "buffers": buffers}
    held = min(left, every)
    return {
        "memory": memory,
        **parts,
        "experts": held,
        "all_experts": every,
        "share": held / every,
    }


def _runnable(machine: Machine, stored: Any, context: int, prompt: int) -> dict[str, Any]:
    """Return the shipped models that a machine runs without its drive, the largest first."""
    found, left_out = [], []
    for name in emulated_names():
        model = load_real_model(name, "model")
        model = as_stored(model, stored) if stored else model
        run_as = model if stored else usual_precision(model, machine, context)
        advice = advise(Setup(model=run_as, machine=machine, context=context, prompt=prompt))
        row = usual_row([row for row in advice["runtimes"] if row["tok_per_s"] is not None])
        if row is None or row["needs_drive"] or room(run_as, machine, context) < 0:
            left_out.append(name)
            continue
        kept = ("runtime", "flags", "placement", "tok_per_s", "low", "high")
        figures = {key: row[key] for key in kept}
        sizes = {"weights": model.num_weights, "precision": run_as.stored.name}
        found.append({"model": name, **sizes, **figures})
    found.sort(key=lambda row: -row["weights"])
    return {"machine": _where(machine), "context": context, "models": found, "left_out": left_out}


# --- the page ---


def _where(machine: Machine) -> str:
    """Return what machine is planned for, in words."""
    if machine.about or machine.is_processor:
        return machine.about or machine.title
    return f"{machine.title} ({machine.card_bytes / 1e9:.0f} GB)"


def _list(report: Mapping[str, Any], width: int) -> list[str]:
    """Return the models that a machine runs, a line each, and how many it does not."""
    wrap = partial(textwrap.wrap, width=width, break_on_hyphens=False)
    cells = [["model", "weights", "stored as", "tok/s", "80% range", "run by"]]
    for row in report["models"]:
        tok_per_s, ends = ranged(row).rstrip(")").split(" tok/s (")
        size = f"{two_digits(row['weights'] / 1e9)}B"
        cells.append([row["model"], size, row["precision"], tok_per_s, ends, row["runtime"]])
    count = len(report["left_out"])
    last = f"{count} more models would read their experts off the drive, or do not run at all: "
    last += "`moecache plan MODEL` says which, and has flags and placements."
    head = wrap(f"What {report['machine']} runs, at {report['context']:,} tokens of context:")
    return [*head, "", *aligned(cells, "<><><<"), "", *wrap(last)]


def _gb(nbytes: float) -> str:
    return two_digits(nbytes / 1e9)


def _memory(room: Mapping[str, Any]) -> str:
    """Return what lies in the memory."""
    parts = {"dense": room["dense"], "KV cache": room["kv_cache"], "buffers": room["buffers"]}
    free = room["memory"] - sum(parts.values()) - room["experts"]
    listed = [f"{name} {_gb(size)}" for name, size in parts.items() if size]
    listed.append(f"experts {_gb(room['experts'])} of {_gb(room['all_experts'])}")
    # What the rounded figures next to it would hide is not printed.
    listed += [f"free {_gb(free)}"] if free > room["memory"] / 50 else []
    return f"Memory, GB: {_gb(room['memory'])} = {' + '.join(listed)}."


def _answer(report: Mapping[str, Any], width: int) -> list[str]:
    """Return the machine, what to run on it, a line a speed, and what makes it nearer.

    Of flags as many as fit in `_LINES`, those of the first programs.
    """
    wrap = partial(textwrap.wrap, width=width, break_on_hyphens=False)
    assumed = report["assumed"]
    line = f"{report['model']} on {report['machine']}"
    lines = wrap(f"{line}; assumed: {', '.join(assumed)}." if assumed else f"{line}.")
    lines += wrap(report["first"])
    if report["measured"]:
        lines += wrap(f"Scaled to {report['measured']}.")
    running = [row for row in report["runtimes"] if not row["why"]]
    if running:
        table = _table(running)
        lines += ["", *aligned(table, "<" * len(table[0]))]
    for row in [row for row in report["runtimes"] if row["range"]][:1]:
        lines += wrap(f"80% range of {row['runtime']}: {row['range']}.")
    whys: dict[str, list[str]] = {}
    for row in report["runtimes"]:
        if row["why"]:
            whys.setdefault(row["why"].rstrip("."), []).append(row["runtime"])
    for why, names in whys.items():
        lines += wrap(f"- {', '.join(names)}: {why}.", subsequent_indent="  ")
    last = wrap(_memory(report["memory"]))
    options = [option for word, option in _SAYS.items() if any(word in a for a in assumed)]
    last += wrap(f"For a closer forecast: {', '.join([*options, '--measured'])}.")
    if any(load_runtime(row["runtime"]).absent == READ for row in running):
        note = wrap(f"- {_PAGE_CACHE}.", subsequent_indent="  ")
        lines += note if len(lines) + len(note) + len(last) <= _LINES else []
    flags: dict[str, list[str]] = {}
    for row in running:
        if row["flags"] and row["flags"] not in report["first"]:
            flags.setdefault(row["flags"], []).append(row["runtime"])
    said = [f"{', '.join(names)} {text}" for text, names in flags.items()]
    shown = wrap(f"Flags: {'; '.join(said)}.") if said else []
    while said and len(lines) + len(shown) + len(last) > _LINES:
        said.pop()
        shown = wrap(f"Flags: {'; '.join(said)}.") if said else []
    return [*lines, *shown, *last]


def _table(running: list[dict[str, Any]]) -> list[list[str]]:
    """Return a line for each speed; programs with the same share one, as far as their names fit."""
    table = [["runtime", "placement", "tok/s", "80% range", "first token"]]
    # The drive is named with placements only where some need none: else the answer says so.
    some_drive = len({row["needs_drive"] for row in running}) > 1
    for row in running:
        drive = " + drive" if row["needs_drive"] and some_drive else ""
        ttft = "not modelled"
        if row["ttft_s"] is not None:
            ttft = f"{two_digits(row['ttft_low_s'])} to {two_digits(row['ttft_high_s'])} s"
        ends = f"{two_digits(row['low'])} to {two_digits(row['high'])}"
        cells = [row["placement"] + drive, two_digits(row["tok_per_s"]), ends, ttft]
        for each in table:
            if each[1:] == cells and len(each[0]) + len(row["runtime"]) <= _NAMES:
                each[0] += f", {row['runtime']}"
                break
        else:
            table.append([row["runtime"], *cells])
    return table
