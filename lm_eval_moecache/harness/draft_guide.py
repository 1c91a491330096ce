"""`prefetch=draft` under `--model moecache`: a draft reads along, and no token is verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.wall.executor import WallExecutor
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.speculative.draft_model import (
    DraftModel,
    ExpertsOf,
    make_draft,
    measure_overlap,
)
from lm_eval_moecache.model.speculative.drafting import ReadAlong
from lm_eval_moecache.model.wrap import WrappedModel


class DraftGuide:
    """Keeps the draft that a setting asks for beside a model, from one setting to the next."""

    def __init__(
        self, model: Any, layers: Sequence[MoELayer], experts_of: ExpertsOf | None
    ) -> None:
        self._model, self._layers, self._experts_of = model, layers, experts_of
        self._draft: DraftModel | None = None
        self._read_along: ReadAlong | None = None

    def take(self, draft: str | None, setting: Setting) -> Setting:
        """Return the engine's setting, with the draft that reads along where one is named."""
        if self._read_along is not None:
            self._read_along.remove()
            self._read_along = None
        if draft is None:
            self._draft = None
            return setting
        if self._draft is None or self._draft.name != draft:
            # Freed first: two drafts may not fit.
            self._draft = None
            self._draft = make_draft(draft, self._model, experts_of=self._experts_of)
        return setting.with_draft(self._draft.cost)

    def follow(self, wrapped: WrappedModel, engine: Engine) -> None:
        """Let the draft read before each of the wrapped model's passes."""
        if self._draft is None:
            return
        if isinstance(engine.executor, WallExecutor):
            assert engine.draft_stage is not None, "a draft model without a draft stage"
            measure_overlap(self._draft, engine, engine.draft_stage)
        self._read_along = ReadAlong(self._draft, self._layers, engine)
        wrapped.reads_first = self._read_along.begin_pass
