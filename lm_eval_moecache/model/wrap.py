"""Runs a transformers model through the engine: hooks on its routers, removed afterwards.

The router outputs of a pass become events.

Shapes: T tokens, E experts, K experts per token, D hidden size, B rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lm_eval_moecache.algorithms.learned.predictor import target_of
from lm_eval_moecache.engine.engine import Engine, TokenPass
from lm_eval_moecache.engine.rows import Row, RowPass
from lm_eval_moecache.engine.virtual.together import Together, serving
from lm_eval_moecache.model.device import as_dtype, copy_to_host, device_of
from lm_eval_moecache.model.moe_layers import MoELayer, cache_of, router_digest
from lm_eval_moecache.model.predictor.network import network_of, pass_predictor_of
from lm_eval_moecache.model.store import (
    IMPLEMENTATION,
    STORE_ATTRIBUTE,
    InPlaceStore,
    Store,
    implementation_of,
)
from lm_eval_moecache.model.weighting import WeightingRule, changed_output, find_rules, in_numpy
from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray
from lm_eval_moecache.records.artifact import check_router_digest
from lm_eval_moecache.records.event import (
    DECODE,
    NO_PREDICTIONS,
    PREFILL,
    UNSEEN_SCORES,
    VERIFY,
    Event,
    unique_in_order,
)
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.trace.recorder import (
    NotedPass,
    Recorder,
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
    noted: Mapping[int, Tensor]
    """The same by the layers' own gates, as far ahead as a recording wants them."""


_NONE: Mapping[int, Tensor] = MappingProxyType({})


class HostCall(NamedTuple):
    """A router's call on the host, for the tokens that some request is waiting for."""

    experts: IntArray
    weights: FloatArray | None
    logits: FloatArray | None
    predicted: Mapping[int, FloatArray]
    noted: Mapping[int, FloatArray]


