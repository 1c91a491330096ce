"""Drafting again what a trace has of a draft model: the same steps, on another run's clock."""

from __future__ import annotations

from typing import Any

import numpy as np

from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.draft import NO_TARGET
from lm_eval_moecache.trace.trace import Trace


class Redraft:
    """Tells the engine's draft stage, before each pass, what it was told in the recorded run.

    Raises ValueError where the trace lacks what the policy's prefetcher has to see.
    """

    def __init__(self, trace: Trace, engine: Engine) -> None:
        self._drafted = trace.drafted
        self._engine = engine
        self._num_experts = trace.geometry.num_experts
        prefetch = engine.rules.prefetch.draft_stage
        if prefetch is None:
            return
        name = type(prefetch).__module__.rpartition(".")[2]
        lacks = f"trace {trace.name} cannot serve prefetch={name!r}: "
        again = " Record the run again with trace=DIR and this policy."
        if not prefetch.by_order:
            raise ValueError(
                f"{lacks}it looks at more of a prediction than its order (by_order is False), "
                "which is what traces keep. Run it with --model moecache-spec."
            )
        if set(self._drafted.foretold) != set(range(trace.geometry.num_layers)):
            raise ValueError(f"{lacks}the drafts' predictions were not recorded.{again}")
        if prefetch.critical > self._drafted.ranked:
            raise ValueError(
                f"{lacks}each prediction has {self._drafted.ranked} experts and not the "
                f"critical={prefetch.critical} that it asks for.{again}"
            )

    def before(self, pass_index: int) -> None:
        """Draft for the pass that follows, if the recorded run did."""
        drafted = self._drafted
        if drafted.tokens is None or drafted.experts is None or drafted.ranks is None:
            return
        tokens: list[int] = drafted.tokens.at(pass_index).tolist()
        if not tokens:
            return
        stage = self._engine.begin_draft()
        experts = drafted.experts.at(pass_index).reshape(len(tokens), -1).tolist()
        ranks = drafted.ranks.at(pass_index).reshape(len(tokens), -1, max(drafted.ranked, 1))
        for num_tokens, own, ranked in zip(tokens, experts, ranks, strict=True):
            self._forward(stage, num_tokens, own, iter(ranked))

    def _forward(self, stage: DraftStage, num_tokens: int, experts: list[int], ranked: Any) -> None:
        draft = self._drafted.draft
        assert draft is not None, "a forward without a draft"
        targets = draft.targets or (NO_TARGET,) * len(experts)
        for layer, (target, num_experts) in enumerate(zip(targets, experts, strict=True)):
            stage.dense(layer, num_tokens)
            if target != NO_TARGET and self._drafted.ranked:
                order = next(ranked)
                if stage.wants(target):
                    stage.predict(target, self._scores(order))
            stage.experts(layer, num_experts, num_tokens)

    def _scores(self, order: Any) -> FloatArray:
        """Return [1, experts] scores whose largest come in this order."""
        scores = np.full((1, self._num_experts), -np.inf, dtype=np.float32)
        scores[0, order] = np.arange(len(order), 0, -1)
        return scores

    def after(self, pass_index: int) -> None:
        """Note what became of the drafts that the pass verified."""
        if pass_index in self._drafted.settled:
            self._engine.settle_drafts(*self._drafted.settled[pass_index])
