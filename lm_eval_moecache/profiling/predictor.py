"""Train CommitMoE's predictors of the next layer's experts (section 4.2) on what a model generates.

The prompts are documents that `--tasks` are trained on (never what they are tested on) or files:
`.jsonl` with a string or {"prompt": ...} a line, or plain text with a prompt a line. `tiny` has
its own generator's where neither is given. Stopped early, the same command goes on where it was.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.profiling._texts import check_prompt_options, collect_prompts
from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.paths import TINY
from lm_eval_moecache.records.predictor import LOSSES

_SCHEDULE = ("halve_every", "batch_size", "max_epochs", "patience")
_RECIPE = ("loss", "learning_rate", *_SCHEDULE, "seed")
_COUNTS = ("limit", "tokens", "prompts_per_batch", *_SCHEDULE)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str, required=True, help="the predictor: NAME.safetensors")
    parser.add_argument("--pretrained", type=str, default=TINY, help="tiny, a folder or a hub id")
    parser.add_argument("--tasks", type=str | None, help="their training documents: a,b,c")
    parser.add_argument("--data", type=str | None, help="files of prompts: a.txt,b.jsonl")
    parser.add_argument("--include_path", type=str | None, help="folder with more tasks")
    parser.add_argument("--limit", type=int, default=1000, help="documents of each task")
    parser.add_argument("--tokens", type=int, default=20, help="generated tokens of each prompt")
    parser.add_argument("--prompts_per_batch", type=int, default=64, help="generated together")
    parser.add_argument(
        "--loss", type=str, default="kl", help="kl (eq. 4), or bce of the chosen experts"
    )
    parser.add_argument("--learning_rate", type=float, default=5e-5, help="of Adam at the start")
    parser.add_argument("--halve_every", type=int, default=5, help="epochs until it is halved")
    parser.add_argument("--batch_size", type=int, default=32, help="tokens of a training step")
    parser.add_argument("--max_epochs", type=int, default=30, help="most epochs")
    parser.add_argument(
        "--patience", type=int, default=5, help="epochs without gain until it stops"
    )
    parser.add_argument("--seed", type=int, default=42, help="of the 80/20 split and the training")
    parser.add_argument("--work", type=str | None, help="folder for what is kept until the end")


def run(arguments: Namespace) -> int:
    """Record, train layer after layer, judge on the held-out prompts, write."""
    _check(arguments)
    prompts, data = collect_prompts(arguments)
    # Imported late: they bring torch, and a wrong option should not wait for it.
    from lm_eval_moecache.harness.preflight import geometry_of
    from lm_eval_moecache.model.predictor.make import make
    from lm_eval_moecache.model.predictor.network import Recipe

    geometry_of(arguments.pretrained)  # says what cannot be read
    recipe = {name: getattr(arguments, name) for name in _RECIPE}
    work = Path(arguments.work or Path(arguments.out).with_suffix(".work"))
    found = make(
        arguments.pretrained,
        prompts,
        work,
        num_tokens=arguments.tokens,
        prompts_per_batch=arguments.prompts_per_batch,
        recipe=Recipe(**recipe),
    )
    found.write(arguments.out, data)
    if arguments.work is None:
        shutil.rmtree(work)
    _report(arguments.out, found.layers, found.certainty, arguments.json)
    return 0


def _check(arguments: Namespace) -> None:
    check_prompt_options(arguments, _COUNTS)
    if arguments.loss not in LOSSES:
        raise unknown("loss", arguments.loss, LOSSES)


def _report(out: str, layers: list[Any], certainty: list[Any], as_json: bool) -> None:
    if as_json:
        found = {"out": out, "layers": layers, "certainty": certainty}
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    from lm_eval_moecache.report.render import rows_as_markdown

    sys.stdout.write(f"{out}: share of the experts named rightly, on held-out prompts\n\n")
    sys.stdout.write(rows_as_markdown(layers) + "\n" + rows_as_markdown(certainty))
