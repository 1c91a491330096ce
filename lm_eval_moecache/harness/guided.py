"""`prefetch=draft` under `--model moecache`: a draft reads along, and no token is verified."""

from __future__ import annotations

from typing import Any, ClassVar

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.wall.executor import WallExecutor
from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.harness.loading import Loading
from lm_eval_moecache.model.speculative.draft_model import DraftModel, make_draft
from lm_eval_moecache.model.speculative.overlap import measure_overlap
from lm_eval_moecache.model.speculative.read_along import ReadAlong
from lm_eval_moecache.model.wrap import WrappedModel


class Guided:
    """Keeps the draft that a setting asks for beside the model, where it is not speculative's."""

    is_speculative: ClassVar[bool] = False
    model: Any
    geometry: Any
    loading: Loading
    _moe_layers: Any
    _guide: DraftModel | None = None
    _read_along: ReadAlong | None = None

    def _setting(self, config: Config) -> Setting:
        """Return the engine's setting, with the draft that reads along, if one does."""
        setting = config.setting(self.geometry)
        if self._read_along is not None:
            self._read_along.remove()
            self._read_along = None
        if self.is_speculative or config.draft is None:
            self._guide = None
            return setting
        if self._guide is None or self._guide.name != config.draft:
            # Freed first: two drafts may not fit.
            self._guide = None
            experts_of = self.loading.experts_of()
            self._guide = make_draft(config.draft, self.model, experts_of=experts_of)
        return setting.with_draft(self._guide.cost)

    def _follow(self, wrapped: WrappedModel, engine: Engine) -> None:
        """Let the draft read before each of the wrapped model's passes."""
        if self._guide is not None:
            if isinstance(engine.executor, WallExecutor):
                assert engine.draft_stage is not None, "a draft model without a draft stage"
                measure_overlap(self._guide, engine, engine.draft_stage)
            self._read_along = ReadAlong(self._guide, self._moe_layers, engine)
            wrapped.reads_first = self._read_along.begin_pass
