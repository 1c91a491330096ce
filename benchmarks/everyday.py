"""Six questions that people ask, as `moecache plan` answers them, beside the nearest measured rows.

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
from lm_eval_moecache.planning.machines import Machine, known, machine
from lm_eval_moecache.planning.models import load_real_model
from lm_eval_moecache.planning.placement import stored_for
from lm_eval_moecache.planning.published import Row, find_hardware, predict, read_rows
from lm_eval_moecache.planning.runtimes import RESIDENT, load_runtime
from lm_eval_moecache.planning.table import advise, usual_precision
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.report.tables import padded

QUESTIONS = (
    "gpt-oss-20b --hardware 'RTX 3060 12GB' --ram 64GB",
    "gpt-oss-120b --hardware 'RTX 4090' --ram 64GB",
    "Qwen3-30B --hardware 'M4 Pro 24GB'",
    "Qwen3.6-35B --hardware 'RTX 5090'",
    "Qwen3-30B --hardware 'RTX 2080 Ti' --ram 32GB",
    "GLM-4.5-Air --hardware '2x RTX 3090'",
)
ROWS = Path(__file__).resolve().parent.parent / "results" / "runtimes" / "rows.csv"
SHOWN = 4
HEAD = """# Six everyday questions

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


def distance(row: Row, model: RealModel, box: Machine) -> float:
    """Return how far a row is from what is asked."""

    def off(one: float | None, other: float | None) -> float:
        return abs(math.log(one / other)) if one and other else 1.0

    both_unified = row.machine.host_bytes_per_s is box.host_bytes_per_s is None
    return (
        off(token_bytes(row.model), token_bytes(model))
        + off(row.machine.card_bytes_per_s, box.card_bytes_per_s)
        + (0.0 if both_unified else off(row.machine.host_bytes_per_s, box.host_bytes_per_s))
        + (0.0 if row.model.name == model.name else 1.5 * math.log(2))
        + off(row.machine.cards, box.cards)
    )


def nearest(question: str, rows: Sequence[Row]) -> list[Row]:
    """Return the rows nearest to a question, of the mechanism that `plan` advises first."""
    words = shlex.split(question)
    options = {key[2:]: value for key, value in zip(words[1::2], words[2::2], strict=True)}
    hardware, cards = find_hardware(options["hardware"])
    assert hardware is not None
    runtime, context = load_runtime("llama.cpp"), 4096
    given = known(cards=cards, ram=options.get("ram"))
    model = usual_precision(load_real_model(words[0]), hardware, given, context)
    mechanism = advise(model, hardware, given, context, 512)["runtimes"][0]["mechanism"]
    model, box = stored_for(runtime, model), machine(hardware, runtime, cards=cards)
    # Few rows divide a model on one memory: beside them, those that lie whole in it.
    mechanisms = {mechanism, RESIDENT} if hardware.is_unified else {mechanism}
    chosen = [row for row in rows if row.decode and row.placed().mechanism in mechanisms]
    chosen.sort(key=lambda row: distance(row, model, box))
    # One row of those that differ in a flag or a layer.
    alike = {(row.key, row.runtime.name, row.model.name): row for row in reversed(chosen)}
    return sorted(alike.values(), key=lambda row: distance(row, model, box))[:SHOWN]


def table(rows: Sequence[Row]) -> str:
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


def main() -> None:
    rows, _ = read_rows(ROWS)
    print(HEAD)
    for question in QUESTIONS:
        page = answer(question)
        print(f"\n## `moecache plan {question}`\n\n```text\n{page}\n```\n\nNearest rows:\n")
        print(table(nearest(question, rows)))


if __name__ == "__main__":
    main()
