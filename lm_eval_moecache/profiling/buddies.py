"""The action `moecache profile buddies`."""

from __future__ import annotations

from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.learned.buddies import (
    NO_BUDDY,
    PAIRS,
    SIMILARITY,
    TOP_LOGITS,
    WEIGHTED,
    buddy_lists,
    check_profile,
    conditional,
)
from lm_eval_moecache.profiling._texts import TEXT, analyzed_texts, check_out
from lm_eval_moecache.records.artifact import BUDDIES, artifact_of, write_artifact
from lm_eval_moecache.records.command import Report, with_options
from lm_eval_moecache.records.numbers import per_layer
from lm_eval_moecache.records.ranges import Count, Share

_SMOOTHING = 1.0
"""Laplace: added to each count."""


@with_options(TEXT, max_tokens=200_000)
def profile_buddies(
    *,
    out: str,
    alpha: Share | list[float] = 0.95,
    k_max: Count = 16,
    sample_tokens: Count = 256,
    **given: Any,
) -> Report:
    """Count which experts are chosen together, for BuddyMoE's lists of substitutes.

    The text is what `--tasks` are trained on (never what they are tested on), or plain text files.
    Routing traces are not accepted: they do not identify their routers, and hold no outputs.
    Prints the sizes of the lists, layer by layer (sections 3.2, 3.3).

    Args:
        out: the profile: NAME.safetensors
        alpha: share of co-activations a list covers (eq. 5), one number or one for each layer
        k_max: longest list
        sample_tokens: tokens for the output similarity and the entropy's percentiles
    """
    check_out(out)
    analyzed, data = analyzed_texts(given)
    alphas = per_layer("alpha", alpha, analyzed.geometry.num_layers)

    from lm_eval_moecache.model.moe_layers import router_digest
    from lm_eval_moecache.model.reading import observe

    reading = observe(analyzed, sample_tokens)
    data |= {"tokens": reading.num_tokens, "alpha": alphas}
    data |= {"k_max": k_max, "smoothing": _SMOOTHING}
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
    write_artifact(out, artifact)
    lines = [f"{out}: buddies from {data['tokens']} tokens; sizes of the lists:"]
    rows = []
    for layer, layer_alpha in enumerate(alphas):
        # The distribution of |B(i; alpha)| that section 3.3 asks to be reported.
        q = conditional(arrays[PAIRS][layer], _SMOOTHING)
        sizes = (buddy_lists(q, layer_alpha, k_max) != NO_BUDDY).sum(axis=-1)
        low, middle, high = np.percentile(sizes, (0, 50, 100)).tolist()
        rows.append({"layer": layer, "shortest": low, "median": middle, "longest": high})
        lines.append(f"  layer {layer}: {low:g} to {high:g}, median {middle:g}")
    return Report({"out": out, **data, "layers": rows}, "\n".join(lines))
