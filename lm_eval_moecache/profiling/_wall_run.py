"""Decode a model on the wall clock and take each step apart, at the places its routers speak."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.model.grouped import Matrices
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.wall.loading import ExpertLoader
from lm_eval_moecache.model.wall.pools import SlotPools
from lm_eval_moecache.model.wall.store import SlotStore
from lm_eval_moecache.model.wrap import WrappedModel
from lm_eval_moecache.profiling._timing import typical_s
from lm_eval_moecache.records.event import DECODE
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.sizes import parse_capacity

ALL, SOME = "100%", "40%"
"""Capacities: with the first, every expert is there from the beginning."""
_TEXTS, _PROMPT, _TOKENS = 1, 16, 8


class Step(NamedTuple):
    """One decode step. Of L layers, the first L - 1 are looked at one by one."""

    total_s: float
    layers_s: Sequence[float]
    """From where a layer's router has spoken to where the next one's has."""
    bookkeeping_s: Sequence[float]
    """In the hooks of the L routers."""
    demanded_s: Sequence[float]
    """In which experts moved that each of `layers_s` had demanded."""


class WallRun:
    """One run of a model under the wall clock; marks are set where the routers have spoken."""

    def __init__(
        self,
        model: Any,
        loader: ExpertLoader,
        geometry: Geometry,
        policy: str,
        capacity: str,
        bytes_per_s: float | None,
    ) -> None:
        layers = find_moe_layers(model)
        setting = Setting(
            policy=load_policy(policy),
            capacity=parse_capacity(capacity, geometry),
            # Nothing is charged by it on this clock.
            hardware=NOBODYS,
            throttle_bytes_per_s=bytes_per_s,
        )
        device = model.device
        self.pools = SlotPools(
            loader.parameters, geometry, setting.capacity, loader.tiers[0], device
        )
        self.engine = Engine(geometry, setting, mover=self.pools)
        if capacity == ALL:
            self._fill()
        store = SlotStore(self.pools, geometry, "grouped_mm", device.type)
        self._model, self._experts = model, layers[0].experts
        self._begun: list[tuple[float, float]] = []
        self._ended_s: list[float] = []
        begin = [layer.router.register_forward_hook(self._begin) for layer in layers]
        self._wrapped = WrappedModel(model, layers, self.engine, store)
        self._handles = [*begin]
        self._handles += [layer.router.register_forward_hook(self._end) for layer in layers]

    def _fill(self) -> None:
        geometry = self.engine.geometry
        (pool,) = self.engine.pools
        pool.warm(range(geometry.num_layers * geometry.num_experts))
        self.engine.executor.fill()

    @property
    def gates(self) -> float:
        """How many gates a layer asks for predictions, on average; 0 where a predictor does."""
        num_layers = self.engine.geometry.num_layers
        if self.engine.rules.prefetch.uses_predictor:
            return 0.0
        asked = [min(self.engine.depth, num_layers - 1 - layer) for layer in range(num_layers)]
        return statistics.mean(asked)

    @property
    def memory_bytes_per_s(self) -> float:
        """How fast one row's products read the slots; 0 on a device, whose launches they would be.

        Slots of all experts, each read once: none is in a cache but by the size of the model.
        """
        if self._model.device.type != "cpu":
            return 0.0
        pool = self.pools.of_layer(0)
        held = Matrices(self._experts, pool)
        weights = [*held.up, *held.down]
        rows = {matrix.shape[0]: matrix.new_full((1, matrix.shape[0]), 0.01) for matrix in weights}
        with torch.no_grad():
            read_s = typical_s(lambda: [rows[m.shape[0]] @ m for m in weights], torch.device("cpu"))
        return sum(matrix.nbytes for matrix in weights) / read_s

    def decode(self) -> list[Step]:
        """Decode random texts and take the run apart; the first text warms what is to be warmed."""
        steps: list[Step] = []
        generator = torch.Generator().manual_seed(11)
        words = self._model.get_input_embeddings().num_embeddings
        for text in range(1 + _TEXTS):
            prompt = torch.randint(words, (1, _PROMPT), generator=generator)
            found = self._steps(prompt.to(self._model.device))
            steps += found if text else []
        for handle in self._handles:
            handle.remove()
        self._wrapped.unwrap()
        return steps

    def _steps(self, prompt: torch.Tensor) -> list[Step]:
        found = []
        with torch.no_grad():
            output = self._model(prompt, use_cache=True)
            with self._model._optimize_model_for_decode():
                for _ in range(_TOKENS):
                    self._begun.clear()
                    self._ended_s.clear()
                    token = output.logits[:, -1:].argmax(-1)
                    past = output.past_key_values
                    output = self._model(token, past_key_values=past, use_cache=True)
                    found.append(self._step())
        return found

    def _begin(self, router: nn.Module, args: Any, output: Any) -> None:
        link = self.engine.link
        assert isinstance(link, WallLink)
        self._begun.append((time.perf_counter(), link.demanded_s))

    def _end(self, router: nn.Module, args: Any, output: Any) -> None:
        self._ended_s.append(time.perf_counter())

    def _step(self) -> Step:
        record = self.engine.ledger.passes[-1]
        assert record.phase == DECODE
        pairs = zip(self._begun, self._begun[1:], strict=False)
        told = [[b - a for a, b in zip(*marks, strict=True)] for marks in pairs]
        layers_s, demanded_s = zip(*told, strict=True)
        both = zip(self._begun, self._ended_s, strict=True)
        bookkeeping_s = [end_s - begun[0] for begun, end_s in both]
        return Step(record.duration_s, layers_s, bookkeeping_s, demanded_s)


NOBODYS = Hardware(
    name="wall",
    peak_flops=1.0,
    memory_bytes_per_s=1.0,
    link_bytes_per_s=1.0,
    link_latency_s=0.0,
    kernel_overhead_s=0.0,
    memory_bytes=1.0,
)
"""What a run on the wall clock is given for hardware: nothing is charged by it."""
