"""How often the regression gate raises a false alarm, and how often it detects a planted loss.

Takes the runs of a folder as the baseline and simulates reruns "on another CPU": near-ties fall the
other way, log-likelihoods and speeds shift a little. The shifts were measured by rerunning
`results/baseline` with ATEN_CPU_CAPABILITY=default, avx2 and avx512: none of 432 answers changed, a
document's log-likelihood moved by 0.3% to 1.0% (standard deviation) and a speed by 0.02% to 0.5%.
The upper ends are used here, with one changed answer in 200.

    python benchmarks/gate.py --documents 0 8 25 50 100 200 500

Prints, per number of documents in each task (0: as many as the runs have), the false alarms in 100
such reruns, and in how many of 100 reruns a loss of two points was detected, planted in all tasks
of the longest run and in one task alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from grid import RESULTS, arguments

from lm_eval_moecache.report.compare import CompareOptions, compare
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.report.runs.run import Run

FLIPS, LOG_LIKELIHOOD, SPEED = 0.005, 0.01, 0.005


def resized(run: Run, documents: int, accuracy: float, random: np.random.Generator) -> Run:
    """Return the run with this many documents and this accuracy in each task.

    0 keeps its number of documents.
    """
    samples: dict[str, dict[str, dict[str, Any]]] = {}
    for task, metrics in run.samples.items():
        for metric, docs in metrics.items():
            values, size = list(docs.values()), documents or len(docs)
            if isinstance(values[0], list):
                chosen = [values[i] for i in random.integers(0, len(values), size)]
            else:
                chosen = [int(x) for x in random.random(size) < accuracy]
            samples.setdefault(task, {})[metric] = dict(enumerate(chosen))  # type: ignore[arg-type]
    return scored(run, samples)


def scored(run: Run, samples: Any) -> Run:
    """Return the run with these samples and the scores that follow from them."""
    results = {task: dict(figures) for task, figures in run.results.items()}
    for task, metrics in samples.items():
        for key, docs in metrics.items():
            values = list(docs.values())
            if not isinstance(values[0], list):
                results[task][key] = sum(values) / len(values)
            elif key.startswith("word"):
                total, words = (sum(column) for column in zip(*values, strict=True))
                results[task][key] = math.exp(-total / words)
    return dataclasses.replace(run, results=results, samples=samples, environment={})


def rerun(run: Run, random: np.random.Generator) -> Run:
    """Return the run as another CPU would make it: each CPU decides a near-tie at random."""
    samples: dict[str, dict[str, dict[str, Any]]] = {}
    for task, metrics in run.samples.items():
        for metric, docs in metrics.items():
            new = dict(docs)
            for doc, value in docs.items():
                if isinstance(value, list):
                    new[doc] = [value[0] * (1 + random.normal(0, LOG_LIKELIHOOD)), value[1]]
            graded = [d for d, v in new.items() if not isinstance(v, list)]
            # As many turn right as wrong, whatever the accuracy: both are equally near the tie.
            for answer in (0, 1):
                pool = [d for d in graded if docs[d] == answer]
                count = min(len(pool), random.binomial(len(graded), FLIPS / 2))
                for place in random.choice(len(pool), count, replace=False) if pool else ():
                    new[pool[place]] = 1 - answer
            samples.setdefault(task, {})[metric] = new
    return dataclasses.replace(scored(run, samples), moecache=_other_speed(run, random))


def _other_speed(run: Run, random: np.random.Generator) -> dict[str, Any]:
    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: moved(inner) for name, inner in value.items()}
        return value * (1 + random.normal(0, SPEED)) if isinstance(value, float) else value

    tasks = {task: moved(figures) for task, figures in run.moecache["tasks"].items()}
    return {**run.moecache, "tasks": tasks}


def worse(run: Run, tasks: Sequence[str], points: float, random: np.random.Generator) -> Run:
    """Return the run with right answers worth `points` turned wrong in each of these tasks."""
    samples = {task: dict(metrics) for task, metrics in run.samples.items()}
    for task in tasks:
        for key, docs in samples[task].items():
            correct = [doc for doc, value in docs.items() if value == 1]
            count = min(len(correct), round(points / 100 * len(docs) + random.random() - 0.5))
            flips = {correct[i]: 0 for i in random.choice(len(correct), count, replace=False)}
            samples[task][key] = {**docs, **flips}
    return scored(run, samples)


def rates(options: argparse.Namespace, documents: int) -> list[int]:
    """Return the numbers of figures, false alarms, and losses found in all tasks and in one."""
    random, rules = np.random.default_rng(options.seed), CompareOptions(alpha=options.alpha)
    runs = load_runs(options.baseline)
    # A mistake in one policy: only the run with the most documents, sorted first, gets the loss.
    runs.sort(key=lambda run: -max(len(d) for m in run.samples.values() for d in m.values()))
    alarms, figures = np.zeros(3, dtype=int), 0
    for _ in range(options.reruns):
        base = [resized(run, documents, options.accuracy, random) for run in runs]
        new = [rerun(run, random) for run in base]
        comparison = compare(base, new, rules)
        figures = len(comparison.rows)
        tasks = [t for t in base[0].tasks if (s := base[0].score(t)) and s.higher_is_better]
        hits = [comparison.is_regression]
        for chosen in (tasks, tasks[:1]):
            regressed = [worse(new[0], chosen, options.points, random), *new[1:]]
            hits.append(compare(base, regressed, rules).is_regression)
        alarms += hits
    return [figures, *map(int, alarms)]


def main() -> None:
    counts = {"documents": [0, 8, 25, 50, 100, 200, 500], "reruns": 100, "seed": 0}
    sizes = {"accuracy": 0.8, "points": 2.0, "alpha": 0.01}
    options = arguments(__doc__, baseline=RESULTS / "baseline", **counts, **sizes)
    print(
        f"alpha {options.alpha:g} for the whole comparison, {options.reruns} reruns, "
        f"a loss of {options.points:g} points planted in one run, accuracy {options.accuracy:g}"
    )
    print("| Documents | Figures | False alarms | Found, all tasks | Found, one task |")
    print("| --: | --: | --: | --: | --: |")
    for documents in options.documents:
        print(f"| {' | '.join(map(str, [documents, *rates(options, documents)]))} |", flush=True)


if __name__ == "__main__":
    main()
