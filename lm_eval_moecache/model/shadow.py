"""Prefetchers that observe a recorded run under another policy, for replays under theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lm_eval_moecache.algorithms.learned.predictor import digest_of, target_of
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.model.hook import rounded
from lm_eval_moecache.model.moe_layers import MoELayer, router_digest
from lm_eval_moecache.model.predictor.network import network_of, pass_predictor_of
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.artifact import check_router_digest
from lm_eval_moecache.records.event import PASS_START, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.trace.recorder import Detail, Predict, Propose, Rows, identity


class ShadowPrefetcher:
    """A prefetcher that observes the events of a run under another policy.

    It sees what it would see in a run of its own: the events and predictions are the model's, and
    no prefetcher sees the cache.
    """

    def __init__(
        self,
        make: Callable[[], PrefetchAlgorithm],
        layers: Sequence[MoELayer],
        embedding: nn.Module,
        restarts: bool,
    ) -> None:
        self._make, self._prefetch, self._restarts = make, make(), restarts
        prefetch = self._prefetch
        self._num_layers = len(layers)
        self._network = network_of(prefetch, layers[0].gate.hidden_size)
        self._pass_predictor = pass_predictor_of(prefetch, embedding)
        self._pass_predictions: dict[int, FloatArray] = {}

    def restart(self) -> None:
        """Begin another request: forget all that was seen, under `cache_reset=request`."""
        if self._restarts:
            self._prefetch = self._make()

    @property
    def depth(self) -> int:
        """How many layers ahead it looks by their gates."""
        return 0 if self.reads_hidden else self._prefetch.depth

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads texts or hidden states itself."""
        return self._network is not None or self._pass_predictor is not None

    def begin_pass(self, input_ids: torch.Tensor, past_length: int, valid: Any) -> None:
        """Read a pass's tokens if the prefetcher predicts from text; `valid` masks out padding."""
        if self._pass_predictor is not None:
            self._pass_predictions = self._pass_predictor.begin_pass(input_ids, past_length, valid)

    def __call__(self, event: Event, hidden: Any, rows: Rows | None, predict: Predict) -> list[int]:
        """Return the keys it proposes at the event."""
        if event.layer == 0:
            self._prefetch.on_pass(event.pass_index)
        if self._pass_predictor is not None:
            # Proposed before the pass, and recorded with its first layer.
            nothing = np.zeros((len(event.experts), 0), np.int64)
            pass_start = event._replace(
                layer=PASS_START, experts=nothing, predicted=self._pass_predictions
            )
            return list(self._prefetch.propose(pass_start)) if event.layer == 0 else []
        predicted = {}
        if self._network is not None:
            target = target_of(event.layer, self._num_layers, event.phase)
            if target is not None:
                assert rows is not None, "a network without hidden states"
                logits = self._network(event.layer, hidden)
                predicted[target] = rows(rounded(logits))
        elif self._prefetch.depth:
            last = min(event.layer + self._prefetch.depth, self._num_layers - 1)
            predicted = {ahead: predict(ahead) for ahead in range(event.layer + 1, last + 1)}
        return list(self._prefetch.propose(event._replace(predicted=predicted)))


def shadow_prefetchers_of(
    detail: Detail,
    geometry: Geometry,
    layers: Sequence[MoELayer],
    embedding: nn.Module,
) -> dict[str, Propose]:
    """Build a recording's shadow prefetchers; ValueError for an artifact of another model."""
    shadows: dict[str, Propose] = {}
    for choice, seed, reset in detail.shadows:
        prefetch: PrefetchAlgorithm = choice.build(geometry, seed)
        digest = ""
        if prefetch.artifact is not None:
            check_router_digest(prefetch.artifact, router_digest(list(layers)), geometry.model)
            digest = digest_of(prefetch.artifact)
        make = partial(choice.build, geometry, seed)
        name = identity(choice, seed, digest, reset)
        shadows[name] = ShadowPrefetcher(make, layers, embedding, reset == "request")
    return shadows
