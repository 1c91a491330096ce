"""Forecast what a device can do with a model: what fits, in which regime, and how fast."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.main import aligned, print_result
from lm_eval_moecache.emulate.models import MODEL_FILES, emulated_names, load_real_model
from lm_eval_moecache.emulate.stored import CACHE_BITS, PRECISION_HELP, load_stored
from lm_eval_moecache.engine.stand_in import cycle_ratio, stand_in
from lm_eval_moecache.records.hardware import (
    Hardware,
    load_hardware,
    on_disk,
    profile_names,
    same_card_note,
)
from lm_eval_moecache.records.numbers import listed_names, read_count, unknown_name_error
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.runtimes import load_runtime
from lm_eval_moecache.trace.importers import load_trace
from moecache_plan import losses_page as _losses
from moecache_plan.here import Here, here
from moecache_plan.ideal import (
    POLICIES,
    first_token_s,
    fit,
    fitting_precision,
    routing_notes,
    speeds,
    touched_share,
)
from moecache_plan.machines import charged, known, of_its_time, sized
from moecache_plan.placement import stored_for
from moecache_plan.table import advise, two_digits, usual_precision

STORES = ("ram", "disk")
MOST_CONTEXT = 2**24
_LINES, _NAMES = 15, 24
"""Most lines of the answer, and letters of the programs that share one."""
_BUILDABLE = {
    "lru": "with an LRU cache",
    "hazard": "evicting by forecast (hazard)",
    "host": "with non-resident experts computed on the host",
}
_SAYS = {"weights": "--precision", "memory": "--host_memory", "RAM": "--ram", "drive": "--disk"}
"""What may be assumed of a machine -> the option that says it."""
_WORDS = {
    "cycles": "tokens' worth of experts (layers x top-k) that the memory holds; below 1 an LRU "
    "cache keeps nothing from token to token",
    "miss": "share of the requested experts that an LRU cache has to load",
    "hazard": "evicts the expert whose next use it forecasts to be furthest away",
    "prefetch": "hazard, with the next layer's experts prefetched by a predictor: it names 85% of "
    "them, and 85% of those it names are right",
    "host": "LRU, but the host computes an absent expert if that ends this event sooner; the "
    "expert then stays absent, so the run may be slower than LRU",
    "bound": "the fewest misses without prefetching (Belady); policies that prefetch or compute "
    "on the host may be faster",
    "-": "not replayed: hazard and prefetch are shown at the largest capacity only{no_host}",
    "?": "cannot be replayed: so many cycles are nearly all experts of the replayed trace",
    "waits for": "what takes most of a token's time under LRU: the link, memory (compute), "
    "launches",
}


def add_arguments(parser: ArgumentParser) -> None:
    text = f"{', '.join(emulated_names())}; or {MODEL_FILES}"
    parser.add_argument("model", type=str, help=text)
    text = f"one of {', '.join(profile_names())}; or a YAML"
    text += "; several cards: '2x rtx-3090'"
    text += "; none: a processor alone; default: the machine it runs on"
    parser.add_argument("--hardware", type=str | None, help=text)
    text = f"stored weights: {PRECISION_HELP}; default: as published"
    parser.add_argument("--precision", type=str | None, help=text)
    parser.add_argument("--context", type=int, default=4096, help="tokens in the KV cache")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens (for TTFT)")
    text = "where offloaded experts are stored: ram, or disk (an NVMe drive)"
    parser.add_argument("--store", type=str, default="ram", help=text)
    text = "link bandwidth, overrides the profile's: '5GB/s'"
    parser.add_argument("--bandwidth", type=str | None, help=text)
    text = "with --all: trace whose routing is replayed; default: the most similar shipped one"
    parser.add_argument("--trace", type=str | None, help=text)
    parser.add_argument("--ram", type=str | None, help="the machine's RAM: 64GB")
    text = "nominal rate of the RAM: 83GB/s, or channels and MT/s: 2x5600"
    parser.add_argument("--host_memory", type=str | None, help=text)
    text = "the drive's scattered reads: 3.5GB/s"
    parser.add_argument("--disk", type=str | None, help=text)
    text = "a speed of this model here: 'llama.cpp host_layers=all 21.3', or a CSV of speeds"
    parser.add_argument("--measured", type=str | None, help=text)
    text = "programs, separated by commas: 'llama.cpp,ollama'; default: those of such a machine"
    parser.add_argument("--runtime", type=str | None, help=text)
    text = "where experts are kept: host_layers=25 (--n-cpu-moe), cpu, resident, slots=39; "
    text += "default: the best that fits"
    parser.add_argument("--placement", type=str | None, help=text)
    text = f"type of the KV cache: {', '.join(CACHE_BITS)}"
    parser.add_argument("--cache_type", type=str | None, help=text)
    parser.add_argument("--sockets", type=int, default=1, help="sockets of --host_memory each")
    text = "cores of the processor, for prompts that it computes alone; default: this machine's"
    parser.add_argument("--cores", type=int | None, help=text)
    text = "several cards: whole layers on each (layer), or each layer on all (tensor)"
    parser.add_argument("--split", type=str | None, help=text)
    text = (
        "also print what an ideal program would reach, by capacity and policy, and the assumptions"
    )
    parser.add_argument("--all", action="store_true", help=text)
    _losses.add_arguments(parser)


def run(arguments: Namespace) -> int:
    # A trace is replayed for the ideal clock alone.
    is_whole = arguments.all or arguments.trace is not None
    with_ideal = is_whole or arguments.json
    model, hardware, report = find(arguments, with_ideal=with_ideal)
    width = max(min(shutil.get_terminal_size((80, 24)).columns, 100), 60)
    lines = _answer(report, width, is_whole=is_whole)
    if with_ideal:
        lines += ["", *_text(model, hardware, report, width)]
    if lossy := _losses.lines(report.get("losses", ())):
        lines += ["", *lossy[:-1]]
    return print_result(arguments.json, report, "\n".join([*lines, ""]))


def find(
    arguments: Namespace, *, with_ideal: bool = True
) -> tuple[RealModel, Hardware, dict[str, Any]]:
    """Return the model, the machine, and the report that `--json` prints.

    Replaying for the ideal clock takes seconds: without it those fields are missing.
    """
    lossy = _losses.read(arguments)
    context = read_count("--context", arguments.context, least=1, most=MOST_CONTEXT)
    prompt = read_count("--prompt", arguments.prompt, least=1, most=MOST_CONTEXT)
    model, taken = load_real_model(arguments.model, key="model"), []
    if arguments.precision is not None:
        model = replace(model, stored=load_stored(arguments.precision))
        if model.stored.name.lower() != arguments.precision.lower():
            taken = [f"weights in {model.stored.name} (--precision {arguments.precision})"]
    if arguments.cache_type is not None:
        if arguments.cache_type not in CACHE_BITS:
            raise unknown_name_error("cache_type", arguments.cache_type, CACHE_BITS)
        model = model.with_cache_bits(CACHE_BITS[arguments.cache_type])
    if arguments.store not in STORES:
        raise unknown_name_error("store", arguments.store, STORES)
    hardware, cards, found = _machine(arguments)
    if arguments.cores is not None:
        read_count("--cores", arguments.cores, least=1, most=1024)
    given = known(
        cards=max(cards, 1),
        ram=arguments.ram,
        sockets=read_count("--sockets", arguments.sockets, least=1, most=16),
        cores=found.cores if arguments.cores is None and found else arguments.cores,
        **{key: arguments[key] for key in ("host_memory", "disk", "bandwidth", "split")},
    )
    hardware = of_its_time(sized(hardware, given["ram"]))
    if arguments.store == "disk":
        if hardware.is_processor:
            raise ValueError(
                "store='disk' needs a card: a processor alone reads experts from its RAM, and "
                "what that does not hold off the drive. Allowed: --ram SIZE, --disk RATE."
            )
        given["ram"] = 0
    elif found is not None and given["ram"] is None:
        given["ram"] = found.ram
    run_as = model
    if arguments.precision is None:
        run_as = usual_precision(model, hardware, given, context)
    advice = advise(
        run_as,
        hardware,
        given,
        context,
        prompt,
        arguments.measured,
        runtimes=listed_names(arguments.runtime),
        placement=arguments.placement,
        cache_type=arguments.cache_type,
    )
    advice["assumed"] = [*taken, *advice["assumed"]]
    if run_as is not model:
        why = f"(as published, {model.stored.name}, they do not fit)"
        advice["assumed"].insert(0, f"weights in {run_as.stored.name} {why}")
    where = _where(hardware, cards, given, found)
    hardware = charged(hardware, given)
    if cards > 1:
        name, memory_bytes = f"{cards}x {hardware.name}", cards * hardware.memory_bytes
        hardware = replace(hardware, name=name, memory_bytes=memory_bytes)
    if arguments.store == "disk":
        hardware = on_disk(hardware)
    if arguments.bandwidth is not None:
        hardware = hardware.with_bandwidth(arguments.bandwidth)
    report = {
        "model": model.name,
        "precision": model.stored.name,
        "hardware": hardware.name,
        "machine": where,
        "link_bytes_per_s": hardware.link_rate,
        "context": context,
        "prompt": prompt,
        "runtimes_precision": run_as.stored.name,
        **advice,
    }
    stored = stored_for(load_runtime("llama.cpp"), run_as)
    left = fit(stored, hardware, context, cards)
    report["memory"] = {**asdict(left), "share": left.share}
    report |= _losses.report(lossy, model, left.share)
    if with_ideal:
        if not _fits(model, hardware, context, cards):
            model = run_as  # as published, not even the dense weights fit
        report |= _ideal(model, hardware, report, arguments.trace, cards)
    return model, hardware, report


def _machine(arguments: Namespace) -> tuple[Hardware, int, Here | None]:
    """Return the device, how many, and this machine where nobody names another."""
    if arguments.hardware is None:
        found = here()
        return found.hardware, found.cards, found
    several = re.fullmatch(r"([0-9]{1,2}) ?[xX] ?(.+)", arguments.hardware.strip())
    cards = int(several[1]) if several else 1
    return load_hardware(several[2] if several else arguments.hardware), max(cards, 1), None


def _where(hardware: Hardware, cards: int, given: Mapping[str, Any], found: Here | None) -> str:
    """Return what machine is planned for, in words."""
    if found is not None:
        return f"this machine ({found.text})"
    name = f"{cards}x {hardware.name}" if cards > 1 else hardware.name
    if hardware.is_processor:
        return "a processor alone"
    return f"{name} ({cards * hardware.memory_bytes / 1e9:.0f} GB)"


def _fits(model: RealModel, hardware: Hardware, context: int, cards: int) -> bool:
    try:
        fit(model, hardware, context, cards)
    except ValueError:
        return False
    return True


def _ideal(
    model: RealModel, hardware: Hardware, report: dict[str, Any], routing: str | None, cards: int
) -> dict[str, Any]:
    """Return what the virtual clock says, were every bandwidth reached."""
    context, prompt = report["context"], report["prompt"]
    room = fit(model, hardware, context, cards)
    trace = load_trace(routing or str(stand_in(model)))
    rows = list(speeds(model, hardware, room, trace, context))
    # The stand-in's tokens take another share of a layer's experts each than the model's.
    prompt_share = touched_share(trace, max(1, round(prompt * cycle_ratio(model, trace.geometry))))
    compute_s, link_s = first_token_s(model, hardware, room, prompt, prompt_share)
    found = {
        "precision": model.stored.name,
        "fit": {**asdict(room), "share": room.share, "whole": room.is_whole},
        "routing": trace.geometry.model,
        "routing_notes": routing_notes(model, trace),
        "ttft_ms": 1000 * (compute_s + link_s),
        "ttft_loads_ms": 1000 * link_s,
        "fits_at": None if room.is_whole else fitting_precision(model, hardware, context),
        "rows": rows,
    }
    return {**found, "verdict": _verdict({**report, **found}, hardware)}


# --- the page ---


def _gb(nbytes: float) -> str:
    return two_digits(nbytes / 1e9)


def _verdict(report: dict[str, Any], hardware: Hardware) -> str:
    room, rows, ms = report["fit"], report["rows"], report["ttft_ms"]
    ttft = f"{two_digits(ms / 1000)} s" if ms >= 1000 else f"{two_digits(ms)} ms"
    ttft_text = f"the first token of a {report['prompt']:,}-token prompt after {ttft} at best"
    name = f"{report['model']} ({report['precision']})"
    if room["whole"]:
        speed = two_digits(rows[0]["tok_per_s"])
        return f"{name} fits on {hardware.name}, no cache needed: about {speed} tok/s, {ttft_text}."
    by_policy = {r["policy"]: r for r in rows if r["capacity_bytes"] == rows[-1]["capacity_bytes"]}
    lru = by_policy["lru"]
    best = max(
        (by_policy[p] for p in by_policy if p in _BUILDABLE), key=lambda row: row["tok_per_s"]
    )
    text = (
        f"{name} does not fit on {hardware.name}: {100 * room['share']:.0f}% of its experts do "
        f"({two_digits(lru['capacity_cycles'])} cycles)."
    )
    if lru["in_regime"]:
        text += f" With an LRU cache about {two_digits(lru['tok_per_s'])} tok/s, {ttft_text}"
    else:
        text += " The replayed trace cannot show how many of them miss (--trace takes another); "
        text += ttft_text
    if lru["in_regime"] and best["tok_per_s"] > 1.05 * lru["tok_per_s"]:
        text += f"; {_BUILDABLE[best['policy']]}, {two_digits(best['tok_per_s'])} tok/s"
    if report["fits_at"]:
        text += f". All of it fits at --precision {report['fits_at']}"
    return f"{text}."


def _text(model: RealModel, hardware: Hardware, report: dict[str, Any], width: int) -> list[str]:
    """Return the ideal clock's page."""
    room, is_whole = report["fit"], report["fit"]["whole"]
    wrap = partial(textwrap.wrap, width=width)
    memory = _memory(room, report["context"])
    notes = [f"Stored weights: {model.stored.name}. Sizes: {model.source}."]
    table: list[str] = []
    if not is_whole:
        link = f"{_gb(hardware.link_rate)} GB/s"
        if hardware.link_efficiency != 1:
            link += f" ({_gb(hardware.link_bytes_per_s)} nominal, of which single experts reach "
            link += f"{100 * hardware.link_efficiency:.0f}%)"
        memory += f" The other {_gb(room['all_experts'] - room['experts'])} GB of experts lie "
        memory += f"behind a link of {link}"
        if host := hardware.host_memory_bytes_per_s:
            memory += f", in memory that the host reads at {_gb(host)} GB/s"
        memory += "."
        table = [*_table(report["rows"]), ""]
        for word, means in _words(report["rows"]).items():
            table += wrap(f"{word:9s} {means}", subsequent_indent=" " * 10)
        table.append("")
        notes.append(report["routing_notes"])
    if assumed := [key for key, text in hardware.sources.items() if "assumed" in text]:
        notes.append(f"Assumed, not measured, of {hardware.name}: {', '.join(assumed)}.")
    if text := same_card_note(hardware.name):
        notes.append(text)
    notes.append("A forecast of the virtual clock for one stream; nothing was run on the device.")
    ideal = f"If every bandwidth were reached (runtime=ideal): {report['verdict']}"
    if report["runtimes_precision"] != report["precision"]:
        ideal = f"As published, w{ideal[1:]}"
    elif report["precision"] == "mxfp4":
        ideal = f"With dense weights in bf16, as published (GGUF files have q8_0), w{ideal[1:]}"
    intro = [*wrap(ideal), "", *wrap(memory), ""]
    return [*intro, *table, *(line for note in notes for line in wrap(note))]


