"""Lossy answers at matched traffic on the shipped model: results/lossy_answers/accuracy.

Usage: python benchmarks/lossy_accuracy.py [--out results/lossy_answers/accuracy]. About ten
minutes on one core. Writes `cells.json.gz` (cells already there are kept), `table.md` and the plot.

200 letter questions (`tiny_mmlu`, with lm-eval's prompts), caches of two cycles (16 of 64 experts a
layer), LRU, no prefetch. A question is routed token by token as if decoded, so that a rule acts on
all of it. Each rule has one parameter that trades loads for loss. It is bisected on the first ten
questions until it saves a third of the loads, and that value is used for all questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grid import RESULTS, Floats, Run, arguments, bounds, draws, fill, interval, sections

from lm_eval_moecache.records.ledger import total
from lm_eval_moecache.report.plots import legend, look, new_figure, save
from lm_eval_moecache.report.tables.text import padded
from lm_eval_moecache.sweep.evaluation import leaf_tasks
from moecache_lab.analyses.divergence import Reading, compare, read_window
from moecache_lab.analyzed_model import AnalyzedModel

DOCUMENTS, TRIED = 200, 10
SLOTS = 16
SAVED = 1 / 3
"""The share of the loads to save."""
FETCH = "fetch"
# Rule -> fixed settings, the swept parameter, and its range from no saving to the largest.
RULES: Mapping[str, tuple[Mapping[str, Any], str, tuple[float, float]]] = {
    "drop_cold": ({"miss": "drop_cold"}, "miss.factor", (0.0, 2.0)),
    "skip_mass": ({"routing": "skip_mass"}, "routing.p", (1.0, 0.3)),
    "cache_prior": (
        {"routing": "cache_prior", "routing.delta": "token", "routing.top_j": 1},
        "routing.lambda",
        (0.0, 1.0),
    ),
    "buddy": (
        {"miss": "buddy", "miss.alpha": 0.95, "miss.k_max": 16, "miss.rho": 3}
        | {"miss.tau_scale": "percentile"},
        "miss.tau",
        (100.0, 0.0),
    ),
    "skip_ratio": ({"routing": "skip_ratio", "routing.k_min": 1}, "routing.t", (0.0, 1.0)),
}


class Questions:
    """The shipped model, 200 questions, and its unmodified readings of them."""

    def __init__(self) -> None:
        [task] = leaf_tasks(["tiny_mmlu"]).values()
        rows = list(islice(task.test_docs(), DOCUMENTS))
        self.analyzed = AnalyzedModel("tiny", ["-"], 1)
        tokenizer = self.analyzed.tokenizer
        self.golds = [row["answer"] for row in rows]
        # lm-eval scores the letters after the prompt: the last logits, whatever letter follows.
        self.windows = [
            torch.tensor(tokenizer(task.doc_to_text(row) + " A").input_ids) for row in rows
        ]
        self.letters = [tokenizer(f"Answer: {letter}").input_ids[-1] for letter in "ABCD"]
        self.plain = [read_window(self.analyzed, window) for window in self.windows]

    def right(self, document: int, reading: Reading) -> int:
        """Return 1 if the likeliest of the four letters is the right one, else 0."""
        return int(reading.logits_TV[-1, self.letters].argmax() == self.golds[document])

    def under(self, overrides: Mapping[str, Any], documents: int) -> Run:
        """Read the first `documents` questions under a rule; return columns of sums by question."""
        columns: dict[str, list[float]] = {}
        with self.analyzed.under(overrides, capacity=f"{SLOTS}/layer", scan=True) as engine:
            for document, before in enumerate(self.plain[:documents]):
                first_pass = len(engine.ledger.passes)
                after = read_window(self.analyzed, before.tokens_T)
                window, counts = compare(before, after), total(engine.ledger.passes[first_pass:])
                row = {
                    "tokens": window["tokens"],
                    "kl": round(window["kl"], 6),
                    "same_top": window["same_top"],
                    "routes": round(window["routes"], 4),
                    "right": self.right(document, after),
                    "loads": counts.bytes_moved // self.analyzed.geometry.max_expert_bytes,
                    "lost": round(counts.lost_weight, 4),
                    "weighed": counts.weighed_tokens,
                }
                for key, value in row.items():
                    columns.setdefault(key, []).append(value)
        return columns


def measure(cell: Run, asked: Questions) -> Run:
    if cell["rule"] == FETCH:
        lossless = asked.under({}, DOCUMENTS)
        return {"right": lossless["right"], "loads": lossless["loads"]}
    fixed, key, (mild, strong) = RULES[cell["rule"]]
    base, savings = sum(asked.under({}, TRIED)["loads"]), {}
    for _ in range(5):
        value = round((mild + strong) / 2, 3)
        savings[value] = 1 - sum(asked.under({**fixed, key: value}, TRIED)["loads"]) / base
        mild, strong = (mild, value) if savings[value] > SAVED else (value, strong)
    value = min(savings, key=lambda value: abs(savings[value] - SAVED))
    return {"parameter": key, "value": value, **asked.under({**fixed, key: value}, DOCUMENTS)}


def cells(asked: Questions) -> list[tuple[Run, Questions]]:
    return [({"rule": rule}, asked) for rule in (FETCH, *RULES)]


def figures(run: Run, base: Run) -> dict[str, Floats]:
    """Return each figure: first over all documents, then over each draw of documents."""

    def sums(values: Sequence[float]) -> Floats:
        totals: Floats = draws(DOCUMENTS) @ np.asarray(values, dtype=np.float64)
        return totals

    tokens = sums(run["tokens"])
    return {
        "saved": 100 * (1 - sums(run["loads"]) / sums(base["loads"])),
        "lost": 100 * sums(run["lost"]) / sums(run["weighed"]),
        "points": 100 * (sums(run["right"]) - sums(base["right"])) / DOCUMENTS,
        "kl": sums(run["kl"]) / tokens,
        "same_top": 100 * sums(run["same_top"]) / tokens,
        "routes": 100 * sums(run["routes"]) / tokens,
    }


def render(runs: Sequence[Run]) -> str:
    base, rows = runs[0], []
    for run in runs[1:]:
        measures = figures(run, base)
        lost, same_top, routes = (f"{measures[k][0]:.1f}" for k in ("lost", "same_top", "routes"))
        fields = [interval(measures["saved"], "{:.0f}"), lost, f"{100 * np.mean(run['right']):.1f}"]
        fields += [interval(measures["points"], "{:+.1f}"), interval(measures["kl"], "{:.3f}")]
        rows.append([f"`{run['cell']['rule']}`", parameter_of(run), *fields, same_top, routes])
    headers = ["Rule", "setting", "loads saved %", "weight lost %", "accuracy %", "points"]
    headers += ["KL, nats a token", "same likeliest token %", "same routes %"]
    plain = 100 * np.mean(base["right"])
    title = f"{DOCUMENTS} letter questions; unmodified {plain:.1f}% right, chance 25%"
    return sections({title: padded(headers, rows)})


def parameter_of(run: Run) -> str:
    return f"{run['parameter'].split('.')[-1]} = {run['value']:g}"


def draw(runs: Sequence[Run], file: Path) -> None:
    """Plot accuracy and divergence over loads saved, with intervals on both axes."""
    figure, panels = new_figure(columns=2)
    series = {}
    for index, run in enumerate(runs[1:]):
        measures = figures(run, runs[0])
        name = f"{run['cell']['rule']} {parameter_of(run)}"
        for axes, key in zip(panels, ("points", "kl"), strict=True):
            (x, x_errors), (y, y_errors) = _bars(measures["saved"]), _bars(measures[key])
            series[name] = axes.errorbar(
                x, y, xerr=x_errors, yerr=y_errors, capsize=2, linestyle="", **look(index)
            )
    panels[0].set_ylabel("accuracy over unmodified [points]")
    panels[1].set_ylabel("KL of the output [nats a token]")
    panels[0].axhline(0, color="0.6", linewidth=0.8)
    for axes in panels:
        axes.set_xlabel("loads saved [%]")
        axes.set_xlim(20, 50)
    panels[1].set_ylim(bottom=0)
    legend(figure, series)
    save(figure, file)


def _bars(values: Floats) -> tuple[float, list[list[float]]]:
    (low, high), middle = bounds(values), float(values[0])
    return middle, [[max(middle - low, 0)], [max(high - middle, 0)]]


def main() -> None:
    out = arguments(__doc__, out=RESULTS / "lossy_answers" / "accuracy").out
    torch.set_num_threads(1)
    runs = fill(out / "cells.json.gz", cells(Questions()), measure, save_each=1)
    (out / "table.md").write_text(render(runs))
    draw(runs, out / "plots" / "accuracy.svg")


if __name__ == "__main__":
    main()
