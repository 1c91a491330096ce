"""The recorder of a run's routing trace, and what the trace keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

from lm_eval_moecache.algorithms.policy import Choice, load_policy, policy_names
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.harness.arguments import ALL, ROUTING, Config
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.shadow import shadow_prefetchers_of
from lm_eval_moecache.trace.recorder import FULL, Detail, Recorder, identity, needs_shadow


def recorder_of(
    config: Config, engine: Engine, layers: Sequence[MoELayer], model: Any
) -> Recorder | None:
    """Return the recorder into the folder of `trace=`, or None without one."""
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
        shadows=shadow_prefetchers_of(
            detail, engine.geometry, layers, model.get_input_embeddings()
        ),
        draft=engine.setting.draft,
    )
    if engine.draft_stage is not None:
        engine.draft_stage.notes = recorder.draft_notes
    return recorder


def detail_of(config: Config) -> Detail:
    """Return what a run's trace keeps: the sweep's `config.detail`, else that of `trace_keep=`.

    A lossy policy's prefetcher sees the routing as the policy changed it, which no shadow
    prefetcher does: such a run keeps everything.
    """
    if config.detail is not None:
        return config.detail
    if config.trace_keep == ROUTING:
        return Detail(weights=False, logits=False, predictions=False, criticals=())
    prefetch = config.policy.prefetch
    if config.trace_keep == ALL or not config.policy.is_lossless:
        # No column holds the text that a predictor of passes read: a replay needs its proposals.
        shadows = (
            ((prefetch, config.seed, config.cache_reset),)
            if prefetch.algorithm.predicts_pass
            else ()
        )
        return dataclasses.replace(FULL, shadows=shadows)
    choices = [*_asking_gates(), *([prefetch] if needs_shadow(prefetch) else [])]
    reset = config.cache_reset
    unique = {identity(choice, config.seed, "", reset): choice for choice in choices}
    return Detail(
        logits=config.policy.eviction.algorithm.uses_logits,
        predictions=False,
        shadows=tuple((choice, config.seed, reset) for choice in unique.values()),
        criticals=(None, prefetch.parameters.get("critical")),
    )


@cache
def _asking_gates() -> tuple[Choice, ...]:
    """Return the compositions' prefetchers that apply the next layers' gates."""
    choices = []
    for choice in (load_policy(name).prefetch for name in policy_names()):
        rule = choice.algorithm
        if needs_shadow(choice) and not (
            rule.uses_predictor or rule.predicts_pass or rule.uses_logits
        ):
            choices.append(choice)
    return tuple(choices)