def _memory(room: dict[str, Any], context: int = 0) -> str:
    """Return what lies in the memory, in long words where the `context` is given."""
    parts = {
        "dense weights" if context else "dense": room["dense"],
        f"KV cache of {context:,} tokens" if context else "KV cache": room["kv_cache"],
        "card's context and buffers" if context else "buffers": room["buffers"],
    }
    free = room["memory"] - sum(parts.values()) - room["experts"]
    listed = [f"{name} {_gb(size)}" for name, size in parts.items() if size]
    listed.append(f"experts {_gb(room['experts'])} of {_gb(room['all_experts'])}")
    # What the rounded figures next to it would hide is not printed.
    listed += [f"free {_gb(free)}"] if free > room["memory"] / 50 else []
    size = _gb(room["memory"])
    return f"{f'Memory: {size} GB' if context else f'Memory, GB: {size}'} = {' + '.join(listed)}."


def _answer(report: dict[str, Any], width: int, *, is_whole: bool) -> list[str]:
    """Return the machine, what to run on it, a line a speed, and what makes it nearer.

    Of flags as many as fit in `_LINES`, those of the first programs, unless `is_whole`.
    """
    wrap = partial(textwrap.wrap, width=width, break_on_hyphens=False)
    assumed = report["assumed"]
    line = f"{report['model']} on {report['machine']}"
    lines = wrap(f"{line}; assumed: {', '.join(assumed)}." if assumed else f"{line}.")
    lines += wrap(report["first"])
    if report["measured"]:
        lines += wrap(f"Scaled to {report['measured']}.")
    table = [["runtime", "placement", "tok/s", "80% range", "first token"]]
    # The drive is named with placements only where some need none: else the answer says so.
    drives = {row["needs_drive"] for row in report["runtimes"] if not row["why"]}
    whys: dict[str, list[str]] = {}
    flags: dict[str, list[str]] = {}
    for row in report["runtimes"]:
        if row["why"]:
            whys.setdefault(row["why"].rstrip("."), []).append(row["runtime"])
            continue
        if row["flags"] and row["flags"] not in report["first"]:
            flags.setdefault(row["flags"], []).append(row["runtime"])
        placement = row["placement"] + (
            " + drive" if row["needs_drive"] and len(drives) > 1 else ""
        )
        speed = f"{two_digits(row['low'])} to {two_digits(row['high'])}"
        ttft = "not modelled"
        if row["ttft_s"] is not None:
            low, high = two_digits(row["ttft_low_s"]), two_digits(row["ttft_high_s"])
            ttft = f"{low} to {high} s"
        cells = [placement, two_digits(row["tok_per_s"]), speed, ttft]
        name = row["runtime"]
        for each in table:
            # Programs of one mechanism are one line, as far as their names fit in it.
            if each[1:] == cells and len(each[0]) + len(name) <= _NAMES:
                each[0] += f", {name}"
                break
        else:
            table.append([name, *cells])
    if len(table) > 1:
        lines += ["", *aligned(table, "<" * len(table[0]))]
    for row in [row for row in report["runtimes"] if row["range"]][:1]:
        lines += wrap(f"80% range of {row['runtime']}: {row['range']}.")
    for why, names in whys.items():
        lines += wrap(f"- {', '.join(names)}: {why}.", subsequent_indent="  ")
    last = wrap(_memory(report["memory"]))
    options = [option for word, option in _SAYS.items() if any(word in a for a in assumed)]
    say = f"For a closer forecast: {', '.join([*options, '--measured'])}."
    last += wrap(say if is_whole else f"{say} More: --all.")
    said = [f"{', '.join(names)} {text}" for text, names in flags.items()]
    shown = wrap(f"Flags: {'; '.join(said)}.") if said else []
    while said and not is_whole and len(lines) + len(shown) + len(last) > _LINES:
        said.pop()
        shown = wrap(f"Flags: {'; '.join(said)}.") if said else []
    return [*lines, *shown, *last]


