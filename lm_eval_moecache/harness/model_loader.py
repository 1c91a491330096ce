"""What a model is loaded for, and how: experts encoded, in a tier, or where they always are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lm_eval_moecache.engine.compiled import live_engine
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.model.device import name_of
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.precision.codecs import Encoded
from lm_eval_moecache.model.precision.ladder import codecs_of
from lm_eval_moecache.model.precision.loading import EncodedExpertStore, encoding, take
from lm_eval_moecache.model.speculative import ExpertsOf
from lm_eval_moecache.model.store import LadderStore, Store, implementation_of
from lm_eval_moecache.model.wall.loading import ExpertLoader, assemble
from lm_eval_moecache.records.geometry import Geometry


class ModelLoader:
    """Made of the setting that the model is loaded for; `check` says whether another one fits."""

    def __init__(
        self,
        config: Config,
        skeleton: nn.Module,
        identity: str,
        files: Sequence[Path],
        device: str | None,
    ) -> None:
        """`identity` says which weights these are, as `weights_identity` does; `files` are they.

        `device` is what `resolve_device` has found; None leaves it to HFLM.
        """
        self.device = device
        self._loaded_for = (config.clock, config.store, config.store_dir)
        self._ladder = config.ladder
        self._skeleton = skeleton
        self._codecs = None if config.ladder is None else codecs_of(config.ladder)
        self._kept: EncodedExpertStore | None = None
        if config.encoded_dir is not None and self._codecs is not None and identity:
            dtype = next(find_moe_layers(skeleton)[0].experts.parameters()).dtype
            folder = Path(config.encoded_dir)
            self._kept = EncodedExpertStore(folder, identity, dtype, self._codecs)
        self.stored: list[dict[str, Encoded]] = []
        """Layer -> parameter name -> its levels, where the store has a precision of its own."""
        self._experts: ExpertLoader | None = None
        if config.clock == "wall":
            self._experts = ExpertLoader(
                config.store, config.store_dir, skeleton, self._codecs, self._kept, files, identity
            )

    def check(self, config: Config) -> None:
        """Raise ValueError where a setting needs the model loaded in another way."""
        clock, store, folder = self._loaded_for
        if self._loaded_for != (config.clock, config.store, config.store_dir):
            raise ValueError(
                f"clock={config.clock!r}, store={config.store!r}, store_dir={config.store_dir!r}: "
                f"the model was loaded for clock={clock!r}, store={store!r}, "
                f"store_dir={folder!r} and has to be loaded anew."
            )
        if config.ladder != self._ladder:
            raise ValueError(
                f"precision={config.precision!r}: the model was loaded with "
                f"precision={self._ladder and ':'.join(self._ladder)!r} and has to be loaded anew."
            )

    def arguments(self, device: str) -> Mapping[str, Any]:
        """Return what `from_pretrained` is given beside HFLM's own arguments."""
        return {} if self._experts is None else self._experts.arguments(torch.device(device))

    def load(self, create: Callable[[], Any], device: str) -> None:
        """Let `create` load and return the model, and take its experts where they belong."""
        if self._experts is not None:
            with self._experts.loading():
                self._experts.take_experts(create(), torch.device(device))
        elif self._codecs is not None:
            with encoding(find_moe_layers(self._skeleton), self._codecs, self._kept):
                model = create()
                self.stored = take(find_moe_layers(model), self._codecs, self._kept)
        else:
            create()

    def engine_for(
        self, model: Any, geometry: Geometry, setting: Setting, scans: bool
    ) -> tuple[Engine, Store | None]:
        """Return the engine of a setting, and the store to run from where it is not the model.

        `scans`: texts that are scored are scanned.
        """
        if self._experts is not None:
            return assemble(model, geometry, setting, self._experts)
        engine = live_engine(geometry, setting, scans)
        if self._codecs is None:
            return engine, None
        kernel, device_type = implementation_of(model), model.device.type
        return engine, LadderStore(self.stored, self._codecs, kernel, device_type)

    def experts_of(self) -> ExpertsOf | None:
        """Return what reads the experts where they do not lie in the model; None where they do."""
        return None if self._experts is None else self._experts.copy_of

    def measured(self, device: str) -> Mapping[str, Any] | None:
        """Return what only the wall clock's report has: the machine, the store, the loading."""
        if self._experts is None:
            return None
        return {"machine": name_of(torch.device(device)), "load": self._experts.figures}
