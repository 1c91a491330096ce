"""Say what a device can do with a model: what fits, in which regime, and at which speed."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.cli.main import print_result
from lm_eval_moecache.records.emulation import (
    PRECISIONS,
    RealModel,
    emulated_names,
    load_real_model,
    load_stored,
)
from lm_eval_moecache.records.hardware import Hardware, load_hardware, on_disk, profile_names
from lm_eval_moecache.records.numbers import read_count, unknown

RAM, DISK = STORES = ("ram", "disk")
MOST_CONTEXT = 2**24


def add_arguments(parser: ArgumentParser) -> None:
    text = f"{', '.join(emulated_names())}; or a config.json, its folder, a YAML"
    parser.add_argument("model", type=str, help=text)
    text = f"one of {', '.join(profile_names())}; or a YAML"
    parser.add_argument("--hardware", type=str, default="rtx-4090-24gb", help=text)
    text = f"stored weights: {', '.join(PRECISIONS)}; default: as published"
    parser.add_argument("--precision", type=str | None, help=text)
    parser.add_argument("--context", type=int, default=4096, help="tokens in the KV cache")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens (for TTFT)")
    text = "where offloaded experts are stored: ram, or disk (an NVMe drive)"
    parser.add_argument("--store", type=str, default=RAM, help=text)
    text = "link bandwidth, overrides the profile's: '5GB/s'"
    parser.add_argument("--bandwidth", type=str | None, help=text)
    text = "trace whose routing is replayed; default: the most similar shipped one"
    parser.add_argument("--trace", type=str | None, help=text)


def run(arguments: Namespace) -> int:
    context = read_count("--context", arguments.context, least=1, most=MOST_CONTEXT)
    prompt = read_count("--prompt", arguments.prompt, least=1, most=MOST_CONTEXT)
    model = load_real_model(arguments.model, key="model")
    if arguments.precision is not None:
        model = dataclasses.replace(model, stored=load_stored(arguments.precision))
    if arguments.store not in STORES:
        raise unknown("store", arguments.store, STORES)
    hardware = load_hardware(arguments.hardware)
    if arguments.store == DISK:
        hardware = on_disk(hardware)
    if arguments.bandwidth is not None:
        hardware = hardware.with_bandwidth(arguments.bandwidth)
    found = _find(model, hardware, context, prompt, arguments.trace)
    width = max(min(shutil.get_terminal_size((80, 24)).columns, 100), 60)
    return print_result(arguments.json, found, _text(model, hardware, found, width))


def _find(
    model: RealModel, hardware: Hardware, context: int, prompt: int, path: str | None
) -> dict[str, Any]:
    # What is wrong with the options has been said by now: the engine takes a second to import.
    from lm_eval_moecache.analysis import plan
    from lm_eval_moecache.trace.importers import load_trace

    def say(step: str) -> None:
        """Say what is being replayed, where somebody looks."""
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{'replaying ' + step if step else '':40s}\r")
            sys.stderr.flush()

    room = plan.fit(model, hardware, context)
    trace = load_trace(path or str(plan.stand_in(model)))
    rows = list(plan.speeds(model, hardware, room, trace, context, say))
    say("")
    needed = plan.touched_share(trace, prompt)
    compute_s, link_s = plan.first_token_s(model, hardware, room, prompt, needed)
    found = {
        "model": model.name,
        "precision": model.stored.name,
        "hardware": hardware.name,
        "link_bytes_per_s": hardware.link_rate,
        "context": context,
        "prompt": prompt,
        "fit": {**dataclasses.asdict(room), "share": room.share, "whole": room.is_whole},
        "routing": trace.geometry.model,
        "ttft_ms": 1000 * (compute_s + link_s),
        "ttft_loads_ms": 1000 * link_s,
        "fits_at": None if room.is_whole else plan.fitting_precision(model, hardware, context),
        "rows": rows,
    }
    return {**found, "verdict": _verdict(found, hardware)}


def two_digits(number: float) -> str:
    """Return a number at two significant digits, without an exponent."""
    if number == 0:
        return "0"
    rounded = float(f"{number:.2g}")
    return f"{rounded:.0f}" if rounded >= 10 else f"{rounded:#.2g}"


def _gb(nbytes: float) -> str:
    return two_digits(nbytes / 1e9)


_BUILDABLE = {
    "lru": "with an LRU cache",
    "hazard": "evicting by forecast (hazard)",
    "host": "with non-resident experts computed on the host",
}
_WORDS = {
    "cycles": "tokens' worth of experts (layers x top-k) that the memory holds; below 1 an LRU "
    "cache keeps nothing from token to token",
    "miss": "share of the requested experts that an LRU cache has to load",
    "hazard": "evicts the expert whose next use is forecast to be furthest",
    "prefetch": "hazard, and the next layer's experts are loaded ahead by a predictor that names "
    "85% of them (recall) and is right in 85% of what it names",
    "host": "LRU, and the host computes absent experts where that ends sooner",
    "bound": "the fewest misses that any eviction could have (Belady); no rule attains it",
    "waits for": "what a token's time mostly goes to under LRU: the link, memory (compute), "
    "launches",
}


def _verdict(found: dict[str, Any], hardware: Hardware) -> str:
    room, rows, ms = found["fit"], found["rows"], found["ttft_ms"]
    first = f"{two_digits(ms / 1000)} s" if ms >= 1000 else f"{two_digits(ms)} ms"
    after = f"the first token of a {found['prompt']:,}-token prompt after {first}"
    name = f"{found['model']} ({found['precision']})"
    if room["whole"]:
        speed = two_digits(rows[0]["tok_per_s"])
        return f"{name} fits on {hardware.name}, no cache needed: about {speed} tok/s, {after}."
    top = {r["policy"]: r for r in rows if r["capacity_bytes"] == rows[-1]["capacity_bytes"]}
    lru = top["lru"]
    best = max((top[p] for p in top if p in _BUILDABLE), key=lambda row: row["tok_per_s"])
    text = (
        f"{name} does not fit on {hardware.name}: {100 * room['share']:.0f}% of its experts do "
        f"({two_digits(lru['capacity_cycles'])} cycles). With an LRU cache about "
        f"{two_digits(lru['tok_per_s'])} tok/s, {after}"
    )
    if best["tok_per_s"] > 1.05 * lru["tok_per_s"]:
        text += f"; {_BUILDABLE[best['policy']]}, {two_digits(best['tok_per_s'])} tok/s"
    if found["fits_at"]:
        text += f". All of it fits at --precision {found['fits_at']}"
    return f"{text}."


def _text(model: RealModel, hardware: Hardware, found: dict[str, Any], width: int) -> str:
    room, is_whole = found["fit"], found["fit"]["whole"]
    memory = (
        f"Memory: {_gb(room['memory'])} GB = dense weights {_gb(room['dense'])} + KV cache of "
        f"{found['context']:,} tokens {_gb(room['kv_cache'])} + experts {_gb(room['experts'])} of "
        f"{_gb(room['all_experts'])}; activations not included."
    )
    notes = [f"Stored weights: {model.stored.name}. Sizes: {model.source}."]
    table: list[str] = []
    if not is_whole:
        link = f"{_gb(hardware.link_rate)} GB/s"
        if hardware.link_efficiency != 1:
            link += f" ({_gb(hardware.link_bytes_per_s)} nominal, of which single experts reach "
            link += f"{100 * hardware.link_efficiency:.0f}%)"
        memory += f" The other {_gb(room['all_experts'] - room['experts'])} GB of experts lie "
        memory += f"behind a link of {link}."
        table = [*_table(found["rows"]), ""]
        for word, means in _WORDS.items():
            table += textwrap.wrap(f"{word:9s} {means}", width, subsequent_indent=" " * 10)
        table.append("")
        notes.append(
            f"Misses are those of a routing of {found['routing']}, replayed from an empty cache; "
            f"its layers are charged as {model.name}'s."
        )
    if assumed := [key for key, text in hardware.sources.items() if "assumed" in text]:
        notes.append(f"Assumed, not measured, of {hardware.name}: {', '.join(assumed)}.")
    notes.append("A forecast of the virtual clock for one stream; nothing was run on the device.")
    if not is_whole:
        notes.append(
            "Current engines use less of the link than batched copies do: by published figures a "
            "third to a half of such speeds (docs/how_true.md). --bandwidth 8GB/s shows that end."
        )
    head = [*textwrap.wrap(found["verdict"], width), "", *textwrap.wrap(memory, width), ""]
    told = [line for note in notes for line in textwrap.wrap(note, width)]
    return "\n".join([*head, *table, *told, ""])


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Lay out one line a capacity: its misses under LRU, and each policy's tokens a second."""
    policies = ["lru", "hazard", "prefetch", "host", "bound"]
    lines = [["experts", "GB", "cycles", "miss", *policies, "waits for"]]
    for capacity in dict.fromkeys(row["capacity"] for row in rows):
        of = {row["policy"]: row for row in rows if row["capacity"] == capacity}
        lru = of["lru"]
        cells = [f"{float(capacity[:-1]):.0f}%", _gb(lru["capacity_bytes"])]
        cells += [two_digits(lru["capacity_cycles"]), f"{100 * lru['decode_miss_rate']:.0f}%"]
        cells += [two_digits(of[name]["tok_per_s"]) if name in of else "-" for name in policies]
        lines.append([*cells, lru["bound"]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    over = " " * (sum(widths[:4]) + 8) + "tok/s under each policy"
    padded = ([c.rjust(w) for c, w in zip(line, widths, strict=True)] for line in lines)
    return [over, *("  ".join(cells).rstrip() for cells in padded)]
