"""Prefetchers that look on while a run is recorded: what each would propose at every event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.model.moe_layers import MoELayer, router_digest
from lm_eval_moecache.model.predictor.data_aware import foresight_of
from lm_eval_moecache.model.predictor.network import network_of
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.artifact import check_router_digest
from lm_eval_moecache.records.event import PASS_START, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.predictor import digest_of, target_of
from lm_eval_moecache.trace.detail import Detail, identity
from lm_eval_moecache.trace.recorder import Predict, Propose, Rows


class ShadowPrefetcher:
    """One prefetcher, shown the events of a run that another policy governs.

    It sees what it would see in a run of its own: the events and predictions are the model's, and
    no prefetcher sees the cache.
    """

    def __init__(
        self, prefetch: PrefetchAlgorithm, layers: Sequence[MoELayer], embedding: nn.Module
    ) -> None:
        self._prefetch = prefetch
        self._num_layers = len(layers)
        self._network = network_of(prefetch, layers[0].gate.hidden_size)
        self._foresight = foresight_of(prefetch, embedding)
        self._foreseen: dict[int, FloatArray] = {}

    def begin_pass(self, input_ids: torch.Tensor, past_length: int, valid: Any) -> None:
        """Read a pass's tokens, where the prefetcher does; `valid` marks those of requests."""
        if self._foresight is not None:
            self._foreseen = self._foresight.begin_pass(input_ids, past_length, valid)

    def __call__(self, event: Event, hidden: Any, rows: Rows, predict: Predict) -> list[int]:
        """Return the keys it proposes at the event."""
        if event.layer == 0:
            self._prefetch.on_pass(event.pass_index)
        if self._foresight is not None:
            # Proposed before the pass, and kept with its first layer.
            before = event._replace(layer=PASS_START, keys=(), predicted=self._foreseen)
            return list(self._prefetch.propose(before)) if event.layer == 0 else []
        predicted = {}
        if self._network is not None:
            target = target_of(event.layer, self._num_layers, event.phase)
            if target is not None:
                logits = self._network(event.layer, hidden)
                predicted[target] = rows(logits.to(torch.float16).float())
        elif self._prefetch.depth:
            last = min(event.layer + self._prefetch.depth, self._num_layers - 1)
            predicted = {ahead: predict(ahead) for ahead in range(event.layer + 1, last + 1)}
        return list(self._prefetch.propose(event._replace(predicted=predicted)))


def shadow_prefetchers_of(
    detail: Detail, geometry: Geometry, layers: Sequence[MoELayer], embedding: nn.Module
) -> dict[str, Propose]:
    """Build the prefetchers that a recording asks for; ValueError for another model's artifact."""
    found: dict[str, Propose] = {}
    for choice, seed in detail.onlookers:
        prefetch: PrefetchAlgorithm = choice.build(geometry, seed)
        digest = ""
        if prefetch.artifact is not None:
            check_router_digest(prefetch.artifact, router_digest(list(layers)), geometry.model)
            digest = digest_of(prefetch.artifact)
        found[identity(choice, seed, digest)] = ShadowPrefetcher(prefetch, layers, embedding)
    return found
