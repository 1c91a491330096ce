"""Calibrate the range of router logits for cache_prior (cache-conditional experts, appendix C).

Prints one number a layer, the mean over tokens of max(z) - min(z): give them as
`routing.logit_range` in place of the running average. The text is what `--tasks` are trained on
(never what they are tested on), or plain text files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.profiling._texts import add_text_options, collect_texts
from lm_eval_moecache.records.files import write_whole


def add_arguments(parser: ArgumentParser) -> None:
    add_text_options(parser)
    parser.add_argument("--out", type=str | None, help="a JSON file to write them to")


def run(arguments: Namespace) -> int:
    texts, _ = collect_texts(arguments)
    # Imported late: it brings torch, and a wrong option should not wait for it.
    from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel

    analyzed = AnalyzedModel(arguments.pretrained, texts, arguments.max_tokens)
    found = {"model": analyzed.name, "logit_range": measure(analyzed)}
    if arguments.out:
        write_whole(Path(arguments.out), json.dumps(found, indent=1) + "\n")
    numbers = ", ".join(f"{value:.4f}" for value in found["logit_range"])
    sys.stdout.write(json.dumps(found) + "\n" if arguments.json else f"[{numbers}]\n")
    return 0


def measure(analyzed: Any) -> list[float]:
    """Return each MoE layer's mean range of logits over the model's text."""
    sums, counts = [0.0] * len(analyzed.layers), [0] * len(analyzed.layers)

    def watch(layer: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            logits = output[0].float().reshape(-1, output[0].shape[-1])
            ranges = logits.max(-1).values - logits.min(-1).values
            sums[layer] += float(ranges.double().sum())
            counts[layer] += len(ranges)

        return hook

    with ExitStack() as hooks:
        for index, layer in enumerate(analyzed.layers):
            hooks.callback(layer.router.register_forward_hook(watch(index)).remove)
        with analyzed.under({}):
            analyzed.perplexity()
    return [total / count for total, count in zip(sums, counts, strict=True)]
