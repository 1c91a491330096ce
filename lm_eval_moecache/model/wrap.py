"""Runs a transformers model through the engine: hooks on its routers, removed afterwards.

The router outputs of a pass become events; shadow prefetchers may observe a recorded run.

Shapes: T tokens, E experts, K experts per token, D hidden size, B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm
from lm_eval_moecache.engine.engine import Engine, TokenPass
from lm_eval_moecache.model.device import copy_to_host
from lm_eval_moecache.model.moe_layers import MoELayer, router_digest
from lm_eval_moecache.model.predictor.network import network_of, pass_predictor_of
from lm_eval_moecache.model.store import (
    IMPLEMENTATION,
    STORE_ATTRIBUTE,
    InPlaceStore,
    Store,
    implementation_of,
)
from lm_eval_moecache.model.weighting import WeightingRule, changed_output, find_rules, in_numpy
from lm_eval_moecache.records.arrays import BoolArray, FloatArray
from lm_eval_moecache.records.artifact import check_router_digest
from lm_eval_moecache.records.event import (
    DECODE,
    NO_PREDICTIONS,
    PASS_START,
    PREFILL,
    UNSEEN_EXPERTS,
    UNSEEN_SCORES,
    VERIFY,
    Event,
    unique_in_order,
)
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.predictor import digest_of, target_of
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.trace.recorder import (
    Detail,
    Predict,
    Propose,
    Recorder,
    Rows,
    identity,
    positions_of,
)


class FinishedSequences:
    """Tracks which rows of a batch have ended while `generate` continues the others.

    A row ends with an end token, which `generate` still feeds; from then on it feeds padding.
    """

    def __init__(self, end_tokens: int | Sequence[int] | None) -> None:
        tokens = [end_tokens] if isinstance(end_tokens, int) else end_tokens
        self._end_tokens = torch.tensor(tokens or [], dtype=torch.int64)
        self._ended: BoolArray | None = None

    def __call__(self, input_ids: Tensor) -> BoolArray:
        """Return which rows [B] have ended, given the tokens [B, 1] of the next decode step."""
        ending: BoolArray = torch.isin(input_ids[:, 0].cpu(), self._end_tokens).numpy()
        self._ended = ending if self._ended is None else self._ended | ending
        return self._ended


class RouterCall(NamedTuple):
    """One call of a router: its choice, and the predictions of later layers from its input."""

    layer: int
    experts: Tensor
    """[T, K]"""
    weights: Tensor | None
    """[T, K]; None where unused."""
    logits: Tensor | None
    """[T, E]; None where unused."""
    predicted: Mapping[int, Tensor]
    """Target layer -> logits [T, E], not rounded yet."""


class WrappedModel:
    """A model whose every forward call is a pass of the engine, until `unwrap`.

    Changes: forward hooks on the model and its routers, the experts implementation, and one
    attribute on each experts module. `unwrap` undoes all of it.
    """

    def __init__(
        self, model: Any, layers: list[MoELayer], engine: Engine, store: Store | None = None
    ) -> None:
        self.model = model
        self.engine = engine
        self.valid_rows: list[int] | None = None
        """For the next pass, how many tokens of each right-padded row are real; None for all."""
        self.ended: Callable[[Tensor], BoolArray] | None = None
        """Takes the tokens [rows, 1] of a batch's decode step, returns which rows have ended."""
        self.prompt_length = 0
        """Tokens per row, padding included, of the prompt that the next passes may read in chunks:
        every pass that ends within it is a prefill."""
        self.scan_scoring = False
        """Whether the next passes route their tokens one after another (`scoring=scan`)."""
        self.reads_first: Callable[[Tensor, int, str], None] | None = None
        """Called before each pass with its tokens [rows, tokens], how many precede them, and its
        phase."""
        self.recorder: Recorder | None = None
        """Records the routing of every pass, where it is set (`trace=DIR`)."""
        self._scanning = False
        self._layers, self._depth = layers, engine.depth
        rules = engine.rules
        artifacts = [rule.artifact for rule in (rules.routing, rules.prefetch, rules.miss)]
        digest = router_digest(layers) if any(artifacts) else ""
        for artifact in artifacts:
            if artifact is not None:
                check_router_digest(artifact, digest, engine.geometry.model)
        self._rules: list[WeightingRule | None] = [None] * len(layers)
        """Each router's weighting rule, where a policy may change the selection."""
        if rules.is_lossy:
            self._rules = find_rules([layer.gate for layer in layers])
        self._valid: BoolArray | None = None
        self._num_tokens = 0
        self._record: PassRecord | None = None
        """The pass in progress."""
        self._waits = False
        """Whether this pass's events are deferred to its end, since no computation depends on
        them: they then come to the host together."""
        self._weighed = False
        """Whether this pass's events carry weights whatever the policy wants."""
        self._calls: list[RouterCall] = []
        self._predictor = network_of(rules.prefetch, layers[0].gate.hidden_size)
        self._weigh: list[dict[str, Any]] = [
            {} if rule is None else {"weigh": in_numpy(rule)} for rule in self._rules
        ]
        self._gates_by_token = [layer.gate for layer in layers if layer.gate.by_token]
        self._is_sorted = np.array([[layer.gate.sorts] for layer in layers])
        self._first_keys = np.arange(len(layers))[:, None] * engine.geometry.num_experts
        # A lossy policy's loss is measured by weight, whatever its rules look at.
        self._wants_weights = engine.wants_weights or rules.is_lossy
        self._wants_logits = engine.wants_logits
        # An unsorted choice is sorted by its weights.
        self._reads_weights = self._wants_weights or not self._is_sorted.all()
        self._pass_predictor = pass_predictor_of(rules.prefetch, model.get_input_embeddings())
        self._before = model.get_experts_implementation()
        if store is None:
            store = InPlaceStore(implementation_of(model), model.device.type)
        self._store = store
        model.set_experts_implementation(IMPLEMENTATION)
        for index, layer in enumerate(layers):
            setattr(layer.experts, STORE_ATTRIBUTE, store.at(index, engine.waves))
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._begin_pass, with_kwargs=True),
            model.register_forward_hook(self._end_pass),
            *(
                layer.router.register_forward_hook(self._router_hook(index))
                for index, layer in enumerate(layers)
            ),
        ]

    def unwrap(self) -> None:
        """Restore the model. A second call changes nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for layer in self._layers:
            if hasattr(layer.experts, STORE_ATTRIBUTE):
                delattr(layer.experts, STORE_ATTRIBUTE)
        if implementation_of(self.model) == IMPLEMENTATION:
            self.model.set_experts_implementation(self._before)
        self.engine.close()
        self._store.close()

    def forget_batch(self) -> None:
        """Treat every token of later passes as real, and end scan scoring and chunked prompts."""
        self.valid_rows, self.ended, self.scan_scoring, self.prompt_length = None, None, False, 0

    def _begin_pass(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        input_ids: Tensor = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        for gate in self._gates_by_token:
            gate.input_ids = input_ids
        past, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        rows, length = input_ids.shape
        past_length = 0 if past is None else past.get_seq_length()
        if past_length == 0 or past_length + length <= self.prompt_length:
            phase = PREFILL
        else:
            phase = DECODE if length == 1 else VERIFY
        self._valid = None if rows == 1 else self._valid_tokens(input_ids, mask, phase)
        self._num_tokens = rows * length if self._valid is None else int(self._valid.sum())
        if not self._num_tokens:
            return
        engine, recorder = self.engine, self.recorder
        padding = None if self._valid is None else ~self._valid
        self._store.begin_pass(decoding=phase == DECODE, padding=padding)
        self._scanning = self.scan_scoring and phase == PREFILL
        index = len(engine.ledger.passes)
        if self.reads_first is not None:
            self.reads_first(input_ids, past_length, phase)
        if self._scanning:
            # Each token of a scan has its own pass; this one counts nothing.
            engine.begin_scan(self._num_tokens)
            self._record = PassRecord(-1, PREFILL, self._num_tokens, start_s=0.0)
        else:
            positions = None
            if engine.wants_positions:
                positions = positions_of(input_ids, mask, past_length).ravel()
                positions = positions if self._valid is None else positions[self._valid]
            predicted: Mapping[int, FloatArray] = NO_PREDICTIONS
            if self._pass_predictor is not None:
                predicted = self._pass_predictor.begin_pass(input_ids, past_length, self._valid)
            self._record = engine.begin_pass(phase, self._num_tokens, predicted, positions)
        # A recorder reads hidden states, which are not kept until the end of the pass.
        self._waits = engine.can_defer and not self._scanning and recorder is None
        self._weighed = self._scanning or recorder is not None
        self._weighed |= self._num_tokens > 1 or self._valid is not None
        self._calls.clear()
        if recorder is not None:
            pass_fields = index, phase, input_ids, mask, past_length, self._valid
            recorder.begin_pass(*pass_fields, is_scan=self._scanning)

    def _valid_tokens(self, input_ids: Tensor, mask: Tensor | None, phase: str) -> BoolArray | None:
        """Mark the tokens of a batch that a request is waiting for: padding needs no experts."""
        rows, length = input_ids.shape
        valid = np.ones((rows, length), dtype=bool)
        if self.valid_rows is not None:
            valid &= np.arange(length)[None, :] < np.asarray(self.valid_rows)[:, None]
        if mask is not None and mask.dim() == 2:
            valid &= mask[:, -length:].bool().cpu().numpy()
        if phase == DECODE and self.ended is not None:
            # transformers feeds padding to rows that have ended while others go on; a row that
            # goes on may have chosen that token, too.
            valid &= ~self.ended(input_ids)[:, None]
        return None if valid.all() else valid.ravel()

    def _end_pass(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._num_tokens:
            return
        engine, calls = self.engine, self._calls
        if self._scanning:
            engine.end_scan()
        else:
            # Deferred events are served in order.
            if self._num_tokens > 1 or self._valid is not None:
                for call in calls:
                    engine.enter(call.layer, self._num_tokens)
                    engine.run(self._event(call))
            elif calls:
                engine.serve(self._token_pass(calls))
            calls.clear()
            engine.end_pass()
        self._record = None

    def _router_hook(self, layer: int) -> Callable[[nn.Module, Any, Any], Any]:
        levels, gate = self._store.levels, self._layers[layer].gate

        def hook(router: nn.Module, args: Any, output: Any) -> Any:
            if not self._num_tokens:
                return None
            engine = self.engine
            call = self._call(layer, args[0], output)
            if self._waits:
                self._calls.append(call)
                return None
            if not self._scanning:
                engine.enter(layer, self._num_tokens)
            event = self._event(call)
            if self.recorder is not None:
                # Later gates may be queried too; their hooks do not fire.
                def predict(ahead: int) -> FloatArray:
                    logits = self._layers[ahead].gate.predict(args[0])
                    return np.asarray(self._rows(rounded(logits)))

                self.recorder.add(event, args[0], gate.read(output).logits, self._rows, predict)
            if self._scanning:
                selection, executed_levels = engine.scan(event), None
            else:
                plan = engine.run(event)
                selection, executed_levels = plan.selection, plan.levels
            if levels is not None:
                # None after a scan: its tokens' lossless misses load the best level.
                levels[layer] = executed_levels
            if selection is None:
                return None
            return self._changed(layer, output, selection, event)

        return hook

    def _call(self, layer: int, hidden: Tensor, output: Any) -> RouterCall:
        """Return what a call's event needs, with later layers predicted from the call's input."""
        assert self._record is not None, "a router was called outside a pass"
        predicted: dict[int, Tensor] = {}
        if self._predictor is None:
            for ahead in range(layer + 1, min(layer + 1 + self._depth, len(self._layers))):
                predicted[ahead] = self._layers[ahead].gate.predict(hidden)
        elif (target := target_of(layer, len(self._layers), self._record.phase)) is not None:
            predicted[target] = self._predictor(layer, hidden)
        needs_weights = self._weighed or self._reads_weights
        if not (needs_weights or self._wants_logits):
            return RouterCall(layer, output[2], None, None, predicted)
        choice = self._layers[layer].gate.read(output)
        logits = choice.logits if self._wants_logits else None
        weights = choice.weights if needs_weights else None
        return RouterCall(layer, choice.experts, weights, logits, predicted)

    def _event(self, call: RouterCall) -> Event:
        record, valid = self._record, self._valid
        assert record is not None
        num_experts = self.engine.geometry.num_experts
        layer, predicted = call.layer, call.predicted
        first_key = layer * num_experts
        if call.weights is None and call.logits is None and not predicted:
            chosen: list[Any] = call.experts.tolist()
            while isinstance(chosen[0], list):
                chosen = chosen[0]
            keys = [first_key + expert for expert in chosen]
            return Event(record.index, layer, record.phase, 1, keys, **self._weigh[layer])
        carries_weights = self._weighed or self._wants_weights
        fields = self._weigh[layer].copy()
        tensors = [call.experts]
        if call.weights is not None:
            tensors.append(call.weights.float())
        if call.logits is not None:
            # Without a weighting rule, algorithms see the rounded logits that a trace keeps.
            tensors.append(call.logits.float() if fields else rounded(call.logits))
        arrays = copy_to_host([*tensors, *map(rounded, predicted.values())], valid)
        # Copied where they may be kept, as by a recorder: the originals belong to the model.
        experts = arrays[0].astype(np.int64, copy=carries_weights)
        if call.weights is not None:
            experts, sorted_weights = _in_order(experts, arrays[1].copy(), self._is_sorted[layer])
            if carries_weights:
                fields["weights"] = sorted_weights
        if carries_weights or self._wants_logits:
            fields["experts"] = experts
        if self._wants_logits:
            fields["logits"] = arrays[-len(predicted) - 1]
        if predicted:
            fields["predicted"] = dict(zip(predicted, arrays[-len(predicted) :], strict=True))
        if self._num_tokens == 1:
            keys = [first_key + expert for expert in experts.tolist()[0]]
        else:
            keys = unique_in_order(layer, num_experts, experts)
        return Event(record.index, layer, record.phase, self._num_tokens, keys, **fields)

    def _token_pass(self, calls: Sequence[RouterCall]) -> TokenPass:
        """Return the router outputs of a one-token pass, all layers in one transfer to the host."""
        record = self._record
        assert record is not None
        tensors = [_stacked([call.experts for call in calls])]
        call_weights = [call.weights for call in calls if call.weights is not None]
        if call_weights:
            tensors.append(_stacked(call_weights).float())
        if self._wants_logits:
            call_logits = [call.logits for call in calls if call.logits is not None]
            tensors.append(rounded(_stacked(call_logits)))
        targets = [target for call in calls for target in call.predicted]
        if targets:
            values = [logits for call in calls for logits in call.predicted.values()]
            tensors.append(rounded(_stacked(values)))
        arrays = copy_to_host(tensors, None)
        experts, weights = arrays[0].astype(np.int64, copy=False), None
        if call_weights:
            experts, weights = _in_order(experts, arrays[1], self._is_sorted)
        keys = experts + self._first_keys

        def events() -> list[Event]:
            by_weight = logits = [UNSEEN_SCORES] * len(calls)
            rows = [UNSEEN_EXPERTS] * len(calls)
            if weights is not None and self._wants_weights:
                rows, by_weight = [*experts[:, None]], [*weights[:, None]]
            if self._wants_logits:
                logits = [*arrays[-1 - bool(targets)][:, None]]
            predicted: list[Mapping[int, FloatArray]] = [NO_PREDICTIONS] * len(calls)
            if targets:
                target_logits = iter(arrays[-1][:, None])
                predicted = [
                    {target: next(target_logits) for target in call.predicted} for call in calls
                ]
            columns = zip(calls, keys.tolist(), rows, by_weight, logits, predicted, strict=True)
            index, phase = record.index, record.phase
            return [Event(index, call.layer, phase, 1, *rest) for call, *rest in columns]

        proposed = None
        if targets:
            proposed = self.engine.rules.prefetch.propose_arrays(targets, arrays[-1])
        if proposed is not None:
            # A layer proposes nothing where it predicts none.
            counts = iter(proposed[1].tolist())
            ends = accumulate((sum(islice(counts, len(c.predicted))) for c in calls), initial=0)
            proposed = proposed[0], np.array([*ends])
        return TokenPass(keys, weights, proposed, events)

    def _changed(self, layer: int, output: Any, selection: Selection, event: Event) -> Any:
        rule, choice = self._rules[layer], self._layers[layer].gate.read(output)
        assert rule is not None, "a lossless policy changed a selection"
        if len(event.experts):
            router_experts = event.experts
        else:
            # One token's keys are its choice: reading it again would wait for the device.
            first_key = layer * self.engine.geometry.num_experts
            router_experts = np.asarray([event.keys], dtype=np.int64) - first_key
        return changed_output(output, choice, selection, rule, self._valid, router_experts)

    def _rows(self, values: Tensor) -> Any:
        array = values.detach().reshape(-1, values.shape[-1]).cpu().numpy()
        return array if self._valid is None else array[self._valid]


def rounded(logits: Tensor) -> Tensor:
    """Round to float16, the precision of a routing trace, so that a replay sees equal logits."""
    return logits.to(torch.float16).float()


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stack one-row tensors into one [rows, n] on the first one's device."""
    device = tensors[0].device
    if any([values.device != device for values in tensors]):
        tensors = [values.to(device) for values in tensors]
    return torch.cat(tuple(tensors)).view(len(tensors), -1)


