"""Loads a model for a setting: experts quantised, in a memory tier, or left in the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.model.checkpoint import model_path, skeleton, weights_files, weights_identity
from lm_eval_moecache.model.device import device_of, name_of
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.precision.codecs import Encoded
from lm_eval_moecache.model.precision.ladder import codecs_of
from lm_eval_moecache.model.precision.loading import EncodedExpertStore, encoding, take
from lm_eval_moecache.model.speculative import ExpertsOf
from lm_eval_moecache.model.store import LadderStore, Store, implementation_of
from lm_eval_moecache.model.wall.loading import ExpertLoader, assemble
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.schemas.keys import LOADING, keys_with


class ModelLoader:
    """Loads the model for one setting; `check` accepts others that need no reload."""

    def __init__(self, config: Config, pretrained: Any, arguments: Mapping[str, Any]) -> None:
        """`arguments` are HFLM's, with the device from `resolve_device`."""
        self.device: str | None = arguments["device"]
        self._config = config
        bare = skeleton(pretrained, arguments)
        self._layers = find_moe_layers(bare)
        self._codecs = None if config.ladder is None else codecs_of(config.ladder)
        path = model_path(pretrained)
        identity = weights_identity(path, arguments)
        self._encoded_store: EncodedExpertStore | None = None
        if config.encoded_dir is not None and self._codecs is not None and identity:
            dtype = next(self._layers[0].experts.parameters()).dtype
            folder = Path(config.encoded_dir)
            self._encoded_store = EncodedExpertStore(folder, identity, dtype, self._codecs)
        self.stored: list[Encoded] = []
        """By layer; empty unless `precision` quantises the experts."""
        self._experts: ExpertLoader | None = None
        if config.clock == "wall":
            files = weights_files(path, arguments)
            self._experts = ExpertLoader(
                config.store,
                config.store_dir,
                bare,
                self._codecs,
                self._encoded_store,
                files,
                identity,
            )

    def check(self, config: Config) -> None:
        """Raise ValueError if a setting needs the model loaded in another way."""
        for key in keys_with(LOADING):
            loaded, required = getattr(self._config, key), getattr(config, key)
            if loaded != required:
                raise ValueError(
                    f"{key}={required!r}: the model was loaded with {key}={loaded!r} and has to be "
                    "loaded again."
                )

    def arguments(self) -> Mapping[str, Any]:
        """Return arguments for `from_pretrained` in addition to HFLM's own."""
        return {} if self._experts is None else self._experts.arguments

    def load(self, create: Callable[[], Any], device: str) -> None:
        """Let `create` load and return the model, and move its experts to their store."""
        if self._experts is not None:
            with self._experts.loading():
                self._experts.take_experts(create(), torch.device(device))
        elif self._codecs is not None:
            with encoding(self._layers, self._codecs, self._encoded_store):
                self.stored = take(find_moe_layers(create()), self._codecs, self._encoded_store)
        else:
            create()

    def engine_for(
        self, model: Any, geometry: Geometry, setting: Setting
    ) -> tuple[Engine, Store | None]:
        """Return the engine of a setting and its store, None where experts run from the model."""
        if self._experts is not None:
            return assemble(model, geometry, setting, self._experts)
        engine = Engine(geometry, setting)
        if self._codecs is None:
            return engine, None
        kernel, device_type = implementation_of(model), device_of(model).type
        return engine, LadderStore(self.stored, self._codecs, kernel, device_type)

    def experts_of(self) -> ExpertsOf | None:
        """Return a reader for experts outside the model, or None where they are in the model."""
        return None if self._experts is None else self._experts.copy_of

    def measured(self, device: str) -> Mapping[str, Any] | None:
        """Return the wall clock's report on the machine and the loading; None if virtual."""
        if self._experts is None:
            return None
        return {"machine": name_of(torch.device(device)), "load": self._experts.load_stats}
