"""Do a run's own metrics predict the points it loses? Over all lossy runs, on two models.

Usage: python benchmarks/lost_points.py [FOLDER ...] [--write]

A run reports how much routing weight it lost and which share of the router's choices it executed.
How far it moves the output takes an analysis of a text with the unmodified model next to it:

    moecache analyze divergence --capacity 16/layer --policies A,B --out results/lost_points
    moecache analyze divergence --pretrained carved_gemma --trust_remote_code true \
      --capacity 14/layer --policies A,B --out results/lost_points/carved_gemma

Each lossy run below the folders (default: results) is paired with a lossless one of the same
documents; the difference of right answers is what was lost. Lines through 0 are fitted to all rules
but one, or to all of one model, and predict that one, or the other model's; a sign is of use if it
predicts within 2 points. With `--write` the
pairs and the table go to results/lost_points.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import scipy.stats
from grid import RESULTS, text_table

from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.report.runs.run import Run

FOLDER = RESULTS / "lost_points"
GENERATED = "tiny_gsm8k"
"""The task that decodes, token after token as the text of the divergence is read."""
SIGNS = {
    "lost weight": lambda pair: pair["lost_weight"],
    "choices not executed": lambda pair: 1 - pair["fidelity"],
    "KL": lambda pair: pair["kl"],
    "KL, on word problems": lambda pair: pair["kl"] if pair["task"] == GENERATED else None,
}
"""Name -> the sign of a pair; None where it is not known."""
ANALYSED = {("tiny", "25%"): FOLDER, ("carved_gemma", "14/layer"): FOLDER / "carved_gemma"}
"""Model and capacity of the runs whose policies were analysed -> where the analysis is."""
LEAST_DOCUMENTS = 40
LOST_WEIGHT_SINCE = "2026-11-26T02:40"
"""Runs before it counted no weight in passes of one token under the rules that look at none."""
LOOKS_AT_NO_WEIGHT = {
    *("cache_prior", "max_rank", "cumsum", "pruning", "pre_gated", "drop", "substitute_random")
}
WITHIN = 2.0
"""Points within which a forecast would be of use."""
Pair = Mapping[str, Any]


def divergences() -> dict[tuple[str, str], dict[str, float]]:
    """Return model and capacity -> policy -> KL from the unmodified model, in nats a token."""
    files = {key: folder / "divergence.json" for key, folder in ANALYSED.items()}
    rows = {key: json.loads(file.read_text())["rows"] for key, file in files.items()}
    return {key: {row["policy"]: row["kl"] for row in table} for key, table in rows.items()}


def right(run: Run, task: str) -> dict[str, float]:
    """Return document -> right or wrong; empty for perplexities and results without documents."""
    score = run.score(task)
    answers = run.samples.get(task, {}).get(score.key, {}) if score else {}
    return {} if any(isinstance(value, list) for value in answers.values()) else dict(answers)


def rule_of(run: Run) -> str:
    """Return a rule's name: its policy's, and the parameters that distinguish it."""
    axes, given = ("routing.", "miss."), run.model_args.items()
    parameters = [f"{key.partition('.')[2]}={v}" for key, v in given if key.startswith(axes)]
    return " ".join([run.moecache["policy"]["name"], *parameters])


def lost_weight_of(run: Run, task: str) -> float | None:
    """Return the share of its weight that a task lost, where all of its tokens were counted."""
    figures, date = run.moecache["tasks"][task], str(run.environment.get("date") or "")
    axes = run.moecache["policy"].values()
    names = {axis["name"] if isinstance(axis, dict) else axis for axis in axes}
    has_decoded = figures.get("decode_miss_rate") is not None
    if has_decoded and date < LOST_WEIGHT_SINCE and run.model_args.get("scoring") != "scan":
        return None if names & LOOKS_AT_NO_WEIGHT else figures.get("lost_weight_share")
    return figures.get("lost_weight_share")


def of_texts(runs: Sequence[Run]) -> Iterator[list[str]]:
    """Rows of lossy runs on text: rule, lost weight, what it costs of perplexity by word."""
    task = "tiny_wikitext"
    for run in runs:
        if run.tasks != [task]:
            continue
        lost = lost_weight_of(run, task)
        plain = [
            other
            for other in runs
            if other.path == run.path
            and other.moecache["tasks"].get(task, {}).get("routing_fidelity") == 1
        ]
        score, base = run.score(task), plain[0].score(task) if plain else None
        if lost is not None and score and base:
            yield [rule_of(run), f"{lost:.2f}", f"{100 * (score.value / base.value - 1):.1f}"]


def pairs(runs: Sequence[Run]) -> Iterator[Pair]:
    """Pair each lossy run with a lossless one of the same model and documents, by task.

    Runs with a draft model compute in bf16, and answer a question otherwise now and then.
    """
    exact: dict[tuple[str, ...], Mapping[str, float]] = {}
    lossy: dict[tuple[str, ...], dict[str, Any]] = {}
    kl = divergences()
    for run in runs:
        for task in run.tasks:
            answers, figures = right(run, task), run.moecache["tasks"][task]
            model = str(run.model_args.get("pretrained", "tiny"))
            place = (model, task, " ".join(sorted(answers)))
            if len(answers) < LEAST_DOCUMENTS:
                continue
            fidelity = figures.get("routing_fidelity", 1.0)
            if fidelity == 1 and not {"precision", "draft"} & {*run.model_args}:
                exact[place] = answers
            elif fidelity < 1:
                rule = rule_of(run)
                analysed = kl.get((model, str(run.model_args.get("capacity"))), {})
                lossy[(*place, rule, run.run_id)] = {
                    "model": model,
                    "rule": rule,
                    "task": task,
                    "capacity": str(run.moecache["capacity"]),
                    "documents": len(answers),
                    "fidelity": fidelity,
                    "lost_weight": lost_weight_of(run, task),
                    "kl": analysed.get(rule),
                    "right": mean(answers.values()),
                }
    seen = set()
    for key, pair in sorted(lossy.items()):
        if (reference := exact.get(key[:3])) is None:
            continue
        told = {k: round(v, 2) if isinstance(v, float) else v for k, v in pair.items()}
        settings = json.dumps({k: v for k, v in told.items() if k != "capacity"})
        if settings not in seen:  # some rules answer alike at every capacity, all on every device
            seen.add(settings)
            yield {**pair, "points": 100 * (mean(reference.values()) - pair["right"])}


def forecasts(
    found: Sequence[Pair], sign: str, *, across: bool = False
) -> list[tuple[float, float]]:
    """Return (predicted, lost) points of each pair, from a line through 0 of the other rules.

    Those are the same model's on the same task; `across`, all of the other model's.
    """
    of = SIGNS[sign]
    usable = [pair for pair in found if of(pair) is not None]
    results = []
    for pair in usable:
        others = [
            other
            for other in usable
            if (other["model"] != pair["model"]) is across
            and (across or (other["rule"] != pair["rule"] and other["task"] == pair["task"]))
        ]
        x, y = (np.array([f(p) for p in others]) for f in (of, lambda p: p["points"]))
        if len(others) >= 2:
            results.append((float(x @ y / (x @ x)) * of(pair), float(pair["points"])))
    return results


def render(found: Sequence[Pair], texts: Sequence[Sequence[str]]) -> str:
    rows = [
        [
            *(pair["model"], pair["rule"], pair["capacity"], pair["task"], str(pair["documents"])),
            "-" if pair["lost_weight"] is None else f"{pair['lost_weight']:.2f}",
            f"{pair['fidelity']:.2f}",
            "-" if pair["kl"] is None else f"{pair['kl']:.3f}",
            f"{pair['points']:.1f}",
        ]
        for pair in sorted(found, key=lambda p: (p["model"], p["task"], p["points"], p["rule"]))
    ]
    by_weight = sorted(texts, key=lambda row: (float(row[1]), row[0]))
    heads = ["model", "rule", "capacity", "task", "documents"]
    heads += ["lost weight", "fidelity", "KL", "points lost"]
    verdicts = []
    for (sign, of), across in itertools.product(SIGNS.items(), (False, True)):
        known = [pair for pair in found if of(pair) is not None]
        errors = [predicted - lost for predicted, lost in forecasts(found, sign, across=across)]
        if not errors:
            continue
        rank = scipy.stats.spearmanr([of(p) for p in known], [p["points"] for p in known])
        within = sum(abs(error) <= WITHIN for error in errors)
        verdicts.append(
            [
                *(sign, "the other model" if across else "the other rules", str(len(errors))),
                "" if across else f"{rank.statistic:.2f}",
                f"{float(np.sqrt(np.mean(np.square(errors)))):.0f}",
                f"{max(map(abs, errors)):.0f}",
                f"{within} of {len(errors)}",
                "holds" if within == len(errors) else "**does not hold**",
            ]
        )
    verdict_heads = ["sign", "predicted from", "pairs", "rank correlation"]
    verdict_heads += ["error, points", "worst", "within 2", ""]
    return (
        "# Do a run's own metrics predict the points it loses?\n\n"
        "Each rule predicted by a line through 0, from its model's others on the same task, or "
        "from all of the other model:\n\n"
        f"{text_table(verdict_heads, verdicts)}\n\n{text_table(heads, rows)}\n\n"
        "On text, by lost weight:\n\n"
        f"{text_table(['rule', 'lost weight', '% of perplexity by word'], by_weight)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, default=[RESULTS])
    parser.add_argument("--write", action="store_true", help="keep in results/lost_points")
    options = parser.parse_args()
    runs = [run for folder in options.folders for run in load_runs(folder)]
    found, texts = list(pairs(runs)), list(of_texts(runs))
    if options.write:
        kept = {"answers": found, "texts": texts}
        (FOLDER / "pairs.json").write_text(json.dumps(kept, indent=1) + "\n")
        (FOLDER / "table.md").write_text(render(found, texts))
    print(render(found, texts))


if __name__ == "__main__":
    main()
