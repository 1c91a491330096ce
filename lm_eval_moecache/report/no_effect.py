"""Warns of settings that turned out to do nothing on the tasks of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.ledger import GENERATE, RequestRecord


def settings_without_effect(
    by_task: Mapping[str, Sequence[RequestRecord]],
    phases: str,
    scoring: str,
    *,
    idle_seed: int = 0,
    idle_levels: Sequence[str] = (),
    idle_cutoff: bool = False,
    idle_link: bool = False,
) -> list[str]:
    """Return a sentence for each setting that did nothing, naming the tasks where that depends.

    `phases=decode` is only ever set with a lossy policy, which then stands aside in prefill.
    `idle_seed` is a seed that was asked for, other than 0, and from which nothing was drawn;
    `idle_levels` are the precisions of a ladder of which the policy uses the first alone;
    `idle_cutoff` says that the solver left draft-stage prefetch no layer; `idle_link` that the
    link had nothing to put into another order.
    """
    warnings = []
    if idle_seed:
        warnings.append(
            f"seed={idle_seed}: no algorithm of this policy draws at random, so the figures are "
            "those of any other seed."
        )
    if len(idle_levels) > 1:
        warnings.append(
            f"precision={':'.join(idle_levels)}: this policy loads every expert at "
            f"{idle_levels[0]}, so the figures are those of precision={idle_levels[0]}."
        )
    if idle_cutoff:
        warnings.append(
            "prefetch.cutoff=auto: no layer's drafted experts fit into the cache in time, so "
            "nothing was prefetched while drafting. Give more capacity, fewer draft_tokens or "
            "a cutoff."
        )
    if idle_link:
        warnings.append(
            "link=fifo: this policy prefetches nothing, so the figures are those of link=priority."
        )
    requests = by_task.items()
    undecoded = [t for t, own in requests if all(p.phase == PREFILL for r in own for p in r.passes)]
    unscored = [t for t, own in requests if all(r.kind == GENERATE for r in own)]
    if phases == "decode" and undecoded:
        warnings.append(
            f"phases=decode: nothing was decoded in {', '.join(sorted(undecoded))}, so the "
            "policy's lossy algorithms did nothing there. Use phases=all, or scoring=scan with a "
            "cache per layer."
        )
    if scoring == "scan" and unscored:
        warnings.append(
            f"scoring=scan: no text was scored in {', '.join(sorted(unscored))}, so it had no "
            "effect there."
        )
    return warnings
