"""Published speeds of runtimes: reads a CSV of them, forecasts each row, says how far off it was.

Columns: runtime, model, precision, hardware, host_memory_GBps, link_GBps, disk_GBps, placement,
context, prompt, prefill_tok_s, decode_tok_s, source, note; and `machine`, which tells machines of
one kind apart. Names are read as people type them. An empty bandwidth is the profile's. Notes are
read too: `hit 71%`, `top-k 4`, `16 cores`, `-ub 2048`, `KV cache q8_0`, `tensor parallel`,
`eager`, `assumed`, `left out: REASON`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from lm_eval_moecache.emulate.models import as_stored, load_real_model
from lm_eval_moecache.emulate.stored import CACHE_BITS, load_stored
from lm_eval_moecache.records.files import read_csv
from lm_eval_moecache.records.hardware import NO_CARD, Hardware, load_hardware
from lm_eval_moecache.records.real_model import RealModel, Stored
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
    PromptWork,
    Work,
    forecast,
    prefill_tok_per_s,
    prompt_work,
    rule_of_thumb_s,
    token_work,
)
from moecache_plan.machines import (
    PROCESSORS,
    Machine,
    as_machine,
    check_one_kind,
    rate,
    soldered,
    with_overrides,
)
from moecache_plan.mechanisms import PROCESSOR, PROMPTS, Mechanisms, mechanisms
from moecache_plan.placement import Placed, place, read_placement, stored_for

COLUMNS = (
    *("runtime", "model", "precision", "hardware", "host_memory_GBps", "link_GBps", "disk_GBps"),
    *("placement", "context", "prompt", "prefill_tok_s", "decode_tok_s", "source", "note"),
)
Found = TypeVar("Found")
NEEDED = ("runtime", "model")
GROUPS = (RESIDENT, HOST, PROCESSOR, BOTH, COPY, LAYER, READ)
WITHIN = (1.25, 1.5, 1.6, 2.5)
_SHORT = 256
"""Tokens of context assumed where a row does not say."""
_TELLS_NOTHING = re.compile(
    r"\d+-?c(ores?)?|unified|mini|air|mac|macbook|studio|base|desktop|vram|gddr\w*|single"
)
"""Words of a device's name besides what identifies it."""
_TELLS_APART = re.compile(r"ultra|max\+?|pro|ti|super|xtx?|gre|laptop|mobile|max-q")
"""Words after a device's name that make it another device."""
_READS = {
    **dict.fromkeys((HOST, BOTH), "host_memory_GBps"),
    **dict.fromkeys((COPY, LAYER), "link_GBps"),
    READ: "disk_GBps",
}
"""Mechanism -> the column of the rate that matters most to it."""
_KV = re.compile(r"\bkv cache (?:in )?(q[45]_[01]|q8_0|fp8)\b")
_DRAFTED = re.compile(
    r"(?<!no )(?<!no-)(?<!without )\b(mtp|draft\w*|spec(ulative|[- ]dec)\w*)\b"
    r"(?! ?[=:] ?(0|off|none)\b)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedRow:
    """One measurement, read: what it ran, where, and how fast it was."""

    fields: Mapping[str, str]
    model: RealModel
    runtime: Runtime
    machine: Machine
    key: str
    """What distinguishes machines where one is left out of a fit."""
    placement: str
    hit: float | None
    top_k: int | None
    context: int
    prompt: int | None
    chunk: int | None
    decode: float | None
    prefill: float | None

    def placed(self, known: Mechanisms | None = None) -> Placed:
        """Return where the experts lie, by a stated hit rate or an estimated one."""
        where = read_placement(self.placement)
        return place(self.model, self.machine, self.runtime, where, self.context, self.hit, known)

    def is_stated(self, placed: Placed) -> bool:
        """Whether what matters most to the mechanism was stated, not assumed."""
        note = self.fields["note"].lower()
        if re.search(r"\b(placement|precision|split)\b[^;]*\bunstated", note):
            return False
        if placed.mechanism == RESIDENT:
            return True
        if re.search(r"\b(assumed|inferred)\b", note):
            return False
        knows_hit = placed.hit is None or self.hit is not None
        return bool(self.fields[_READS[placed.mechanism]]) and knows_hit

    def work(self, placed: Placed) -> Work:
        """Return what a decoded token waits for."""
        return token_work(self.model, self.machine, self.runtime, placed, self.context, self.top_k)

    def forecast(self, known: Mechanisms | None = None, placed: Placed | None = None) -> Forecast:
        """Return the forecast of the decode speed."""
        placed = placed or self.placed(known)
        return forecast(
            self.model,
            self.machine,
            self.runtime,
            placed,
            self.context,
            top_k=self.top_k,
            is_stated=self.is_stated(placed),
            known=known,
        )

    def prompt_work(self, placed: Placed, known: Mechanisms | None = None) -> PromptWork | None:
        """Return what the prompt waits for, None where unknown or not modelled."""
        if self.prefill is None or not self.prompt:
            return None
        return prompt_work(
            self.model, self.machine, self.runtime, placed, self.prompt, self.chunk, known
        )


def read_rows(
    path: Path, known: Mechanisms | None = None
) -> tuple[list[SpeedRow], list[dict[str, Any]]]:
    """Return a file's rows, and those left out, as their fields with the `reason`.

    Raises ValueError where the file is no CSV with these columns.
    """
    what = f"speeds={str(path)!r}"
    table = read_csv(path, what)
    names = [name.strip() for name in table.fieldnames or ()]
    table.fieldnames = names
    if missing := [name for name in NEEDED if name not in names]:
        raise ValueError(
            f"{what} lacks the columns {', '.join(missing)}. Allowed: {', '.join(COLUMNS)}."
        )
    rows, left_out = [], []
    for number, record in enumerate(table, start=1):
        fields = {name: str(record.get(name) or "").strip() for name in (*COLUMNS, "machine")}
        if not any(fields.values()):
            continue
        try:
            rows.append(read_row(fields, known))
        except ValueError as error:
            reason = str(error).partition(" Allowed:")[0]
            left_out.append({"row": number, **fields, "reason": reason})
    return rows, left_out


def read_row(fields: Mapping[str, str], known: Mechanisms | None = None) -> SpeedRow:
    """Read one row. Raises ValueError with the reason for which it is left out."""
    note = fields["note"]
    said = note.lower()
    if match := re.search(r"left out: *(.*)", note):
        raise ValueError(match[1])
    if _DRAFTED.search(f"{said} {fields['runtime'].lower()}"):
        raise ValueError("speculative decoding: several tokens a pass")
    if (match := re.search(r"\bbatch(?: size)?[ =]*(\d+)", said)) and int(match[1]) > 1:
        raise ValueError(f"{match[1]} requests at once")
    decode, prefill = speed(fields["decode_tok_s"]), speed(fields["prefill_tok_s"])
    if decode is None and prefill is None:
        raise ValueError("no speed given")
    runtime = find_runtime(fields)
    model = find_model(fields["model"], fields["precision"])
    if not re.search(r"\b(b?f16|fp16)\b", f"{said} {fields['precision']}".lower()):
        model = stored_for(runtime, model)
    if match := _KV.search(said):
        model = model.with_cache_bits(CACHE_BITS[match[1]])
    if re.search(r"\beager\b", said):
        runtime = replace(runtime, eager=True)
    hardware, cards = find_hardware(fields["hardware"])
    cores = re.search(r"\b(\d+) cores\b", said)
    is_split = bool(re.search(r"\btp\b|\btp[ =-]?\d|tensor[- ]parallel", said))
    machine = with_overrides(
        as_machine(
            hardware,
            cards=cards,
            cores=int(cores[1]) if cores else None,
            is_tensor_parallel=is_split,
        ),
        host=rate(fields["host_memory_GBps"], "host_memory_GBps"),
        link=rate(fields["link_GBps"], "link_GBps"),
        drive=rate(fields["disk_GBps"], "disk_GBps"),
    )
    hit = re.search(r"(?<!no )\bhits?(?: rate)?(?: of)?[ =:~]*([\d.]+) ?%", said)
    missed = re.search(r"\bmiss(?:es)?(?: rate)?(?: of)?[ =:~]*([\d.]+) ?%", said)
    names = f"{said} {fields['model'].lower()}"
    found_k = re.search(r"\btop[-_ ]?k[ =]*(\d+)|\bk ?= ?(\d+)", names)
    top_k = int(found_k[1] or found_k[2]) if found_k else None
    if top_k is not None and not 0 < top_k <= model.num_experts:
        raise ValueError(f"top-k {top_k} of {model.num_experts} experts")
    rates = [float(each[1]) for each in (hit, missed) if each]
    if max(rates, default=0) > 100:
        raise ValueError(f"a rate of hits or misses of {max(rates):g}%")
    chunk = re.search(r"-ub[ =](\d+)|\bchunk(?:_size)?[ =](\d+)", said)
    prompt = tokens(fields["prompt"])
    context = tokens(fields["context"])
    row = SpeedRow(
        fields=fields,
        model=model,
        runtime=runtime,
        machine=machine,
        key=fields["machine"] or f"{fields['hardware']} {fields['source']}",
        placement=fields["placement"],
        hit=float(hit[1]) / 100 if hit else 1 - float(missed[1]) / 100 if missed else None,
        top_k=top_k,
        context=(prompt or _SHORT) if context is None else context,
        prompt=prompt,
        chunk=int(chunk[1] or chunk[2]) if chunk else None,
        decode=decode,
        prefill=prefill,
    )
    placed = row.placed(known)  # refuses what does not run
    if placed.mechanism not in (HOST, BOTH, COPY, LAYER):
        return row
    held = (1 - placed.cached) * model.all_expert_bytes + placed.whole * model.dense_bytes
    return replace(row, machine=machine.with_server_memory(held))


def find_runtime(fields: Mapping[str, str]) -> Runtime:
    """Return the runtime of a row; one that is not known serves experts as its placement says."""
    try:
        return load_runtime(fields["runtime"])
    except ValueError:
        kind = read_placement(fields["placement"]).kind
        if kind == "auto":
            raise
        absent = HOST if kind in ("host_layers", "resident_experts", "cpu") else COPY
        if kind in ("slots", "cache") and fields["disk_GBps"]:
            absent = READ
        return Runtime(name=fields["runtime"], absent=RESIDENT if kind == RESIDENT else absent)


def find_model(name: str, precision: str) -> RealModel:
    """Return a row's model in its precision; words in brackets may be left out."""
    model = _first(lambda text: load_real_model(text, "model"), _readings(name))
    if not precision:
        return model
    return as_stored(model, _first(_stored, _readings(precision)))


def _stored(text: str) -> Stored:
    """Return a stored precision, also of names that say less (`Q4`)."""
    name = text.strip().lower().removeprefix("ud-").removeprefix("ud_")
    bits = re.match(r"i?q([1-8])", name)
    # Published files called `Q4` are mostly Unsloth's.
    typed = [] if re.fullmatch("i?q[1-7]", name) else [text]
    guesses = [*typed, f"ud-{name}", *([f"ud-q{bits[1]}"] if bits else [])]
    return _first(load_stored, guesses)


def find_hardware(name: str) -> tuple[Hardware, int]:
    """Return the profile of a row's device and how many of them: `2x RTX 3090`."""
    body = name.strip()
    match = re.match(r"(\d+) ?[x×] ?(?=\D)(.*)", body, re.IGNORECASE)  # noqa: RUF001
    cards, body = (int(match[1]), match[2]) if match else (1, body)
    check_one_kind(body)
    try:
        found = _first(_hardware, _readings(body))
        return found, 1 if found.is_processor else cards
    except ValueError:
        if not body or PROCESSORS.search(body.lower()):
            return load_hardware(NO_CARD), 1
        raise


def _hardware(text: str) -> Hardware:
    text = re.sub(r"(\b\d{4})d\b", r"\1", text, flags=re.IGNORECASE)  # the RTX 4090 D of China
    try:
        return load_hardware(text)
    except ValueError as error:
        if (card := soldered(text)) is not None:
            return card
        # A name that several sizes of memory share: the largest.
        for gigabytes in (512, 256, 192, 128, 96, 80, 64, 48, 40, 36, 32, 24, 16, 12, 8):
            try:
                return load_hardware(f"{text} {gigabytes}GB")
            except ValueError:
                continue
        raise error


def _readings(text: str) -> list[str]:
    """Return a name as typed, without what is in brackets, its parts, and its beginnings."""
    bare = re.sub(r"\([^)]*\)", " ", text).replace(":", "-").strip()
    parts = [part.strip() for part in re.split(r"[,+/;]|\bwith\b", bare)]
    words = [word for word in bare.split() if not _TELLS_NOTHING.fullmatch(word.lower())]
    beginnings = [
        " ".join(words[:end])
        for end in range(len(words), 0, -1)
        if not any(_TELLS_APART.fullmatch(word.lower()) for word in words[end:])
    ]
    readings = (text, bare, *parts, *beginnings)
    return list(dict.fromkeys(reading for reading in readings if reading))


def _first(load: Callable[[str], Found], readings: Sequence[str]) -> Found:
    problem: ValueError | None = None
    for reading in readings:
        try:
            return load(reading)
        except ValueError as error:
            problem = problem or error
    raise problem or ValueError("no name given")


def speed(text: str) -> float | None:
    """Read tokens/s: `21.3`, `~45`, `20+`, the middle of `29-32`; None for an empty text."""
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text.split("(")[0])]
    if not numbers or min(numbers) <= 0:
        return None
    if len(numbers) > 1 and re.search(r"\d ?[-–] ?\d", text):  # noqa: RUF001
        return math.sqrt(numbers[0] * numbers[1])
    return numbers[0]


