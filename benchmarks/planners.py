"""Twenty published speeds, as `moecache plan` and three other planners answer them.

    python benchmarks/planners.py --whichllm W/bin/python --llmfit L/bin/llmfit \
        --moe_fit M/bin/python > results/runtimes/planners.md

W, L and M are virtual environments of their own, with `pip install whichllm==0.5.21 'typer<0.21'`
(its command does not start with 0.29.2), `llmfit==1.1.17` and `moe-fit==0.1.0`. A planner that
is not given is left out, and the page says so.

The questions are every k-th, in the order of results/runtimes/rows.csv, of the rows that all can
be asked: decode speeds of llama.cpp and Ollama, of a model that llmfit's database has, in bits that
all know, on one NVIDIA card, on unified memory, or on a processor alone. k is their number over 20.

All get the same inputs: model and bits, the device's memory and its rate, the host's rate where the
row says it (89.6 GB/s else), RAM that holds the model, the context. Where experts lie is theirs to
say, but on a processor alone. Ours answers by constants and ranges made without the row's machine;
the others' come from their authors, llmfit's partly from rows of this very table.

moe-fit says how fast a drive lets a model run, and nothing where memory holds it. So it is asked
about all rows that read from a drive of a stated rate, too.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from lm_eval_moecache.records.files import traces_dir
from lm_eval_moecache.records.runtimes import CUDA, METAL, READ, launches
from lm_eval_moecache.report.tables.text import padded
from moecache_lab.fit_runtimes import begin_at, fit, fit_all, groups_of, spreads_of
from moecache_plan.advice import flags
from moecache_plan.mechanisms import Mechanisms
from moecache_plan.published import SpeedRow, factor, read_rows

ROWS = Path(__file__).resolve().parent.parent / "results" / "runtimes" / "rows.csv"
ASKED = 20
PROGRAMS = ("llama.cpp", "ollama")
BITS = {
    **{name: name.upper() for name in ("q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "q8_0")},
    **dict.fromkeys(("mxfp4", "mxfp4_moe"), "MXFP4"),
}
"""Stored bits -> their name in all planners."""
IDS = {
    "DeepSeek-V2-Lite": "deepseek-ai/DeepSeek-V2-Lite",
    "DeepSeek-V3": "deepseek-ai/DeepSeek-V3",
    "Gemma-4-26B-A4B": "google/gemma-4-26B-A4B",
    "GLM-4.5-Air": "zai-org/GLM-4.5-Air",
    "GLM-4.7-Flash": "zai-org/GLM-4.7-Flash",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "LFM2-8B-A1B": "LiquidAI/LFM2-8B-A1B",
    "LFM2-24B-A2B": "LiquidAI/LFM2-24B-A2B",
    "MiniMax-M2": "MiniMaxAI/MiniMax-M2",
    "Mixtral-8x7B": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "Nemotron-3-Nano-30B-A3B": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "OLMoE-1B-7B": "allenai/OLMoE-1B-7B-0924",
    "Qwen1.5-MoE-A2.7B": "Qwen/Qwen1.5-MoE-A2.7B",
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "Qwen3-Next-80B-A3B": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen3.5-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
    "Qwen3.5-122B-A10B": "Qwen/Qwen3.5-122B-A10B",
    "Qwen3.6-35B-A3B": "Qwen/Qwen3.6-35B-A3B",
    "Qwen3.8-Flash-Next": "Qwen/Qwen3.8-Flash-Next",
}
"""Model of a row -> its name in llmfit's database."""
RAM_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
"""GB that hosts are sold with."""
AS_SOLD = 2**30 / 1e9
"""Ours counts a GB of memory as 1e9 bytes, to be safe; a machine reports what was sold to it."""
OURS = "moecache plan"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A row, and what every planner is given of its machine, in bytes and bytes/s."""

    row: SpeedRow
    ram: float
    card: float
    card_rate: float | None
    host_rate: float
    is_unified: bool

    def told(self) -> dict[str, Any]:
        """Return it as plain values, for other interpreters."""
        model, machine = self.row.model, self.row.machine
        experts = model.num_layers * model.num_experts * model.expert_weights
        active = experts * model.top_k / model.num_experts
        vendor = "nvidia" if launches(machine) == CUDA else "amd"
        return {
            "model": model.name,
            "bits": BITS.get(model.stored.name, ""),
            "weights": model.num_weights,
            "active": round(model.num_weights - experts + active),
            "layers": model.num_layers,
            "experts": model.num_experts,
            "top_k": self.row.top_k or model.top_k,
            "expert_bytes": model.all_expert_bytes,
            "dense_bytes": model.dense_bytes,
            "context": max(self.row.context, 1),
            "ram": self.ram * AS_SOLD,
            "card": self.card * AS_SOLD,
            "card_rate": self.card_rate,
            "is_unified": self.is_unified,
            "vendor": "apple" if launches(machine) == METAL else vendor,
            "cache": model.all_expert_bytes * self.row.placed().cached,
            "drive": machine.drive_rate,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A planner's speed, in tokens/s, with its range and what it says to type, where it says so."""

    speed: float | None = None
    low: float | None = None
    high: float | None = None
    typed: str = ""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Answer:
        return cls(**{name: found.get(name) for name in ("speed", "low", "high")})


