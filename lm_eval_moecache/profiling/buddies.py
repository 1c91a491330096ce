"""Count which experts are chosen together, for BuddyMoE's lists of substitutes (sections 3.2, 3.3).

The text is what `--tasks` are trained on (never what they are tested on), or plain text files.
Routing traces are not taken: they do not say whose routers made them, and hold no outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.profiling._texts import (
    add_text_options,
    artifact_of,
    check_counts,
    check_out,
    collect_texts,
    say,
)
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

_WARMUP_WEIGHT = 0.5
_KEPT = ("k_max", "smoothing", "warmup_tokens", "warmup_weight")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str, required=True, help="the profile: NAME.safetensors")
    add_text_options(parser, max_tokens=200_000)
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
    texts, data = collect_texts(arguments)
    # Imported late: they bring torch, and a wrong option should not wait for it.
    from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel
    from lm_eval_moecache.analysis.coactivation import observe

    analyzed = AnalyzedModel(arguments.pretrained, texts, arguments.max_tokens)
    alphas = _per_layer(arguments.alpha, analyzed.geometry.num_layers)
    found = observe(analyzed, arguments.sample_tokens, _warmup(arguments))
    data |= {"tokens": found.num_tokens, "alpha": alphas}
    data |= {name: getattr(arguments, name) for name in _KEPT}
    arrays = {
        "activations": found.counts.activations,
        PAIRS: found.counts.pairs,
        WEIGHTED: found.counts.weighted_pairs,
        TOP_LOGITS: found.top_logits,
        SIMILARITY: found.similarity(),
    }
    artifact = artifact_of(
        BUDDIES, arguments.pretrained, analyzed.geometry, analyzed.layers, data, arrays
    )
    check_profile(artifact)
    write_artifact(arguments.out, artifact)
    rows = [_sizes(artifact, layer) for layer in range(artifact.num_layers)]
    lines = [f"{arguments.out}: buddies from {data['tokens']} tokens; sizes of the lists:"]
    lines += [
        f"  layer {row['layer']}: {row['shortest']:g} to {row['longest']:g}, median "
        f"{row['median']:g}"
        for row in rows
    ]
    say({"out": arguments.out, **data, "layers": rows}, lines, arguments.json)
    return 0


def _check(arguments: Namespace) -> None:
    check_out(arguments.out)
    check_counts(arguments, ("k_max", "sample_tokens"))
    check_counts(arguments, ("smoothing", "warmup_tokens"), least=0)
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
