"""Count which experts are chosen together, for BuddyMoE's lists of substitutes (sections 3.2, 3.3).

The text is what `--tasks` are trained on (never what they are tested on), or plain text files.
Routing traces are not accepted: they do not identify their routers, and hold no outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.algorithms.learned.buddies import (
    NO_BUDDY,
    PAIRS,
    SIMILARITY,
    TOP_LOGITS,
    WEIGHTED,
    alphas_of,
    buddy_lists,
    check_profile,
    conditional,
)
from lm_eval_moecache.profiling._texts import (
    Told,
    add_options,
    add_text_options,
    analyzed_texts,
    check_counts,
    check_out,
)
from lm_eval_moecache.records.artifact import BUDDIES, artifact_of, write_artifact

_WARMUP_WEIGHT = 0.5
_KEPT = ("k_max", "smoothing", "warmup_tokens", "warmup_weight")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str, required=True, help="the profile: NAME.safetensors")
    add_text_options(parser, max_tokens=200_000)
    text = "share of co-activations a list covers (eq. 5), one number or one for each layer"
    parser.add_argument("--alpha", type=float | list[float], default=0.95, help=text)
    add_options(
        parser,
        ("k_max", 16, "longest list"),
        ("smoothing", 1.0, "Laplace: added to each count"),
        ("warmup_tokens", 0, "first tokens of a window of text that count for less"),
        ("warmup_weight", _WARMUP_WEIGHT, "how much those --warmup_tokens count"),
        ("sample_tokens", 256, "tokens for the output similarity and the entropy's percentiles"),
    )


def run(arguments: Namespace) -> Told:
    """Profile and write; print the sizes of the lists, layer by layer."""
    check_out(arguments.out)
    check_counts(arguments, "k_max", "sample_tokens")
    check_counts(arguments, "smoothing", "warmup_tokens", least=0)
    if not 0 <= arguments.warmup_weight <= 1:
        raise ValueError(f"warmup_weight={arguments.warmup_weight} must lie between 0 and 1.")
    if arguments.warmup_weight != _WARMUP_WEIGHT and not arguments.warmup_tokens:
        raise ValueError(
            f"warmup_weight={arguments.warmup_weight} has no effect without warmup_tokens above 0."
        )
    analyzed, data = analyzed_texts(arguments)
    alphas = alphas_of("alpha", arguments.alpha, analyzed.geometry.num_layers)

    from lm_eval_moecache.model.coactivation import observe
    from lm_eval_moecache.model.moe_layers import router_digest

    def warmup(num_tokens: int) -> npt.NDArray[np.float64]:
        """Return the weight of each token of a text (section 3.3, iii)."""
        first = np.arange(num_tokens) < arguments.warmup_tokens
        return np.where(first, arguments.warmup_weight, 1.0)

    reading = observe(analyzed, arguments.sample_tokens, warmup)
    data |= {"tokens": reading.num_tokens, "alpha": alphas}
    data |= {name: getattr(arguments, name) for name in _KEPT}
    arrays: dict[str, Any] = {
        "activations": reading.counts.activations,
        PAIRS: reading.counts.pairs,
        WEIGHTED: reading.counts.weighted_pairs,
        TOP_LOGITS: reading.top_logits,
        SIMILARITY: reading.similarity(),
    }
    routers = router_digest(analyzed.layers)
    artifact = artifact_of(BUDDIES, analyzed.geometry, routers, data, arrays)
    check_profile(artifact)
    write_artifact(arguments.out, artifact)
    lines = [f"{arguments.out}: buddies from {data['tokens']} tokens; sizes of the lists:"]
    rows = []
    for layer, layer_alpha in enumerate(alphas):
        # The distribution of |B(i; alpha)| that section 3.3 asks to be reported.
        q = conditional(arrays[PAIRS][layer], arguments.smoothing)
        sizes = (buddy_lists(q, layer_alpha, arguments.k_max) != NO_BUDDY).sum(axis=-1)
        low, middle, high = np.percentile(sizes, (0, 50, 100)).tolist()
        rows.append({"layer": layer, "shortest": low, "median": middle, "longest": high})
        lines.append(f"  layer {layer}: {low:g} to {high:g}, median {middle:g}")
    return {"out": arguments.out, **data, "layers": rows}, "\n".join([*lines, ""])