def _words(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the words of the table that there are, with what they mean."""
    has_host = any(row["policy"] == "host" for row in rows)
    no_host = "" if has_host else "; host: the profile has no figures for the host's compute"
    words = {word: means.format(no_host=no_host) for word, means in _WORDS.items()}
    capacities = {row["capacity"] for row in rows}
    if len(capacities) == 1 and has_host:
        del words["-"]
    if all(row["in_regime"] for row in rows):
        del words["?"]
    return words


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Return one line per capacity: the miss rate under LRU, and each policy's tok/s."""
    lines = [["experts", "GB", "cycles", "miss", *POLICIES, "waits for"]]
    for capacity in dict.fromkeys(row["capacity"] for row in rows):
        by_policy = {row["policy"]: row for row in rows if row["capacity"] == capacity}
        lru = by_policy["lru"]
        cells = [f"{float(capacity[:-1]):.0f}%", _gb(lru["capacity_bytes"])]
        missed = f"{100 * lru['decode_miss_rate']:.0f}%" if lru["in_regime"] else "?"
        cells += [two_digits(lru["capacity_cycles"]), missed]
        for name in POLICIES:
            speed = two_digits(by_policy[name]["tok_per_s"]) if name in by_policy else "-"
            cells.append(speed if lru["in_regime"] or speed == "-" else "?")
        lines.append([*cells, lru["bound"] if lru["in_regime"] else "?"])
    lead = max(map(len, aligned([line[:4] for line in lines], ">>>>"))) + 2
    return [" " * lead + "tok/s under each policy", *aligned(lines, ">" * len(lines[0]))]