def _in_order(experts: Any, weights: Any, is_sorted: Any) -> tuple[Any, Any]:
    """Sort each token's experts [T, K] heaviest first, where the router has not done so."""
    if np.all(is_sorted):
        return experts, weights
    order = np.argsort(-weights, axis=-1, kind="stable")
    order = np.where(is_sorted, np.arange(weights.shape[-1]), order)
    return np.take_along_axis(experts, order, -1), np.take_along_axis(weights, order, -1)


class ShadowPrefetcher:
    """A prefetcher that observes the events of a run under another policy.

    It sees what it would see in a run of its own: the events and predictions are the model's, and
    no prefetcher sees the cache.
    """

    def __init__(
        self, prefetch: PrefetchAlgorithm, layers: Sequence[MoELayer], embedding: nn.Module
    ) -> None:
        self._prefetch = prefetch
        self._num_layers = len(layers)
        self._network = network_of(prefetch, layers[0].gate.hidden_size)
        self._pass_predictor = pass_predictor_of(prefetch, embedding)
        self._pass_predictions: dict[int, FloatArray] = {}

    def begin_pass(self, input_ids: torch.Tensor, past_length: int, valid: Any) -> None:
        """Read a pass's tokens if the prefetcher predicts from text; `valid` masks out padding."""
        if self._pass_predictor is not None:
            self._pass_predictions = self._pass_predictor.begin_pass(input_ids, past_length, valid)

    def __call__(self, event: Event, hidden: Any, rows: Rows, predict: Predict) -> list[int]:
        """Return the keys it proposes at the event."""
        if event.layer == 0:
            self._prefetch.on_pass(event.pass_index)
        if self._pass_predictor is not None:
            # Proposed before the pass, and recorded with its first layer.
            pass_start = event._replace(layer=PASS_START, keys=(), predicted=self._pass_predictions)
            return list(self._prefetch.propose(pass_start)) if event.layer == 0 else []
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
    """Build a recording's shadow prefetchers; ValueError for an artifact of another model."""
    shadows: dict[str, Propose] = {}
    for choice, seed in detail.shadows:
        prefetch: PrefetchAlgorithm = choice.build(geometry, seed)
        digest = ""
        if prefetch.artifact is not None:
            check_router_digest(prefetch.artifact, router_digest(list(layers)), geometry.model)
            digest = digest_of(prefetch.artifact)
        shadows[identity(choice, seed, digest)] = ShadowPrefetcher(prefetch, layers, embedding)
    return shadows
