"""Lets a harness model load its experts into a tier (to be mixed into HFLM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.model.wall.assemble import assemble
from lm_eval_moecache.model.wall.loading import ExpertLoader
from lm_eval_moecache.model.wall.store import SlotStore
from lm_eval_moecache.records.geometry import Geometry


class ExpertHost:
    """Under the wall clock, puts a loader between HFLM and `from_pretrained`."""

    _loader: ExpertLoader | None = None
    _loaded_for: tuple[str, str, str | None]

    def prepare_loading(self, config: Config, skeleton: nn.Module | None) -> None:
        """Note what the model is loaded for, before HFLM loads it."""
        self._loaded_for = (config.clock, config.store, config.store_dir)
        if skeleton is not None:
            self._loader = ExpertLoader(config.store, config.store_dir, skeleton)

    def check_loaded_for(self, config: Config) -> None:
        """Raise ValueError where a setting needs the model loaded in another way."""
        if self._loaded_for != (config.clock, config.store, config.store_dir):
            clock, store, folder = self._loaded_for
            raise ValueError(
                f"clock={config.clock!r}, store={config.store!r}, store_dir={config.store_dir!r}: "
                f"the model was loaded for clock={clock!r}, store={store!r}, "
                f"store_dir={folder!r} and has to be loaded anew."
            )

    def build_engine(
        self, model: Any, geometry: Geometry, setting: Setting
    ) -> tuple[Engine, SlotStore | None]:
        """Return the engine of a setting, and the store to run from where it is not the model."""
        if self._loader is None:
            return Engine(geometry, setting), None
        return assemble(model, geometry, setting, self._loader)

    def measured(self) -> Mapping[str, Any] | None:
        """Return what only the wall clock's report has: the machine, the store, the loading."""
        if self._loader is None:
            return None
        device = torch.device(self.device)  # type: ignore[attr-defined]
        return {"machine": name_of(device), "load": self._loader.figures}

    def _get_accelerate_args(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        usual: dict[str, Any] = super()._get_accelerate_args(*args, **kwargs)  # type: ignore[misc]
        if self._loader is None:
            return usual
        device = torch.device(self.device)  # type: ignore[attr-defined]
        return {**usual, **self._loader.arguments(device)}

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        if self._loader is None:
            super()._create_model(*args, **kwargs)  # type: ignore[misc]
            return
        with self._loader.loading():
            super()._create_model(*args, **kwargs)  # type: ignore[misc]
            device = torch.device(self.device)  # type: ignore[attr-defined]
            self._loader.take_experts(self._model, device)  # type: ignore[attr-defined]


def name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU with {torch.get_num_threads()} threads"
