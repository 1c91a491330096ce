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

from lm_eval_moecache.profiling._texts import read_file, task_examples
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.paths import TINY


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--pretrained", type=str, default=TINY, help="tiny, a folder or a hub id")
    parser.add_argument("--tasks", type=str | None, help="their training documents: a,b,c")
    parser.add_argument("--data", type=str | None, help="plain text files: a.txt,b.txt")
    parser.add_argument("--include_path", type=str | None, help="folder with more tasks")
    parser.add_argument("--limit", type=int, default=200, help="documents of each task")
    parser.add_argument("--max_tokens", type=int, default=20_000, help="how much text to read")
    parser.add_argument("--out", type=str | None, help="a JSON file to write them to")


def run(arguments: Namespace) -> int:
    texts = _texts(arguments)
    # Imported late: it brings torch, and a wrong option should not wait for it.
    from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel

    analyzed = AnalyzedModel(arguments.pretrained, texts, arguments.max_tokens)
    found = {"model": analyzed.name, "logit_range": measure(analyzed)}
    if arguments.out:
        text = json.dumps(found, indent=1) + "\n"
        write_whole(Path(arguments.out), text.encode())
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
        analyzed.read({})
    return [total / count for total, count in zip(sums, counts, strict=True)]


def _texts(arguments: Namespace) -> list[str]:
    if (arguments.tasks is None) == (arguments.data is None):
        raise ValueError(
            "give either --tasks a,b,c or --data a.txt,b.txt: the text to calibrate on."
        )
    if arguments.data is not None:
        return [read_file("data", path.strip()) for path in arguments.data.split(",")]
    if arguments.limit < 1:
        raise ValueError(f"limit={arguments.limit} must be 1 or more.")
    names = [name.strip() for name in arguments.tasks.split(",")]
    examples = task_examples(names, arguments.limit, arguments.include_path)
    return [example.text for example in examples]
