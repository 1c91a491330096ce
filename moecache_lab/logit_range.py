"""The action `moecache profile logit_range`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lm_eval_moecache.profiling._texts import TEXT, analyzed_texts
from lm_eval_moecache.records.command import Report, with_options
from lm_eval_moecache.records.files import write_whole


@with_options(TEXT)
def profile_logit_range(*, out: str | None = None, **given: Any) -> Report:
    """Calibrate the range of router logits for cache_prior (cache-conditional experts, appendix C).

    Prints one number per layer, the mean over tokens of max(z) - min(z): pass them as
    `routing.logit_range` in place of the running average. The text is what `--tasks` are trained on
    (never what they are tested on), or plain text files.

    Args:
        out: a JSON file to write them to
    """
    analyzed, _ = analyzed_texts(given)
    report = {"model": analyzed.name, "logit_range": measure(analyzed)}
    if out:
        write_whole(Path(out), json.dumps(report, indent=1) + "\n")
    numbers = ", ".join(f"{value:.4f}" for value in report["logit_range"])
    return Report(report, f"[{numbers}]")


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