def tokens(text: str) -> int | None:
    """Read a number of tokens: `4096`, `8k`, `pp512`, `969 in/300 out`; None for other texts."""
    match = re.search(r"(\d+(?:\.\d+)?) ?([km]?)", text.lower().replace(",", ""))
    return round(float(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2]]) if match else None


# --- how far off ---


def factor(predicted: float | None, measured: float | None) -> float | None:
    """Return how many times one is the other, the larger over the smaller; None without both."""
    if predicted is None or measured is None:
        return None
    return max(predicted / measured, measured / predicted)


def predict(row: SpeedRow, known: Mechanisms | None = None) -> dict[str, Any]:
    """Return a row's fields with its predictions, by the shipped constants or by `known`."""
    placed = row.placed(known)
    found = row.forecast(known, placed)
    work = row.prompt_work(placed, known)
    prefill = None
    if work is not None and row.prompt is not None:
        prefill = prefill_tok_per_s(work, row.prompt, row.runtime, known)
    thumb = 1 / rule_of_thumb_s(found.work)
    return {
        **row.fields,
        "mechanism": placed.mechanism,
        "group": placed.group,
        "stated": found.is_stated,
        "hit": placed.hit,
        "predicted_tok_s": found.tok_per_s,
        "low": found.ends[0],
        "high": found.ends[1],
        "factor": factor(found.tok_per_s, row.decode),
        "measured_tok_s": row.decode,
        "rule_of_thumb_tok_s": thumb,
        "rule_of_thumb_factor": factor(thumb, row.decode),
        "predicted_prefill_tok_s": prefill,
        "measured_prefill_tok_s": row.prefill,
        "prefill_factor": factor(prefill, row.prefill),
        "drive_s": found.work.seconds((known or mechanisms()).constants)["drive"],
        "placed": str(placed.placement),
        "has_profile": bool(row.runtime.source),
        "key": row.key,
    }


