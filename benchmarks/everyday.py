"""Forty questions that people ask, as `plan` answers them, next to the nearest measured rows.

    python benchmarks/everyday.py > results/runtimes/questions.md

Near is a row of the same mechanism whose model reads as many bytes a token, whose card and host
are as fast, each by the logarithm of the ratio; another model counts half as much again as twice
the bytes.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_moecache.cli.main import main as moecache
from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.runtimes import RESIDENT, load_runtime
from lm_eval_moecache.report.tables.text import padded
from moecache_plan.advice import Setup, advise, usual_precision
from moecache_plan.detect import parse_machine
from moecache_plan.machines import Machine
from moecache_plan.mechanisms import PROCESSOR
from moecache_plan.placement import stored_for
from moecache_plan.published import SpeedRow, predict, read_rows

QUESTIONS = (
    "gpt-oss-20b --hardware 'RTX 3060 12GB' --ram 64GB",
    "gpt-oss-120b --hardware 'RTX 4090' --ram 64GB",
    "Qwen3-30B --hardware 'M4 Pro 24GB'",
    "Qwen3.6-35B --hardware 'RTX 5090'",
    "Qwen3-30B --hardware 'RTX 2080 Ti' --ram 32GB",
    "GLM-4.5-Air --hardware '2x RTX 3090'",
)
OTHERS = (
    "gpt-oss-20b --hardware 'RTX 3060 Ti' --ram 32GB",
    "gpt-oss-20b --hardware 'RTX 4060 Laptop' --ram 16GB",
    "gpt-oss-20b --hardware 'RTX 4070'",
    "gpt-oss-20b --hardware 'M4 Pro 24GB'",
    "gpt-oss-20b --hardware none --ram 32GB",
    "gpt-oss-120b --hardware 'RTX 3090' --ram 128GB",
    "gpt-oss-120b --hardware 'RTX 5090' --ram 96GB --host_memory 2x6000",
    "gpt-oss-120b --hardware '2x RTX 3090' --ram 64GB",
    "gpt-oss-120b --hardware 'Strix Halo'",
    "gpt-oss-120b --hardware 'DGX Spark'",
    "gpt-oss-120b --hardware 'M4 Max 128GB'",
    "gpt-oss-120b --hardware none --ram 128GB",
    "Qwen3-30B --hardware 'RTX 4060 Ti 16GB' --ram 32GB",
    "Qwen3-30B --hardware 'RX 7900 XTX'",
    "Qwen3-30B --hardware 'Strix Halo'",
    "Qwen3-30B --hardware none --ram 32GB --host_memory 2x3200",
    "Qwen3.6-35B --hardware 'RTX 3060 12GB' --ram 32GB",
    "Qwen3.6-35B --hardware 'RTX 4070' --ram 32GB",
    "Qwen3.6-35B --hardware 'RTX 4090' --ram 64GB",
    "Qwen3.6-35B --hardware 'M3 Max 48GB'",
    "Qwen3.6-35B --hardware 'RX 9070 XT' --ram 32GB",
    "Qwen3.6-35B --hardware none --ram 64GB",
    "Qwen3-Next-80B --hardware 'RTX 4090' --ram 64GB",
    "Qwen3-Next-80B --hardware 'DGX Spark'",
    "GLM-4.5-Air --hardware 'RTX 4090' --ram 128GB",
    "GLM-4.5-Air --hardware 'Strix Halo'",
    "GLM-4.7-Flash --hardware 'RTX 3060 12GB' --ram 32GB",
    "Gemma-4-26B-A4B --hardware 'RTX 4060 Ti 16GB' --ram 32GB",
    "Qwen3-235B --hardware 'RTX 3090' --ram 128GB",
    "Qwen3-235B --hardware 'M3 Ultra 512GB'",
    "DeepSeek-V3 --hardware 'RTX 4090' --ram 512GB",
    "DeepSeek-V3 --hardware 'M3 Ultra 512GB'",
    "Kimi-K2 --hardware 'RTX PRO 6000' --ram 768GB",
    "Mixtral-8x7B --hardware 'RTX 3090' --ram 64GB",
)
"""Of these the page has one line each."""
ROWS = Path(__file__).resolve().parent.parent / "results" / "runtimes" / "rows.csv"
SHOWN = 4
HEAD = """# Forty everyday questions

