"""Count which experts are chosen together, for BuddyMoE's lists of substitutes (sections 3.2, 3.3).

The text is what `--tasks` are trained on (never what they are tested on), or plain text files.
Routing traces are not taken: they do not say whose routers made them, and hold no outputs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.profiling._texts import read_file, task_examples
from lm_eval_moecache.records.artifact import BUDDIES, Artifact, write_artifact
from lm_eval_moecache.records.coactivation import (
    NO_BUDDY,
    PAIRS,
    SIMILARITY,
    TOP_LOGITS,
    WEIGHTED,
    buddy_lists,
    check_profile,
    conditional,
)
from lm_eval_moecache.records.paths import TINY

_WARMUP_WEIGHT = 0.5
_KEPT = ("k_max", "smoothing", "warmup_tokens", "warmup_weight")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str, required=True, help="the profile: NAME.safetensors")
    parser.add_argument("--pretrained", type=str, default=TINY, help="tiny, a folder or a hub id")
    parser.add_argument("--tasks", type=str | None, help="their training documents: a,b,c")
    parser.add_argument("--data", type=str | None, help="plain text files: a.txt,b.txt")
    parser.add_argument("--include_path", type=str | None, help="folder with more tasks")
    parser.add_argument("--limit", type=int, default=200, help="documents of each task")
    parser.add_argument("--max_tokens", type=int, default=200_000, help="how much text to read")
    parser.add_argument(
        "--alpha",
        type=float | list[float],
        default=0.95,
        help="share of co-activations a list covers (eq. 5), one number or one for each layer",
    )
    parser.add_argument("--k_max", type=int, default=16, help="longest list")
    parser.add_argument("--smoothing", type=float, default=1.0, help="Laplace: added to each count")
    parser.add_argument(
        "--warmup_tokens",
        type=int,
        default=0,
        help="first tokens of a window of text that count for less",
    )
    parser.add_argument(
        "--warmup_weight",
        type=float,
        default=_WARMUP_WEIGHT,
        help="how much those --warmup_tokens count",
    )
    parser.add_argument(
        "--sample_tokens",
        type=int,
        default=256,
        help="tokens for the output similarity and the entropy's percentiles",
    )


def run(arguments: Namespace) -> int:
    """Profile and write; print the sizes of the lists, layer by layer."""
    _check(arguments)
    texts, data = _collect(arguments)
    # Imported late: they bring torch, and a wrong option should not wait for it.
    from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel
    from lm_eval_moecache.analysis.coactivation import observe
    from lm_eval_moecache.model.moe_layers import router_digest

    analyzed = AnalyzedModel(arguments.pretrained, texts, arguments.max_tokens)
    alphas = _per_layer(arguments.alpha, analyzed.geometry.num_layers)
    found = observe(analyzed, arguments.sample_tokens, _warmup(arguments))
    data |= {"tokens": found.num_tokens, "alpha": alphas}
    data |= {name: getattr(arguments, name) for name in _KEPT}
    artifact = Artifact(
        kind=BUDDIES,
        model=arguments.pretrained,
        num_layers=analyzed.geometry.num_layers,
        num_experts=analyzed.geometry.num_experts,
        top_k=analyzed.geometry.top_k,
        router_digest=router_digest(analyzed.layers),
        made_from=data,
        arrays={
            "activations": found.counts.activations,
            PAIRS: found.counts.pairs,
            WEIGHTED: found.counts.weighted_pairs,
            TOP_LOGITS: found.top_logits,
            SIMILARITY: found.similarity(),
        },
    )
    check_profile(artifact)
    write_artifact(arguments.out, artifact)
    rows = [_sizes(artifact, layer) for layer in range(artifact.num_layers)]
    _report({"out": arguments.out, **data, "layers": rows}, arguments.json)
    return 0


def _check(arguments: Namespace) -> None:
    if not (arguments.tasks or arguments.data):
        raise ValueError("tasks, data: give --tasks, --data or both: a profile needs text.")
    if Path(arguments.out).suffix != ".safetensors":
        raise ValueError(f"out={arguments.out!r} must end in .safetensors.")
    for name in ("limit", "max_tokens", "k_max", "sample_tokens"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"{name}={getattr(arguments, name)} must be 1 or more.")
    for name in ("smoothing", "warmup_tokens"):
        if getattr(arguments, name) < 0:
            raise ValueError(f"{name}={getattr(arguments, name)} must be 0 or more.")
    if not 0 <= arguments.warmup_weight <= 1:
        raise ValueError(f"warmup_weight={arguments.warmup_weight} must lie between 0 and 1.")
    if arguments.warmup_weight != _WARMUP_WEIGHT and not arguments.warmup_tokens:
        raise ValueError(
            f"warmup_weight={arguments.warmup_weight} has no effect without warmup_tokens above 0."
        )


def _per_layer(alpha: float | list[float], num_layers: int) -> list[float]:
    alphas = alpha if isinstance(alpha, list) else [alpha] * num_layers
    if len(alphas) != num_layers or not all(0 < a <= 1 for a in alphas):
        raise ValueError(
            f"alpha={alpha} must be above 0 and at most 1: one number, or {num_layers}, one for "
            "each MoE layer."
        )
    return [float(a) for a in alphas]


def _collect(arguments: Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return the texts, and what to write down of where they come from."""
    tasks = [name for name in (arguments.tasks or "").split(",") if name]
    files = [name for name in (arguments.data or "").split(",") if name]
    examples = task_examples(tasks, arguments.limit, arguments.include_path) if tasks else []
    texts = [example.text for example in examples] + [read_file("data", name) for name in files]
    names = [Path(name).name for name in files]
    return texts, {"tasks": tasks, "data": names, "documents": len(examples)}


def _warmup(arguments: Namespace) -> Any:
    """Return the function that says how much each token of a text counts (section 3.3, iii)."""
    first, share = arguments.warmup_tokens, arguments.warmup_weight
    return lambda num_tokens: np.where(np.arange(num_tokens) < first, share, 1.0)


def _sizes(artifact: Artifact, layer: int) -> dict[str, Any]:
    """Return the distribution of |B(i; alpha)| that section 3.3 asks to be reported."""
    made_from = artifact.made_from
    q = conditional(artifact.arrays[PAIRS][layer], made_from["smoothing"])
    lists = buddy_lists(q, made_from["alpha"][layer], made_from["k_max"])
    sizes = (lists != NO_BUDDY).sum(axis=-1)
    low, middle, high = np.percentile(sizes, (0, 50, 100)).tolist()
    return {"layer": layer, "shortest": low, "median": middle, "longest": high}


def _report(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    lines = [f"{found['out']}: buddies from {found['tokens']} tokens; sizes of the lists:"]
    lines += [
        f"  layer {row['layer']}: {row['shortest']:g} to {row['longest']:g}, median "
        f"{row['median']:g}"
        for row in found["layers"]
    ]
    sys.stdout.write("\n".join(lines) + "\n")