# --- the questions ---


def can_be_asked(row: SpeedRow) -> bool:
    """Whether every planner can be given this row's program, model, bits and machine."""
    one, nvidia = row.machine.cards == 1, launches(row.machine) == CUDA
    is_known = row.runtime.name in PROGRAMS and row.model.name in IDS
    has_speed = row.decode is not None and row.top_k is None
    is_told = nvidia or row.machine.is_unified
    return has_speed and is_known and one and is_told and row.model.stored.name in BITS


def picked(rows: Sequence[SpeedRow]) -> tuple[list[SpeedRow], list[SpeedRow]]:
    """Return the rows that can be asked, and every k-th of them."""
    able = [row for row in rows if can_be_asked(row)]
    return able, able[:: len(able) // ASKED][:ASKED]


def question(row: SpeedRow) -> Question:
    """Return what planners are given of a row's machine."""
    model, box = row.model, row.machine
    is_alone = row.placed().placement.kind == "cpu"
    needed = 1.2 * (model.all_expert_bytes + model.dense_bytes) + 8e9
    ram = next(size * 1e9 for size in RAM_SIZES if size * 1e9 >= needed)
    is_unified = box.shares_memory and not is_alone
    return Question(
        row=row,
        ram=box.ram if is_unified else ram,
        card=0.0 if is_alone else box.card_bytes,
        card_rate=None if is_alone else box.memory_bytes_per_s,
        host_rate=box.host_rate(row.runtime) or box.memory_bytes_per_s,
        is_unified=is_unified,
    )


# --- the answers ---


def without(row: SpeedRow, rows: Sequence[SpeedRow], begin: Mechanisms, groups: Any) -> Mechanisms:
    """Return the constants and ranges that would ship without a row's machine."""
    others = fit([other for other in rows if other.key != row.key], begin)
    kept = {n: [each for each in group if each[0] != row.key] for n, group in groups.items()}
    return replace(others, spreads=spreads_of({n: group for n, group in kept.items() if group}))


def ours(asked: Question, known: Mechanisms) -> Answer:
    """Return what `plan` says where nobody says where experts lie."""
    row = asked.row
    row = replace(row, machine=replace(row.machine, host_memory_bytes=asked.ram))
    if row.placed().placement.kind != "cpu":
        row = replace(row, placement="auto")
    placed = row.placed(known)
    found = row.forecast(known, placed)
    typed = flags(row.model, row.machine, row.runtime, placed)
    low, high = found.ends
    return Answer(speed=found.tok_per_s, low=low, high=high, typed=typed)


WHICHLLM = """
import json, sys
from whichllm.engine.compatibility import check_compatibility
from whichllm.engine.performance import estimate_speed_uncertainty, estimate_tok_per_sec
from whichllm.hardware.types import GPUInfo, HardwareInfo
from whichllm.models.types import GGUFVariant, ModelInfo
answers = []
for q in json.load(sys.stdin):
    size = round(q["expert_bytes"] + q["dense_bytes"])
    variant = GGUFVariant(filename="file.gguf", quant_type=q["bits"], file_size_bytes=size)
    model = ModelInfo(id=q["model"], family_id=q["model"], name=q["model"], is_moe=True,
        parameter_count=q["weights"], parameter_count_active=q["active"], gguf_variants=[variant])
    gpus = []
    if q["card_rate"]:
        memory = round(q["ram"] if q["is_unified"] else q["card"])
        gpus = [GPUInfo(name="card", vendor=q["vendor"], vram_bytes=memory,
            memory_bandwidth_gbps=q["card_rate"] / 1e9, shared_memory=q["is_unified"])]
    box = HardwareInfo(gpus=gpus, ram_bytes=round(q["ram"]), cpu_cores=8, has_avx2=True)
    fits = check_compatibility(model, variant, box, q["context"])
    gpu = gpus[0] if gpus else None
    speed = estimate_tok_per_sec(model, variant, gpu, fits.fit_type) if fits.can_run else None
    _, ends, _ = estimate_speed_uncertainty(model, variant, gpu, fits.fit_type, speed)
    answers.append({"speed": speed, "low": ends and ends[0], "high": ends and ends[1]})
print(json.dumps(answers))
"""
MOE_FIT = """
import json, sys
from moefit.gguf import Model, Tensor
from moefit.machine import Machine
from moefit.plan import llama_flags, make
answers = []
for q in json.load(sys.stdin):
    share = round(q["expert_bytes"] / q["layers"])
    tensors = [Tensor("output.weight", (), 0, 0, round(q["dense_bytes"]))]
    tensors += [Tensor(f"blk.{i}.ffn_up_exps.weight", (), 0, 0, share) for i in range(q["layers"])]
    metadata = {"general.architecture": "any", "any.block_count": q["layers"],
        "any.expert_count": q["experts"], "any.expert_used_count": q["top_k"]}
    model = Model(path="file.gguf", metadata=metadata, tensors=tensors)
    vram = 0 if q["is_unified"] else round(q["card"])
    box = Machine(vram_bytes=vram, ram_bytes=round(q["ram"]), free_disk_bytes=10**15,
        disk_path="", read_bytes_per_second=q["drive"])
    plan = make(model, box, q["context"])
    low, high = plan.tokens_per_second_estimate or (None, None)
    if low in (None, float("inf")):
        answers.append({})
        continue
    high = None if high == float("inf") else high
    answers.append({"speed": (low * high) ** 0.5 if high else low, "low": low, "high": high or 1e9})
print(json.dumps(answers))
"""


def in_python(python: str, package: str, script: str, told: Sequence[Any]) -> tuple[str, Any]:
    """Return a package's version in an interpreter, and what a script prints there."""
    show = f"from importlib.metadata import version; print(version({package!r}))"
    found = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True)
    run = [python, "-c", script]
    answers = subprocess.run(
        run, input=json.dumps(list(told)), capture_output=True, text=True, check=True
    )
    return found.stdout.strip(), json.loads(answers.stdout)


