"""Puts a transformers model behind the engine: hooks on its routers, and nothing left after.

Shapes: T tokens, E experts, K experts per token, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.model.experts import (
    IMPLEMENTATION,
    STORE_ATTRIBUTE,
    register_experts_function,
)
from lm_eval_moecache.model.fetched import fetched
from lm_eval_moecache.model.moe_layers import MoELayer, router_digest
from lm_eval_moecache.model.predictor.data_aware import foresight_of
from lm_eval_moecache.model.predictor.network import network_of
from lm_eval_moecache.model.store import BoolArray, InPlaceStore, Store, implementation_of
from lm_eval_moecache.model.weighting.base import WeightingRule
from lm_eval_moecache.model.weighting.change import changed_output
from lm_eval_moecache.model.weighting.find import find_rules, in_numpy
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.artifact import check_router_digest
from lm_eval_moecache.records.event import DECODE, PREFILL, VERIFY, Event, unique_in_order
from lm_eval_moecache.records.predictor import target_of
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.trace.recorder import Recorder


class WrappedModel:
    """A model whose every forward call is a pass of the engine, until `unwrap`.

    Changes: forward hooks on the model and its routers, the experts implementation, and one
    attribute on each experts module. `unwrap` takes all of it back.
    """

    def __init__(
        self, model: Any, layers: list[MoELayer], engine: Engine, store: Store | None = None
    ) -> None:
        self.model = model
        self.engine = engine
        self.valid_rows: list[int] | None = None
        """For the next pass, how many tokens of each right-padded row are real; None for all."""
        self.ended: Callable[[Tensor], BoolArray] | None = None
        """Told the tokens [rows, 1] of each decode step of a batch, says which rows have ended."""
        self.scan_scoring = False
        """Whether the next passes route their tokens one after another (`scoring=scan`)."""
        self.reads_first: Callable[[Tensor, int], None] | None = None
        """Shown each pass's tokens [rows, tokens] and how many came before, before it begins."""
        self.recorder: Recorder | None = None
        """Where the routing of every pass is recorded, if anywhere (`trace=DIR`)."""
        self._scanning = False
        self._layers = layers
        self._check_artifacts()
        self._rules: list[WeightingRule | None] = self._find_rules()
        self._valid: BoolArray | None = None
        self._num_tokens = 0
        self._depth = engine.depth
        self._predictor = network_of(engine.algorithms.prefetch, layers[0].gate.hidden_size)
        self._foresight = foresight_of(engine.algorithms.prefetch, model.get_input_embeddings())
        self._weighers = [None if rule is None else in_numpy(rule) for rule in self._rules]
        self._wants_weights = engine.wants_weights
        self._wants_logits = engine.wants_logits
        self._is_sorted = [layer.gate.sorts for layer in layers]
        self._before = model.get_experts_implementation()
        if store is None:
            store = InPlaceStore(implementation_of(model), model.device.type)
        self._store = store
        register_experts_function()
        model.set_experts_implementation(IMPLEMENTATION)
        for index, layer in enumerate(layers):
            setattr(layer.experts, STORE_ATTRIBUTE, store.at(index, engine.waves))
        self._handles = self._hooks(model)

    def _hooks(self, model: Any) -> list[Any]:
        """Register what is called around each pass, and after each router."""
        handles = [
            model.register_forward_pre_hook(self._begin_pass, with_kwargs=True),
            model.register_forward_hook(self._end_pass),
        ]
        for index, layer in enumerate(self._layers):
            handles.append(layer.router.register_forward_hook(self._router_hook(index)))
        return handles

    def unwrap(self) -> None:
        """Restore the model to what it was. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for layer in self._layers:
            if hasattr(layer.experts, STORE_ATTRIBUTE):
                delattr(layer.experts, STORE_ATTRIBUTE)
        self.model.set_experts_implementation(self._before)
        self.engine.close()

    def forget_batch(self) -> None:
        """Take every token of the passes to come for real."""
        self.valid_rows, self.ended, self.scan_scoring = None, None, False

    def _check_artifacts(self) -> None:
        """Refuse what an algorithm learned from another model's routers."""
        chosen = self.engine.algorithms
        carried = [a.artifact for a in (chosen.routing, chosen.prefetch, chosen.miss)]
        digest = router_digest(self._layers) if any(carried) else ""
        for artifact in carried:
            if artifact is not None:
                check_router_digest(artifact, digest, self.engine.geometry.model)

    def _find_rules(self) -> list[WeightingRule | None]:
        """Find how each router weighs a selection, where a policy may change the selection."""
        chosen = self.engine.algorithms
        if chosen.routing.is_lossless and chosen.miss.is_lossless:
            return [None] * len(self._layers)
        return find_rules([layer.gate for layer in self._layers])

    def _begin_pass(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        input_ids: Tensor = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        for each in self._layers:
            each.gate.input_ids = input_ids
        past = kwargs.get("past_key_values")
        rows, length = input_ids.shape
        phase = PREFILL
        if past is not None and past.get_seq_length() > 0:
            phase = DECODE if length == 1 else VERIFY
        self._valid = None
        if rows > 1:
            self._valid = self._valid_tokens(input_ids, kwargs.get("attention_mask"), phase)
        self._num_tokens = rows * length if self._valid is None else int(self._valid.sum())
        if not self._num_tokens:
            return
        padding = None if self._valid is None else ~self._valid
        self._store.begin_pass(decoding=phase == DECODE, padding=padding)
        self._scanning = self.scan_scoring and phase == PREFILL
        index = len(self.engine.ledger.passes)
        past_length = 0 if past is None else past.get_seq_length()
        if self.reads_first is not None:
            self.reads_first(input_ids, past_length)
        if self._scanning:
            self.engine.begin_scan(self._num_tokens)
        elif self._foresight is None:
            self.engine.begin_pass(phase, self._num_tokens)
        else:
            foreseen = self._foresight.begin_pass(input_ids, past_length, self._valid)
            self.engine.begin_pass(phase, self._num_tokens, foreseen)
        if self.recorder is None:
            return
        if self._scanning:
            self.recorder.begin_scan(index, input_ids, self._valid)
        else:
            mask = kwargs.get("attention_mask")
            self.recorder.begin_pass(index, phase, input_ids, mask, past_length, self._valid)

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
        if self._scanning:
            self.engine.end_scan()
        else:
            self.engine.end_pass()

    def _router_hook(self, layer: int) -> Callable[[nn.Module, Any, Any], Any]:
        levels, gate = self._store.levels, self._layers[layer].gate

        def hook(router: nn.Module, args: Any, output: Any) -> Any:
            if not self._num_tokens:
                return None
            engine = self.engine
            if not self._scanning:
                engine.enter(layer, self._num_tokens)
            event = self._event(layer, args[0], gate.read(output))
            if self._scanning:
                selection, executed_at = engine.scan(event), None
            else:
                plan = engine.run(event)
                selection, executed_at = plan.selection, plan.levels
            if levels is not None:
                # None after a scan: its tokens' lossless misses load the best level.
                levels[layer] = executed_at
            if selection is None:
                return None
            return self._changed(layer, output, selection, event)

        return hook

    def _event(self, layer: int, hidden: Tensor, output: Any) -> Event:
        """Build the event of one router call from its (logits, weights, indices)."""
        record, engine = self.engine.record, self.engine
        assert record is not None or self._scanning, "a router was called outside a pass"
        index, phase = (record.index, record.phase) if record is not None else (-1, PREFILL)
        wants_weights = self._wants_weights or self._scanning or self.recorder is not None
        wants_weights |= self._num_tokens > 1 or self._valid is not None
        predicted = self._predictions(layer, phase, hidden)
        weigh = self._weighers[layer]
        rule: dict[str, Any] = {} if weigh is None else {"weigh": weigh}
        if not (wants_weights or predicted):
            return Event(index, layer, phase, 1, self._keys_of_one_token(layer, output), **rule)
        seen: dict[str, Any] = {**self._seen(layer, output, predicted), **rule}
        num_experts = engine.geometry.num_experts
        if self._num_tokens == 1:
            base = layer * num_experts
            keys = [base + expert for expert in seen["experts"][0].tolist()]
        else:
            keys = unique_in_order(layer, num_experts, seen["experts"])
        if not wants_weights:
            del seen["experts"], seen["weights"]
        event = Event(index, layer, phase, self._num_tokens, keys, **seen)
        if self.recorder is not None:
            self.recorder.add(
                event, hidden, output[0], self._rows, lambda a: self._predict(a, hidden)
            )
        return event

    def _seen(self, layer: int, output: Any, predicted: Mapping[int, Tensor]) -> dict[str, Any]:
        """Return what the event tells the algorithms, brought to the host in one go."""
        asked = [output[2], output[1].float()]
        if self._wants_logits:
            # Where results cannot change, what algorithms see is what a trace keeps, as below.
            logits = output[0] if self._rules[layer] is not None else output[0].to(torch.float16)
            asked.append(logits.float())
        found = fetched([*asked, *predicted.values()], self._valid)
        # Copies: what they come from is the model's.
        experts_TK, weights_TK = found[0].astype(np.int64), found[1].copy()
        if not self._is_sorted[layer]:
            order = np.argsort(-weights_TK, axis=-1, kind="stable")
            experts_TK = np.take_along_axis(experts_TK, order, -1)
            weights_TK = np.take_along_axis(weights_TK, order, -1)
        seen: dict[str, Any] = {"experts": experts_TK, "weights": weights_TK}
        if self._wants_logits:
            seen["logits"] = found[2]
        if predicted:
            seen["predicted"] = dict(zip(predicted, found[len(asked) :], strict=True))
        return seen

    def _predictions(self, layer: int, phase: str, hidden: Tensor) -> dict[int, Tensor]:
        """Ask the predictor, or the gates of the next layers, about this layer's input."""
        if self._predictor is not None:
            target = target_of(layer, len(self._layers), phase)
            if target is None:
                return {}
            return {target: _rounded(self._predictor(layer, hidden))}
        last = min(layer + 1 + self._depth, len(self._layers))
        gates = ((ahead, self._layers[ahead].gate) for ahead in range(layer + 1, last))
        return {ahead: _rounded(gate.predict(hidden)) for ahead, gate in gates}

    def _keys_of_one_token(self, layer: int, output: Any) -> list[int]:
        """Return one token's keys, heaviest first."""
        experts: list[Any] = output[2].tolist()
        while isinstance(experts[0], list):
            experts = experts[0]
        if not self._is_sorted[layer]:
            weights: list[float] = output[1].flatten().tolist()
            order = sorted(range(len(experts)), key=lambda k: -weights[k])
            experts = [experts[k] for k in order]
        base = layer * self.engine.geometry.num_experts
        return [base + expert for expert in experts]

    def _predict(self, layer: int, hidden: Tensor) -> FloatArray:
        """Ask a later layer's gate about this layer's input; its own hooks do not fire."""
        found: FloatArray = self._rows(_rounded(self._layers[layer].gate.predict(hidden)))
        return found

    def _changed(self, layer: int, output: Any, selection: Selection, event: Event) -> Any:
        rule, choice = self._rules[layer], self._layers[layer].gate.read(output)
        assert rule is not None, "a lossless policy changed a selection"
        own = event.experts if len(event.experts) else None
        return changed_output(output, choice, selection, rule, self._valid, own)

    def _rows(self, values: Tensor) -> Any:
        array = values.detach().reshape(-1, values.shape[-1]).cpu().numpy()
        return array if self._valid is None else array[self._valid]


def _rounded(logits: Tensor) -> Tensor:
    """Round to float16, which is what a routing trace keeps: a replay sees the same numbers."""
    return logits.to(torch.float16).float()
