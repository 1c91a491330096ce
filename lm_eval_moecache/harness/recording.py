"""Makes the recorder of a run that keeps a routing trace."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.onlookers import onlookers_of
from lm_eval_moecache.trace.recorder import Recorder


def recorder_of(config: Config, engine: Engine, layers: Sequence[MoELayer]) -> Recorder | None:
    """Return what records the run into the folder of `trace=`, or None where nothing does."""
    if config.trace is None:
        return None
    recorder = Recorder(
        config.trace,
        f"{config.policy.name}-{config.capacity}",
        engine.own_geometry,
        seed=config.seed,
        depth=engine.algorithms.prefetch.depth,
        predicted_by=engine.predictor_digest,
        detail=config.detail,
        onlookers=onlookers_of(config.detail, engine.geometry, layers),
        draft=engine.setting.draft,
    )
    if engine.draft_stage is not None:
        engine.draft_stage.notes = recorder.draft_notes
    return recorder