def llmfit(command: str, questions: Sequence[Question]) -> tuple[str, list[Answer]]:
    """Return llmfit's version and answers, from a profile and a card that it finds in a folder.

    Its profiles have no size of a card's memory, which it asks `nvidia-smi`: one that answers so.
    """

    def run(*words: str) -> str:
        given = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run([command, *words], capture_output=True, text=True, env=given)
        return done.stdout

    answers = []
    with tempfile.TemporaryDirectory() as folder:
        profile, smi = Path(folder, "row.json"), Path(folder, "nvidia-smi")
        for asked in questions:
            told = asked.told()
            hardware: dict[str, Any] = {
                "total_ram_gb": asked.ram / 1e9,
                "unified_memory": asked.is_unified,
                "ddr_bandwidth_gbps": asked.host_rate / 1e9,
            }
            if asked.card_rate:
                hardware["gpu_memory_bandwidth_gbps"] = asked.card_rate / 1e9
            record = {"name": "row", "schema_version": 1, "hardware": hardware}
            profile.write_text(json.dumps(record))
            memory, name = round(told["card"] / 2**20), asked.row.fields["hardware"]
            is_card = asked.card_rate and not asked.is_unified
            says = f"echo 'None, {memory}, {memory}, NVIDIA {name}'" if is_card else "exit 1"
            smi.write_text(f"#!/bin/sh\n{says}\n")
            smi.chmod(0o755)
            words = ("plan", IDS[asked.row.model.name], "--context", str(told["context"]))
            text = run("--profile", str(profile), *words, "--quant", told["bits"], "--json")
            answers.append(Answer(speed=json.loads(text)["current"]["estimated_tps"]))
        return run("--version").split()[-1], answers


# --- the page ---


def standing(name: str, answers: Sequence[Answer], rows: Sequence[SpeedRow]) -> tuple[str, ...]:
    """Return a planner's line: answers, median factor, shares within factors and in its range."""
    pairs = zip(answers, rows, strict=True)
    given = [(answer, row.decode or 0.0) for answer, row in pairs if answer.speed]
    if not given:
        return (name, f"0 of {len(rows)}", *("-",) * 5)
    off = [factor(answer.speed, measured) or math.inf for answer, measured in given]
    ranges = [(a.low, a.high, m) for a, m in given if a.low is not None and a.high is not None]
    inside = [low <= measured <= high for low, high, measured in ranges]
    return (
        name,
        f"{len(given)} of {len(rows)}",
        f"{median(off):.2f}",
        f"{sum(each <= 1.5 for each in off)} of {len(off)}",
        f"{max(off):.1f}",
        f"{sum(inside)} of {len(inside)}" if inside else "no range",
        f"{median(high / low for low, high, _ in ranges):.1f}" if ranges else "-",
    )