class Part(NamedTuple):
    """The tokens of a pass that belong to one row: `start` to `stop` of those waited for."""

    row: Row
    start: int
    stop: int
    positions: IntArray | None


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
        self.is_paused = False
        """Whether the next forwards are no passes."""
        self.rows: list[Row | None] | None = None
        """Who is served by each row of the next passes, apart from the others, or None for rows
        that have ended; one for several rows, where they are beams of one request. None instead of
        a list: all rows are served together, as events of one engine."""
        self.passes_before: Callable[[], int] = lambda: 0
        """Returns how many passes other engines have served before this one's."""
        self._names = tuple(inspect.signature(model.forward).parameters)
        self._parts: list[Part] = []
        self._num_rows, self._places = 1, [0]
        """Number of rows of the pass in progress that may be served separately, and which are."""
        self._together: Together | None = None
        """Serves the layers of all rows of the pass in progress at once, where that goes."""
        self._begun: Together | None = None
        """The last one."""
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
        self._phase = PREFILL
        self._record: PassRecord | None = None
        """The pass in progress."""
        self._is_whole = False
        """Whether this pass is of one token, and begun, served and ended at its end."""
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
        self._sorts = bool(self._is_sorted.all())
        self._reads_weights = self._wants_weights or not self._sorts
        self._pass_predictor = pass_predictor_of(rules.prefetch, model.get_input_embeddings())
        self._before = model.get_experts_implementation()
        if store is None:
            store = InPlaceStore(implementation_of(model), device_of(model).type)
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
        self.rows = None

    def _begin_pass(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._num_tokens = 0
        if args:
            # However a pass is called, its arguments are found by their names.
            kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        input_ids: Tensor | None = kwargs.get("input_ids")
        if input_ids is None:
            input_ids = self._shape_of(kwargs.get("inputs_embeds"))
        for gate in self._gates_by_token:
            gate.input_ids = input_ids
        if self.is_paused:
            return
        past, mask = cache_of(kwargs), kwargs.get("attention_mask")
        rows, length = input_ids.shape
        past_length = 0 if past is None else int(past.get_seq_length())
        if past_length == 0 or past_length + length <= self.prompt_length:
            phase = PREFILL
        else:
            phase = DECODE if length == 1 else VERIFY
        together = rows == 1 and self.rows is None
        self._valid = None if together else self._valid_tokens(input_ids, mask, phase)
        self._num_tokens = rows * length if self._valid is None else int(self._valid.sum())
        if not self._num_tokens:
            return
        engine, recorder = self.engine, self.recorder
        padding = None if self._valid is None else ~self._valid
        self._store.begin_pass(decoding=phase == DECODE, padding=padding)
        self._phase, self._together = phase, None
        self._calls.clear()
        if self.rows is not None:
            self._begin_rows(input_ids, mask, past_length)
            return
        self._num_rows, self._places = 1, [0]
        self._scanning = self.scan_scoring and phase == PREFILL
        # A recorder reads hidden states, which are not kept until the end of the pass.
        self._waits = engine.can_defer and not self._scanning and recorder is None
        self._weighed = self._scanning or recorder is not None
        self._weighed |= self._num_tokens > 1 or self._valid is not None
        if self.reads_first is not None:
            self.reads_first(input_ids, past_length, phase)
        self._is_whole = self._waits and not self._weighed and not engine.wants_positions
        self._is_whole &= self._pass_predictor is None
        if self._is_whole:
            return
        index = self.passes_before() + len(engine.ledger.passes)
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
        if together and phase == DECODE and recorder is None and not self._waits:
            self._together = self._begun = serving([engine], self._begun)
        if recorder is not None:
            pass_fields = index, phase, input_ids, mask, past_length, self._valid
            recorder.begin_pass(*pass_fields, is_scan=self._scanning)

    def _shape_of(self, embeddings: Tensor | None) -> Tensor:
        """Return a tensor [rows, tokens] in place of the tokens that embeddings stand for."""
        if embeddings is None:
            raise ValueError("a pass without input_ids or inputs_embeds. Allowed: one of them.")
        reads_text = self._pass_predictor is not None or self.reads_first is not None
        if self._gates_by_token or reads_text:
            who = "this model's router" if self._gates_by_token else "this policy's prefetcher"
            raise ValueError(
                f"inputs_embeds: {who} reads the tokens themselves. Allowed with it: input_ids."
            )
        return embeddings[..., 0]

    def _begin_rows(self, input_ids: Tensor, mask: Tensor | None, past_length: int) -> None:
        """Begin a pass whose rows are served separately."""
        assert self.rows is not None
        rows, length = input_ids.shape
        counts = [length] * rows
        if self._valid is not None:
            counts = self._valid.reshape(rows, length).sum(-1).tolist()
        owners = self.rows
        if len(owners) < rows:
            owners, counts = self.rows, [sum(counts)]
        positions = None
        if self.engine.wants_positions or self.recorder is not None:
            positions = positions_of(input_ids, mask, past_length).ravel()
            positions = positions if self._valid is None else positions[self._valid]
        self._parts, start = [], 0
        self._num_rows, self._places = len(owners), []
        for place, (row, count) in enumerate(zip(owners, counts, strict=True)):
            if row is None or not count:
                continue
            self._places.append(place)
            own = None if positions is None else positions[start : start + count]
            self._parts.append(Part(row, start, start + count, own))
            start += count
        self._scanning, self._waits = False, self.engine.can_defer
        self._weighed = self.recorder is not None
        self._weighed |= self._num_tokens > len(self._parts) or self._valid is not None
        for part in self._parts:
            if part.row.engine is not None:
                charged = part.positions if self.engine.wants_positions else None
                part.row.engine.begin_pass(self._phase, part.stop - part.start, positions=charged)
            if self.recorder is not None:
                assert part.positions is not None
                part.row.noted.append(NotedPass(self._phase, part.positions, []))
        is_token = self._phase == DECODE and self._num_tokens == len(self._parts)
        if is_token and self.recorder is None and not self._waits:
            engines: list[Any] = [part.row.engine for part in self._parts]
            self._together = self._begun = serving(engines, self._begun)

    def _valid_tokens(self, input_ids: Tensor, mask: Tensor | None, phase: str) -> BoolArray | None:
        """Mark the tokens of a batch that a request is waiting for: padding needs no experts."""
        rows, length = input_ids.shape
        if self.rows is not None and None not in self.rows and phase == DECODE:
            return None
        valid = np.ones((rows, length), dtype=bool)
        if self.valid_rows is not None:
            valid &= np.arange(length)[None, :] < np.asarray(self.valid_rows)[:, None]
        if mask is not None and mask.dim() == 2:
            valid &= mask[:, -length:].bool().cpu().numpy()
        if self.rows is not None and len(self.rows) == rows:
            valid &= np.array([row is not None for row in self.rows])[:, None]
        if phase == DECODE and self.ended is not None:
            # transformers feeds padding to rows that have ended while others go on; a row that
            # goes on may have chosen that token, too.
            valid &= ~self.ended(input_ids)[:, None]
        return None if valid.all() else valid.ravel()

    def _end_pass(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._num_tokens:
            return
        engine, calls = self.engine, self._calls
        if self.rows is not None:
            self._end_rows(calls)
        elif self._scanning:
            engine.end_scan()
        elif self._together is not None:
            self._together.end()
            engine.end_pass()
        elif self._is_whole:
            engine.serve_decoded(self._token_passes(calls, 1) if calls else ())
        else:
            # Deferred events are served in order.
            if self._num_tokens > 1 or self._valid is not None:
                for call in calls:
                    engine.enter(call.layer, self._num_tokens)
                    engine.run(self._event(call.layer, self._on_host(call)))
            elif calls:
                engine.serve(self._token_passes(calls, 1)[0])
            engine.end_pass()
        calls.clear()
        # What calls a part of the model by itself is no pass.
        self._record, self._num_tokens = None, 0

    def _end_rows(self, calls: Sequence[RouterCall]) -> None:
        """End a pass whose rows are served separately; keep what is not served yet."""
        if not self._waits:
            if self._together is not None:
                self._together.end()
            for part in self._parts:
                assert part.row.engine is not None
                part.row.engine.end_pass()
            return
        is_token = self._valid is None and self._num_tokens == len(self._parts)
        if is_token and self.recorder is None and calls:
            kept = self._token_passes(calls, len(self._parts))
            for part, token_pass in zip(self._parts, kept, strict=True):
                position = 0 if part.positions is None else int(part.positions[0])
                part.row.passes.append(token_pass._replace(position=position))
            return
        charged = self.engine.wants_positions
        passes: list[list[Event]] = [[] for _ in self._parts]
        for call in calls:
            host = self._on_host(call)
            for part, events in zip(self._parts, passes, strict=True):
                events.append(self._event_of_part(call.layer, host, part))
                self._note(part, events[-1], host)
        for part, events in zip(self._parts, passes, strict=True):
            positions = part.positions if charged else None
            kept_pass = RowPass(self._phase, part.stop - part.start, positions, events)
            part.row.passes.append(kept_pass)

    def _note(self, part: Part, event: Event, host: HostCall) -> None:
        """Keep what a recording wants of an event, before any policy changes it."""
        if self.recorder is None:
            return
        own = slice(part.start, part.stop)
        logits: Any = None if host.logits is None else host.logits[own].astype(np.float16)
        noted: Any = {ahead: values[own].astype(np.float16) for ahead, values in host.noted.items()}
        part.row.noted[-1].events.append((event, logits, noted))

    def _router_hook(self, layer: int) -> Callable[[nn.Module, Any, Any], Any]:
        gate = self._layers[layer].gate

        def hook(router: nn.Module, args: Any, output: Any) -> Any:
            if not self._num_tokens:
                return None
            engine = self.engine
            call = self._call(layer, args[0], output)
            if self._waits:
                self._calls.append(call)
                return None
            if self.rows is not None or self._together is not None:
                return self._run_rows(layer, output, self._on_host(call))
            if not self._scanning:
                engine.enter(layer, self._num_tokens)
            event = self._event(layer, self._on_host(call))
            if self.recorder is not None:
                # Later gates may be queried too; their hooks do not fire.
                def predict(ahead: int) -> FloatArray:
                    logits = self._layers[ahead].gate.predict(args[0])
                    return np.asarray(self._rows(rounded(logits)))

                row_logits = self._rows(gate.read(output).logits.half())
                self.recorder.add(event, row_logits, predict, args[0], self._rows)
            if self._scanning:
                # Its tokens' lossless misses load the best level.
                selection = engine.scan(event)
                self._tell_levels(layer, None)
            else:
                plan = engine.run(event)
                selection = plan.selection
                self._tell_levels(layer, [plan.levels])
            if selection is None:
                return None
            return self._changed(layer, output, selection, event)

        return hook

    def _run_rows(self, layer: int, output: Any, host: HostCall) -> Any:
        """Let each row's engine serve its part of a layer; return the output if they change it."""
        if self._together is not None:
            weights, logits = host.weights, UNSEEN_SCORES if host.logits is None else host.logits
            assert weights is not None, "a lossy policy without weights"
            chosen = host.experts, weights, logits, host.predicted
            selection = self._together.run(layer, *chosen, **self._weigh[layer])
            if self._store.levels is not None:
                self._tell_levels(layer, self._together.levels_of(layer))
            return self._changed_rows(layer, output, selection, host)
        choices: list[tuple[int, Selection | None]] = []
        levels: list[Mapping[int, int] | None] = []
        for part in self._parts:
            event, engine = self._event_of_part(layer, host, part), part.row.engine
            assert engine is not None
            self._note(part, event, host)
            engine.enter(layer, event.num_tokens)
            plan = engine.run(event)
            choices.append((event.num_tokens, plan.selection))
            levels.append(plan.levels)
        self._tell_levels(layer, levels)
        return self._changed_rows(layer, output, Selection.join(host.experts, choices), host)

    def _tell_levels(
        self, layer: int, levels: IntArray | Sequence[Mapping[int, int] | None] | None
    ) -> None:
        """Tell a store of several precisions at which level the rows served execute each expert.

        `levels` are [rows, experts], key -> level of each row, or None for the best level.
        """
        if self._store.levels is None or not self.engine.rules.ladder:
            return
        self._store.levels[layer] = None
        if levels is not None:
            executed = np.full((self._num_rows, self.engine.geometry.num_experts), -1)
            for place, own in zip(self._places, levels, strict=True):
                if isinstance(own, Mapping):
                    keys = np.fromiter(own, np.int64)
                    executed[place, keys % executed.shape[1]] = [*own.values()]
                else:
                    executed[place] = own
            self._store.levels[layer] = executed

    def _changed_rows(
        self, layer: int, output: Any, selection: Selection | None, host: HostCall
    ) -> Any:
        if selection is None:
            return None
        rule, choice = self._rules[layer], self._layers[layer].gate.read(output)
        assert rule is not None, "a lossless policy changed a selection"
        return changed_output(output, choice, selection, rule, self._valid, host.experts)

    def _call(self, layer: int, hidden: Tensor, output: Any) -> RouterCall:
        """Return what a call's event needs, with later layers predicted from the call's input."""
        recorder = None if self.rows is None else self.recorder
        reach = 0 if recorder is None else recorder.reach
        own = self._depth if self._predictor is None else 0
        noted, predicted = _NONE, _NONE
        if reach or own:
            ahead = range(layer + 1, min(layer + max(reach, own), len(self._layers) - 1) + 1)
            noted = {target: self._layers[target].gate.predict(hidden) for target in ahead}
            predicted = {target: noted[target] for target in ahead[:own]}
        if self._predictor is not None:
            target = target_of(layer, len(self._layers), self._phase)
            predicted = {} if target is None else {target: self._predictor(layer, hidden)}
        if not reach:
            noted = _NONE
        wants_weights = self._weighed or self._reads_weights
        wants_logits = self._wants_logits or (recorder is not None and recorder.wants_logits)
        if not (wants_weights or wants_logits):
            return RouterCall(layer, output[2], None, None, predicted, noted)
        choice = self._layers[layer].gate.read(output)
        logits = choice.logits if wants_logits else None
        weights = choice.weights if wants_weights else None
        return RouterCall(layer, choice.experts, weights, logits, predicted, noted)

    def _on_host(self, call: RouterCall) -> HostCall:
        """Bring a call to the host, restricted to the tokens that a request waits for."""
        tensors = [call.experts]
        if call.weights is not None:
            tensors.append(as_dtype(call.weights, torch.float32))
        if call.logits is not None:
            # Without a weighting rule, algorithms see the rounded logits that a trace keeps.
            is_weighed = self._rules[call.layer] is not None
            seen = as_dtype(call.logits, torch.float32) if is_weighed else rounded(call.logits)
            tensors.append(seen)
        ahead = [*call.predicted.values(), *call.noted.values()]
        arrays = iter(copy_to_host([*tensors, *map(rounded, ahead)], self._valid))
        # Copied where they may be kept: the originals belong to the model.
        keeps = self._weighed or self._wants_weights or self.rows is not None
        keeps &= self._together is None
        experts = next(arrays).astype(np.int64, copy=keeps)
        weights = None
        if call.weights is not None:
            weights = next(arrays)
            weights = weights.copy() if keeps else weights
            if not self._sorts:
                experts, weights = _in_order(experts, weights, self._is_sorted[call.layer])
        logits = None if call.logits is None else next(arrays)
        predicted = {target: next(arrays) for target in call.predicted}
        noted = {target: next(arrays) for target in call.noted}
        return HostCall(experts, weights, logits, predicted, noted)

    def _event(self, layer: int, host: HostCall) -> Event:
        """Return the event of all tokens of the pass in progress."""
        assert self._record is not None
        stop = self._num_tokens
        return self._event_of(layer, host, slice(0, stop), self._record.index)

    def _event_of_part(self, layer: int, host: HostCall, part: Part) -> Event:
        index = -1 if part.row.engine is None else part.row.engine.record.index
        return self._event_of(layer, host, slice(part.start, part.stop), index)

    def _event_of(self, layer: int, host: HostCall, own: slice, index: int) -> Event:
        num_tokens, num_experts = own.stop - own.start, self.engine.geometry.num_experts
        fields, experts = self._weigh[layer].copy(), host.experts[own]
        carries_weights = self._weighed or self._wants_weights
        if carries_weights and host.weights is not None:
            fields["weights"] = host.weights[own]
        if carries_weights or self._wants_logits:
            fields["experts"] = experts
        if self._wants_logits and host.logits is not None:
            fields["logits"] = host.logits[own]
        if host.predicted:
            fields["predicted"] = {target: values[own] for target, values in host.predicted.items()}
        if num_tokens == 1:
            first_key = layer * num_experts
            keys = [first_key + expert for expert in experts.tolist()[0]]
        else:
            keys = unique_in_order(layer, num_experts, experts)
        return Event(index, layer, self._phase, num_tokens, keys, **fields)

    def _token_passes(self, calls: Sequence[RouterCall], rows: int) -> list[TokenPass]:
        """Return the router outputs of a pass of one token a row, in one transfer to the host."""
        num_layers = len(calls)
        tensors = [_stacked([call.experts for call in calls], rows)]
        call_weights = [call.weights for call in calls if call.weights is not None]
        if call_weights:
            tensors.append(_stacked(call_weights, rows).float())
        if self._wants_logits:
            call_logits = [call.logits for call in calls if call.logits is not None]
            tensors.append(rounded(_stacked(call_logits, rows)))
        values = [logits for call in calls for logits in call.predicted.values()]
        targets = [[*call.predicted] for call in calls] if values else ()
        if values:
            tensors.append(rounded(_stacked(values, rows)))
        arrays = [array.reshape(-1, rows, array.shape[-1]) for array in copy_to_host(tensors, None)]
        experts, weights = arrays[0].astype(np.int64, copy=rows > 1), None
        if call_weights:
            weights = arrays[1]
            if not self._sorts:
                experts, weights = _in_order(experts, weights, self._is_sorted[:, None])
        keys = experts + self._first_keys[:num_layers, None]
        wants_weights = self._wants_weights and weights is not None
        return [
            TokenPass(
                self._phase,
                keys[:, row],
                experts[:, row] if wants_weights else None,
                weights[:, row] if wants_weights and weights is not None else None,
                arrays[1 + bool(call_weights)][:, row] if self._wants_logits else None,
                targets,
                arrays[-1][:, row] if values else None,
            )
            for row in range(rows)
        ]

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


def _stacked(tensors: Sequence[Tensor], rows: int) -> Tensor:
    """Stack tensors of some rows into one [tensors x rows, n] on the first one's device."""
    device = tensors[0].device
    if any([values.device != device for values in tensors]):
        tensors = [values.to(device) for values in tensors]
    return torch.cat(tuple(tensors)).view(len(tensors) * rows, -1)


def _in_order(experts: Any, weights: Any, is_sorted: Any) -> tuple[Any, Any]:
    """Sort each token's experts [T, K] heaviest first, where a router has not done so."""
    order = np.argsort(-weights, axis=-1, kind="stable")
    order = np.where(is_sorted, np.arange(weights.shape[-1]), order)
    return np.take_along_axis(experts, order, -1), np.take_along_axis(weights, order, -1)