def summary(factors: Iterable[float | None]) -> dict[str, Any]:
    """Return the number of factors, their median, and the shares within `WITHIN`."""
    known = [each for each in factors if each is not None]
    if not known:
        return {"rows": 0, "median_factor": None, "within": {}}
    shares = {f"{most:g}": sum(f <= most for f in known) / len(known) for most in WITHIN}
    return {"rows": len(known), "median_factor": median(known), "within": shares}


def covered(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the share of decode speeds within their ranges."""
    inside = [
        row["low"] <= row["measured_tok_s"] <= row["high"]
        for row in rows
        if row["measured_tok_s"] is not None
    ]
    return sum(inside) / len(inside) if inside else None


def speeds_report(rows: Sequence[Mapping[str, Any]], left_out: Sequence[Mapping[str, Any]]) -> Any:
    """Return `validate --speeds`' result: rows, those left out, and how far off they were."""
    total = summary(row["factor"] for row in rows)
    by = {}
    for name in GROUPS:
        group = [row for row in rows if row["group"] == name]
        for title, chosen in (
            (name, group),
            (f"{name}, stated", [row for row in group if row["stated"]]),
            (f"{name}, assumed", [row for row in group if not row["stated"]]),
        ):
            figures = summary(row["factor"] for row in chosen)
            if figures["rows"] and (title == name or len(chosen) < len(group)):
                machines = len({row["key"] for row in chosen})
                by[title] = {"machines": machines, **figures, "covered": covered(chosen)}
    return {
        "rows": list(rows),
        "left_out": list(left_out),
        "median_factor": total["median_factor"],
        "within": total["within"],
        "covered": covered(rows),
        "mechanisms": by,
        "rule_of_thumb": summary(row["rule_of_thumb_factor"] for row in rows),
        **{
            name: summary(
                row["prefill_factor"] for row in rows if (row["group"] == PROCESSOR) == is_alone
            )
            for is_alone, name in PROMPTS.items()
        },
    }
