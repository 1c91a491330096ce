"""Lets a harness model load its experts at the levels of a ladder (to be mixed into HFLM)."""

from __future__ import annotations

from typing import Any

from torch import nn

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.harness.wall_hosting import ExpertHost
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.precision.base import Codec
from lm_eval_moecache.model.precision.ladder import Ladder, codecs_of
from lm_eval_moecache.model.precision.loading import encoding, take
from lm_eval_moecache.model.precision.store import LadderStore
from lm_eval_moecache.model.precision.stored import Encoded
from lm_eval_moecache.model.store import implementation_of
from lm_eval_moecache.records.geometry import Geometry


class LadderHost(ExpertHost):
    """Where the store has a precision of its own, encodes experts while the model is loaded."""

    _codecs: list[Codec] | None = None
    _skeleton: nn.Module
    _stored: list[dict[str, Encoded]]
    _ladder: Ladder | None = None

    def prepare_ladder(self, ladder: Ladder | None, skeleton: nn.Module) -> None:
        """Note at which levels to store the experts, before HFLM loads the model."""
        self._ladder = ladder
        if ladder is not None:
            self._codecs, self._skeleton = codecs_of(ladder), skeleton

    def check_loaded_for(self, config: Config) -> None:
        super().check_loaded_for(config)
        if config.ladder != self._ladder:
            raise ValueError(
                f"precision={config.precision!r}: the model was loaded with "
                f"precision={self._ladder and ':'.join(self._ladder)!r} and has to be loaded anew."
            )

    def build_engine(self, model: Any, geometry: Geometry, setting: Setting) -> tuple[Engine, Any]:
        if self._codecs is None:
            return super().build_engine(model, geometry, setting)
        kernel, device_type = implementation_of(model), model.device.type
        store = LadderStore(self._stored, self._codecs, kernel, device_type)
        return Engine(geometry, setting), store

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        if self._codecs is None:
            super()._create_model(*args, **kwargs)
            return
        with encoding(find_moe_layers(self._skeleton), self._codecs):
            super()._create_model(*args, **kwargs)
        self._stored = take(find_moe_layers(self._model), self._codecs)  # type: ignore[attr-defined]
