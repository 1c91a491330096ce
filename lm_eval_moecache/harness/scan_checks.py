"""Which settings `scoring=scan` goes with."""

from __future__ import annotations

from lm_eval_moecache.algorithms.policy import Policy
from lm_eval_moecache.records.sizes import is_per_layer


def check_scan(scoring: str, policy: Policy, capacity: str) -> None:
    """Refuse `scoring=scan` where routing token after token in a layer is not decoding the text."""
    if scoring != "scan":
        return
    if not is_per_layer(capacity):
        raise ValueError(
            f"scoring='scan' needs a cache per layer, but capacity={capacity!r} is one cache for "
            "all layers: routing token after token inside a layer has no order across layers. "
            "Allowed with scan: a capacity like '30/layer'."
        )
    if policy.prefetch.algorithm.is_active:
        raise ValueError(
            f"scoring='scan' does not go with prefetch={policy.prefetch.name!r}: prefetches cross "
            "layers, and scan goes through one layer at a time. Allowed with scan: prefetch=none."
        )
    if getattr(policy.routing.algorithm, "depth", 0):
        raise ValueError(
            f"scoring='scan' does not go with routing={policy.routing.name!r}, which decides a "
            "layer's experts in the layer before. Allowed with scan: a routing of one layer."
        )
