"""Makes the recorder of a run that keeps a routing trace, and says what it keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

from lm_eval_moecache.algorithms.policy import Choice, load_policy, policy_names
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.harness.arguments import ALL, ROUTING, Config
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.router_events import shadow_prefetchers_of
from lm_eval_moecache.trace.recorder import FULL, Detail, Recorder, identity, looks_on


def recorder_of(
    config: Config, engine: Engine, layers: Sequence[MoELayer], model: Any
) -> Recorder | None:
    """Return what records the run into the folder of `trace=`, or None where nothing does."""
    if config.trace is None:
        return None
    detail = detail_of(config)
    recorder = Recorder(
        config.trace,
        f"{config.policy.name}-{config.capacity}",
        engine.own_geometry,
        seed=config.seed,
        depth=engine.rules.prefetch.depth,
        predicted_by=engine.predictor_digest,
        detail=detail,
        onlookers=shadow_prefetchers_of(
            detail, engine.geometry, layers, model.get_input_embeddings()
        ),
        draft=engine.setting.draft,
    )
    if engine.draft_stage is not None:
        engine.draft_stage.notes = recorder.draft_notes
    return recorder


def detail_of(config: Config) -> Detail:
    """Return what a run's trace keeps, by `trace_keep=`, unless a sweep has said it.

    A lossy policy's prefetcher sees what the policy made of the routing, which no onlooker does: of
    its run everything is kept.
    """
    if config.detail is not None:
        return config.detail
    if config.trace_keep == ROUTING:
        return Detail(weights=False, logits=False, predictions=False, criticals=())
    own = config.policy.prefetch
    if config.trace_keep == ALL or not config.policy.is_lossless:
        # No column has what one that foresees saw of the text: a replay needs what it proposed.
        mine = ((own, config.seed),) if own.algorithm.foresees else ()
        return dataclasses.replace(FULL, onlookers=mine)
    choices = [*_asking_gates(), *([own] if looks_on(own) else [])]
    shown = {identity(choice, config.seed, ""): choice for choice in choices}
    return Detail(
        logits=config.policy.eviction.algorithm.uses_logits,
        predictions=False,
        onlookers=tuple((choice, config.seed) for choice in shown.values()),
        criticals=(None, own.parameters.get("critical")),
    )


@cache
def _asking_gates() -> tuple[Choice, ...]:
    """Return the prefetchers of the compositions that ask the next layers' gates."""
    found = []
    for choice in (load_policy(name).prefetch for name in policy_names()):
        rule = choice.algorithm
        if looks_on(choice) and not (rule.uses_predictor or rule.foresees or rule.uses_logits):
            found.append(choice)
    return tuple(found)