Written by `python benchmarks/everyday.py`: what `moecache plan` answers, and the rows of
[rows.csv](rows.csv) nearest to each question, with their forecasts by the constants that
ship, which those rows had a part in."""


def answer(question: str) -> str:
    """Return what `moecache plan` prints."""
    os.environ["COLUMNS"] = "80"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        moecache(["plan", *shlex.split(question)])
    return out.getvalue().rstrip()


def token_bytes(model: RealModel) -> float:
    """Return the bytes of weights that a token reads."""
    dense = model.num_layers * model.layer_dense_bytes
    return dense + model.num_layers * model.top_k * model.expert_bytes


def distance(row: SpeedRow, model: RealModel, box: Machine) -> float:
    """Return how far a row is from what is asked."""

    def off(one: float | None, other: float | None) -> float:
        return abs(math.log(one / other)) if one and other else 1.0

    runtime = load_runtime("llama.cpp")
    boxes = (row.machine, box)
    cards = [None if each.is_processor else each.memory_bytes_per_s for each in boxes]
    hosts = [each.host_rate(runtime) for each in boxes]
    return (
        off(token_bytes(row.model), token_bytes(model))
        + off(*cards)
        + (0.0 if hosts == [None, None] else off(*hosts))
        + (0.0 if row.model.name == model.name else 1.5 * math.log(2))
        + off(row.machine.cards, box.cards)
    )


def nearest(question: str, rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    """Return the rows nearest to a question, of the mechanism that `plan` advises first."""
    return advised(question, rows)[1]


def advised(question: str, rows: Sequence[SpeedRow]) -> tuple[str, list[SpeedRow]]:
    """Return what `plan` says first, and the rows nearest to a question."""
    words = shlex.split(question)
    options = {key[2:]: value for key, value in zip(words[1::2], words[2::2], strict=True)}
    said = {key: options.get(key) for key in ("ram", "host_memory", "disk")}
    box = parse_machine(options["hardware"], **said)
    model = usual_precision(load_real_model(words[0]), box, 4096)
    advice = advise(Setup(model=model, machine=box, context=4096, prompt=512))
    first = advice["runtimes"][0]
    mechanism = PROCESSOR if first["placement"] == "cpu" else first["mechanism"]
    model = stored_for(load_runtime("llama.cpp"), model)
    # Few rows divide a model on one memory: next to them, those that lie whole in it.
    mechanisms = {mechanism, RESIDENT} if box.shares_memory else {mechanism}
    chosen = [row for row in rows if row.decode and row.placed().group in mechanisms]
    chosen.sort(key=lambda row: distance(row, model, box))
    # One row of those that differ in a flag or a layer.
    alike = {(row.key, row.runtime.name, row.model.name): row for row in reversed(chosen)}
    near = sorted(alike.values(), key=lambda row: distance(row, model, box))[:SHOWN]
    return advice["first"], near


def table(rows: Sequence[SpeedRow]) -> str:
    """Return the rows as a table: what was measured, and what is forecast of it."""
    heads = ("runtime", "model", "precision", "hardware", "RAM, GB/s", "placement")
    lines = []
    for row in rows:
        found: dict[str, Any] = predict(row)
        ran = [row.fields[key] for key in ("runtime", "model", "precision", "hardware")]
        host = row.fields["host_memory_GBps"] or "unstated"
        low, high = f"{found['low']:.3g}", f"{found['high']:.3g}"
        forecast = f"{found['predicted_tok_s']:.3g} ({low} to {high})"
        lines.append((*ran, host, found["placed"], f"{row.decode:.3g}", forecast))
    return padded((*heads, "measured tok/s", "forecast"), lines)


def lines(rows: Sequence[SpeedRow]) -> list[tuple[str, ...]]:
    """Return the other questions with the first sentence of `plan`'s answers."""
    found = []
    for question in OTHERS:
        first, near_rows = advised(question, rows)
        row = near_rows[0]
        near = ", ".join(row.fields[key] for key in ("runtime", "model", "precision", "hardware"))
        found.append((question, first, near, f"{row.decode:.3g}"))
    return found


def main() -> None:
    rows, _ = read_rows(ROWS)
    print(HEAD)
    for question in QUESTIONS:
        page = answer(question)
        print(f"\n## `moecache plan {question}`\n\n```text\n{page}\n```\n\nNearest rows:\n")
        print(table(nearest(question, rows)))
    print("\n## Others\n\nWhat `plan` says first, and the nearest row.\n")
    print(padded(("question", "answer", "nearest row", "measured tok/s"), lines(rows)))


if __name__ == "__main__":
    main()
