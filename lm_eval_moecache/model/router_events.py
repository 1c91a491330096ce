"""What the routers of a pass say, as events; and prefetchers that look on while a run is recorded.

Shapes: T tokens, E experts, K experts per token, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.engine.engine import Engine, TokenPass
from lm_eval_moecache.model.device import copy_to_host
from lm_eval_moecache.model.moe_layers import MoELayer, router_digest
from lm_eval_moecache.model.predictor.network import foresight_of, network_of
from lm_eval_moecache.model.weighting import WeightingRule, in_numpy
from lm_eval_moecache.records.arrays import BoolArray, FloatArray
from lm_eval_moecache.records.artifact import check_router_digest
from lm_eval_moecache.records.event import (
    NO_PREDICTIONS,
    PASS_START,
    UNSEEN_EXPERTS,
    UNSEEN_SCORES,
    Event,
    unique_in_order,
)
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.predictor import digest_of, target_of
from lm_eval_moecache.trace.recorder import Detail, Predict, Propose, Rows, identity


class RouterCall(NamedTuple):
    """One call of a router: what it chose, and what its input says of layers to come."""

    layer: int
    experts: Tensor
    """[T, K]"""
    weights: Tensor | None
    """[T, K]; None where nobody looks at them."""
    logits: Tensor | None
    """[T, E]; None where nobody looks at them."""
    predicted: Mapping[int, Tensor]
    """Target layer -> logits [T, E], not rounded yet."""


class RouterEvents:
    """Makes the events of one engine from what its model's routers say."""

    def __init__(
        self, engine: Engine, layers: Sequence[MoELayer], rules: Sequence[WeightingRule | None]
    ) -> None:
        self._engine, self._layers = engine, layers
        self._num_experts = engine.geometry.num_experts
        self._depth = engine.depth
        self._predictor = network_of(engine.rules.prefetch, layers[0].gate.hidden_size)
        self._predicts = self._depth > 0 or self._predictor is not None
        self._weigh: list[dict[str, Any]] = [
            {} if rule is None else {"weigh": in_numpy(rule)} for rule in rules
        ]
        self._is_sorted = [layer.gate.sorts for layer in layers]
        self._wants_weights = engine.wants_weights
        # A choice that is not in order is put in order by its weights.
        self._weighed = self._wants_weights or not all(self._is_sorted)
        self._wants_logits = engine.wants_logits

    def call(
        self, layer: int, phase: str, hidden: Tensor, output: Any, weights: bool
    ) -> RouterCall:
        """Return what a call's event needs, `weights` in any case or as the engine asks."""
        predicted = self._predictions(layer, phase, hidden) if self._predicts else {}
        if not (weights or self._weighed or self._wants_logits):
            return RouterCall(layer, output[2], None, None, predicted)
        choice = self._layers[layer].gate.read(output)
        looked_at = choice.weights if weights or self._weighed else None
        logits = choice.logits if self._wants_logits else None
        return RouterCall(layer, choice.experts, looked_at, logits, predicted)

    def _predictions(self, layer: int, phase: str, hidden: Tensor) -> Mapping[int, Tensor]:
        """Ask the predictor, or the gates of the next layers, about this layer's input."""
        if self._predictor is not None:
            target = target_of(layer, len(self._layers), phase)
            return {} if target is None else {target: self._predictor(layer, hidden)}
        last = min(layer + 1 + self._depth, len(self._layers))
        return {ahead: self._layers[ahead].gate.predict(hidden) for ahead in range(layer + 1, last)}

    def event(
        self,
        call: RouterCall,
        record: PassRecord,
        num_tokens: int,
        valid: BoolArray | None,
        weights: bool,
    ) -> Event:
        """Return one call's event; with `weights` it has `experts` and `weights` in any case."""
        layer, predicted = call.layer, call.predicted
        base = layer * self._num_experts
        if call.weights is None and call.logits is None and not predicted:
            chosen: list[Any] = call.experts.tolist()
            while isinstance(chosen[0], list):
                chosen = chosen[0]
            keys = [base + expert for expert in chosen]
            return Event(record.index, layer, record.phase, 1, keys, **self._weigh[layer])
        weights |= self._wants_weights
        seen = self._weigh[layer].copy()
        asked = [call.experts]
        if call.weights is not None:
            asked.append(call.weights.float())
        if call.logits is not None:
            # Where results cannot change, what algorithms see is what a trace keeps.
            asked.append(call.logits.float() if seen else rounded(call.logits))
        found = copy_to_host([*asked, *map(rounded, predicted.values())], valid)
        # Copies where they may be kept (a recorder does): what they come from is the model's.
        experts = found[0].astype(np.int64, copy=weights)
        if call.weights is not None:
            experts, own = _in_order(experts, found[1].copy(), self._is_sorted[layer])
            if weights:
                seen["weights"] = own
        if weights or self._wants_logits:
            seen["experts"] = experts
        if self._wants_logits:
            seen["logits"] = found[-len(predicted) - 1]
        if predicted:
            seen["predicted"] = dict(zip(predicted, found[-len(predicted) :], strict=True))
        if num_tokens == 1:
            keys = [base + expert for expert in experts.tolist()[0]]
        else:
            keys = unique_in_order(layer, self._num_experts, experts)
        return Event(record.index, layer, record.phase, num_tokens, keys, **seen)

    def of_one_token(self, calls: Sequence[RouterCall], record: PassRecord) -> TokenPass:
        """Return what all layers of a pass of one token said, brought to the host together."""
        asked = [_stacked([call.experts for call in calls])]
        given = [call.weights for call in calls if call.weights is not None]
        if given:
            asked.append(_stacked(given).float())
        if self._wants_logits:
            given_logits = [call.logits for call in calls if call.logits is not None]
            asked.append(rounded(_stacked(given_logits)))
        targets = [target for call in calls for target in call.predicted]
        if targets:
            values = [logits for call in calls for logits in call.predicted.values()]
            asked.append(rounded(_stacked(values)))
        found = copy_to_host(asked, None)
        experts, weights = found[0].astype(np.int64, copy=False), None
        if given:
            in_order = np.array([[self._is_sorted[call.layer]] for call in calls])
            experts, weights = _in_order(experts, found[1], in_order)
        layers = np.array([[call.layer] for call in calls])
        keys = experts + layers * self._num_experts

        def events() -> list[Event]:
            by_weight = logits = [UNSEEN_SCORES] * len(calls)
            rows = [UNSEEN_EXPERTS] * len(calls)
            if weights is not None and self._wants_weights:
                rows, by_weight = [*experts[:, None]], [*weights[:, None]]
            if self._wants_logits:
                logits = [*found[-1 - bool(targets)][:, None]]
            predicted: list[Mapping[int, FloatArray]] = [NO_PREDICTIONS] * len(calls)
            if targets:
                each = iter(found[-1][:, None])
                predicted = [{target: next(each) for target in call.predicted} for call in calls]
            seen = zip(calls, keys.tolist(), rows, by_weight, logits, predicted, strict=True)
            index, phase = record.index, record.phase
            return [Event(index, call.layer, phase, 1, *rest) for call, *rest in seen]

        proposed = None
        if targets:
            proposed = self._engine.rules.prefetch.propose_arrays(targets, found[-1])
        if proposed is not None:
            ends = np.cumsum([0, *[len(call.predicted) for call in calls]])
            proposed = proposed[0], np.append(0, proposed[1].cumsum())[ends]
        return TokenPass(keys, weights, proposed, events)


def rounded(logits: Tensor) -> Tensor:
    """Round to float16, which is what a routing trace keeps: a replay sees the same numbers."""
    return logits.to(torch.float16).float()


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one row each as one of all rows, where the first of them lies."""
    device = tensors[0].device
    if any(values.device != device for values in tensors):
        tensors = [values.to(device) for values in tensors]
    return torch.cat(list(tensors)).reshape(len(tensors), -1)


def _in_order(experts: Any, weights: Any, is_sorted: Any) -> tuple[Any, Any]:
    """Put each token's experts [T, K] heaviest first, where the router has not done so."""
    if np.all(is_sorted):
        return experts, weights
    order = np.argsort(-weights, axis=-1, kind="stable")
    order = np.where(is_sorted, np.arange(weights.shape[-1]), order)
    return np.take_along_axis(experts, order, -1), np.take_along_axis(weights, order, -1)


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
                predicted[target] = rows(rounded(logits))
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