def shown(answer: Answer) -> str:
    """Return `27 (21 to 34)`."""
    if not answer.speed:
        return "-"
    ends = f" ({answer.low:.3g} to {answer.high:.3g})" if answer.low and answer.high else ""
    return f"{answer.speed:.3g}{ends}"


HEADS = ("planner", "answers", "median factor", "within 1.5", "worst", "in its range", "high / low")
TYPED = {
    OURS: "yes, each program's",
    "whichllm": "no",
    "llmfit": "no",
    "moe-fit": "yes, llama.cpp's",
}


def table(answers: Mapping[str, Sequence[Answer]], rows: Sequence[SpeedRow]) -> str:
    """Return the planners' standing over these rows."""
    lines = [standing(name, found, rows) for name, found in answers.items()]
    typed = [TYPED[name.rpartition(" ")[0]] for name in answers]
    lines = [(*line, each) for line, each in zip(lines, typed, strict=True)]
    return padded((*HEADS, "says what to type"), lines)


def listed(answers: Mapping[str, Sequence[Answer]], rows: Sequence[SpeedRow]) -> str:
    """Return every question with its answers."""
    columns = ("runtime", "model", "precision", "hardware", "host_memory_GBps", "placement")
    lines = []
    for index, row in enumerate(rows):
        asked = [row.fields[name] or "unstated" for name in columns]
        speeds = [shown(found[index]) for found in answers.values()]
        lines.append((*asked, f"{row.decode:.3g}", *speeds))
    return padded((*columns[:4], "RAM, GB/s", "placement", "measured", *answers), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--whichllm", metavar="PYTHON", help="interpreter with whichllm")
    parser.add_argument("--llmfit", metavar="COMMAND", help="llmfit's command")
    parser.add_argument("--moe_fit", metavar="PYTHON", help="interpreter with moe-fit")
    given = parser.parse_args()
    begin = begin_at(traces_dir().glob("*.parquet"))
    rows, _ = read_rows(ROWS, begin)
    able, chosen = picked(rows)
    questions = [question(row) for row in able]
    told = [asked.told() for asked in questions]
    _, result = fit_all(rows, begin)
    groups = groups_of(result["rows"])
    answers: dict[str, list[Answer]] = {
        f"{OURS} {importlib.metadata.version('lm-eval-moecache')}": [
            ours(asked, without(asked.row, rows, begin, groups)) for asked in questions
        ]
    }
    drives = [r for r in rows if r.placed().mechanism == READ and r.fields["disk_GBps"]]
    by_key = {id(row): record for row, record in zip(rows, result["rows"], strict=True)}
    reading = {
        next(iter(answers)): [
            Answer(speed=found["predicted_tok_s"], low=found["low"], high=found["high"])
            for found in (by_key[id(row)] for row in drives)
        ]
    }
    missing = [name for name, where in vars(given).items() if where is None]
    if given.whichllm:
        number, found = in_python(given.whichllm, "whichllm", WHICHLLM, told)
        answers[f"whichllm {number}"] = list(map(Answer.of, found))
    if given.llmfit:
        number, speeds = llmfit(given.llmfit, questions)
        answers[f"llmfit {number}"] = speeds
    if given.moe_fit:
        number, found = in_python(given.moe_fit, "moe-fit", MOE_FIT, told)
        answers[f"moe-fit {number}"] = list(map(Answer.of, found))
        asked = [question(row).told() for row in drives]
        for each in asked:
            # With what it holds back for the system, it then caches as much as they did.
            held = each["cache"] + each["dense_bytes"]
            each |= {"card": 0, "ram": min(held / 0.8, held + 8e9)}
        _, found = in_python(given.moe_fit, "moe-fit", MOE_FIT, asked)
        reading[f"moe-fit {number}"] = list(map(Answer.of, found))
    print("# Planners compared\n")
    print(f"Written by `python benchmarks/planners.py` on {datetime.date.today():%-d %B %Y}: its")
    print("first lines say how questions are picked, and what every planner is given. Speeds are")
    print("tokens/s, with the range that a planner prints. *Factor*: how many times off;")
    print("*high / low*: how wide its range is, in the median.\n")
    for name in missing:
        print(f"{name} is missing: give --{name}.\n")
    numbers = [next(i for i, each in enumerate(able) if each is row) for row in chosen]
    twenty = {name: [found[number] for number in numbers] for name, found in answers.items()}
    print(f"## {len(chosen)} of {len(able)} rows that all can be asked\n")
    print(table(twenty, chosen) + "\n" + listed(twenty, chosen))
    print(f"## All {len(able)}\n\n{table(answers, able)}")
    print("## Rows that read from a drive of a stated rate\n")
    print(table(reading, drives) + "\n" + listed(reading, drives))


if __name__ == "__main__":
    main()
