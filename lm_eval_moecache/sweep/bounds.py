"""What eviction and prefetch could do if they knew the future, replayed from the shared runs.

Where an event is larger than its cache, Belady's rule is no bound on misses, so rows do not say so:
`engine.bound.fewest_misses` is one, and `moecache replay` prints it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.sweep.identity import Planned, plan
from lm_eval_moecache.sweep.sharing import share_name
from lm_eval_moecache.sweep.spec import REPLAY

BOUNDS: Mapping[str, Mapping[str, str]] = {
    "belady": {"eviction": "belady"},
    "oracle": {"prefetch": "oracle"},
}
"""What each changes in `on_demand`: evictions that know the future, or prefetches that do."""


def bound_cells(planned: Sequence[Planned], names: Sequence[str]) -> list[Planned]:
    """Return one cell per bound and place (capacity, hardware, ...) of the cells that share runs.

    A cell that loses something has no bound: its routing is not the one whose future is known.
    """
    found: dict[str, Planned] = {}
    for each in planned:
        if share_name(each) is None and each.cell.model != REPLAY:
            continue
        for name in names:
            # Prefetches cross layers, and a scan goes through one layer at a time.
            if name == "oracle" and each.config.scoring == "scan":
                continue
            bound = _bound(each, name)
            found.setdefault(bound.configuration_hash, bound)
    return list(found.values())


def _bound(planned: Planned, name: str) -> Planned:
    cell, changes = planned.cell, BOUNDS[name]
    place = {
        key: value
        for key, value in cell.model_args.items()
        if key not in ("policy", "phases") and key.partition(".")[0] not in AXES
    }
    args = {**place, "policy": "on_demand", **changes}
    config = planned.config.with_changes(policy=load_policy("on_demand", changes))
    bound = dataclasses.replace(cell, model_args=args, label=f"knows the future: {name}")
    return plan(bound, config, planned.host_arguments)
