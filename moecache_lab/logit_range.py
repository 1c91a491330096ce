"""Calibrate the range of router logits for cache_prior (cache-conditional experts, appendix C).

Prints one number per layer, the mean over tokens of max(z) - min(z): pass them as
`routing.logit_range` in place of the running average. The text is what `--tasks` are trained on
(never what they are tested on), or plain text files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.profiling._texts import Told, add_text_options, analyzed_texts
from lm_eval_moecache.records.files import write_whole


def add_arguments(parser: ArgumentParser) -> None:
    add_text_options(parser)
    parser.add_argument("--out", type=str | None, help="a JSON file to write them to")


def run(arguments: Namespace) -> Told:
    analyzed, _ = analyzed_texts(arguments)
    report = {"model": analyzed.name, "logit_range": measure(analyzed)}
    if arguments.out:
        write_whole(Path(arguments.out), json.dumps(report, indent=1) + "\n")
    numbers = ", ".join(f"{value:.4f}" for value in report["logit_range"])
    return report, f"[{numbers}]\n"


def measure(reading: Any) -> list[float]:
    """Return each MoE layer's mean range of logits over the model's text."""
    from lm_eval_moecache.model.reading import watched

    sums = [0.0] * len(reading.layers)

    def note(layer: int, args: Any, output: Any) -> None:
        logits = reading.layers[layer].gate.read(output).logits.float()
        sums[layer] += float((logits.amax(-1) - logits.amin(-1)).double().sum())

    with watched(reading.routers, note):
        for window in reading.windows:
            reading.logits(window)
    return [total / reading.num_tokens for total in sums]
