"""Runs a transformers model through the engine: hooks on its routers, removed afterwards.

What a pass is, is decided when it begins: an object that takes what each router returns. Shapes: T
tokens, E experts, K experts per token, D hidden size, B rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lm_eval_moecache.algorithms.learned.predictor import target_of
from lm_eval_moecache.engine.rows import Rows
from lm_eval_moecache.model.device import as_dtype, copy_to_device, copy_to_host, device_of, rows_of
from lm_eval_moecache.model.moe_layers import MoELayer, cache_of, router_digest
from lm_eval_moecache.model.predictor.network import network_of, pass_predictor_of
from lm_eval_moecache.model.store import (
    IMPLEMENTATION,
    STORE_ATTRIBUTE,
    InPlaceStore,
    Store,
    implementation_of,
)
from lm_eval_moecache.model.weighting import WeightingRule, changed_output, find_rules
from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray
from lm_eval_moecache.records.artifact import check_router_digest
from lm_eval_moecache.records.batch import Batch, joined
from lm_eval_moecache.records.event import (
    DECODE,
    NO_PREDICTIONS,
    PREFILL,
    UNSEEN_SCORES,
    VERIFY,
    Event,
)
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.trace.recorder import NotedPass, Recorder, positions_of


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


@dataclass
class Row:
    """A request on its way through the model, beside others, served as if it were alone."""

    engine: Any = None
    """Serves its passes as they are computed. None where no decision changes the computation: they
    are kept, and served when it is the request's turn."""
    kept: list[tuple[Batch, int]] = field(default_factory=list)
    """Passes of some rows, and which of these is its own."""
    noted: list[NotedPass] = field(default_factory=list)

    def serve(self, engine: Any) -> None:
        """Serve the kept passes, in order, and forget them."""
        own = [batch.row(place) for batch, place in self.kept]
        self.kept.clear()
        for _, passes in groupby(own, lambda each: (each.phase, each.bounds is None)):
            engine.serve(joined([*passes]))


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


@dataclass
class Pass:
    """A pass in progress: which tokens of which rows it computes."""

    phase: str
    num_rows: int
    """Of the batch, those that have ended included."""
    valid: BoolArray | None
    """Which tokens a request waits for [B x tokens]; None for all."""
    owners: Sequence[Row]
    """The rows that are served by themselves, of which each has its part of the tokens."""
    places: Sequence[int]
    """Where they stand in the batch."""
    counts: list[int]
    """How many tokens each of them has."""
    positions: IntArray | None
    """Of all tokens, in their sequences, if they are wanted."""

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def parts(self) -> list[slice]:
        """The tokens of each row."""
        ends = np.cumsum([0, *self.counts]).tolist()
        return [slice(*ends[place : place + 2]) for place in range(len(self.counts))]

    def positions_by_row(self) -> list[IntArray] | None:
        return None if self.positions is None else [self.positions[own] for own in self.parts]


class WrappedModel:
    """A model whose every forward call is a pass of the engine, until `unwrap`.

    Changes: forward hooks on the model and its routers, the experts implementation, and one
    attribute on each experts module. `unwrap` undoes all of it.
    """

    def __init__(
        self, model: Any, layers: list[MoELayer], engine: Any, store: Store | None = None
    ) -> None:
        self.model, self.engine, self.layers = model, engine, layers
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
        self.recorder: Recorder | None = None
        """Records the routing of every pass, where it is set (`trace=DIR`)."""
        rules = engine.rules
        artifacts = [rule.artifact for rule in (rules.routing, rules.prefetch, rules.miss)]
        digest = router_digest(layers) if any(artifacts) else ""
        for artifact in artifacts:
            if artifact is not None:
                check_router_digest(artifact, digest, engine.geometry.model)
        self.weighting: list[WeightingRule | None] = [None] * len(layers)
        """Each router's weighting rule, where a policy may change the selection."""
        if rules.is_lossy:
            self.weighting = find_rules([layer.gate for layer in layers])
        self.predictor = network_of(rules.prefetch, layers[0].gate.hidden_size)
        self.pass_predictor = pass_predictor_of(rules.prefetch, model.get_input_embeddings())
        self._names = tuple(inspect.signature(model.forward).parameters)
        self._gates_by_token = [layer.gate for layer in layers if layer.gate.by_token]
        self._pass: _Kind | None = None
        self._of_rows: dict[tuple[int, ...], Rows] = {}
        self._before = model.get_experts_implementation()
        if store is None:
            store = InPlaceStore(implementation_of(model), device_of(model).type)
        self.store = store
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
        for layer in self.layers:
            if hasattr(layer.experts, STORE_ATTRIBUTE):
                delattr(layer.experts, STORE_ATTRIBUTE)
        if implementation_of(self.model) == IMPLEMENTATION:
            self.model.set_experts_implementation(self._before)
        self.engine.close()
        self.store.close()

    def forget_batch(self) -> None:
        """Treat every token of later passes as real, and end scan scoring and chunked prompts."""
        self.valid_rows, self.ended, self.scan_scoring, self.prompt_length = None, None, False, 0
        self.rows = None

    def rows_of(self, engines: Sequence[Any]) -> Rows:
        """Return what serves these engines side by side; the last ones are kept."""
        named = tuple(map(id, engines))
        if named not in self._of_rows:
            self._of_rows = {named: Rows(engines)}
        return self._of_rows[named]

    def _begin_pass(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._pass = None
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
        valid = None
        if rows > 1 or self.rows is not None:
            valid = self._valid_tokens(input_ids, mask, phase)
        begun = self._parts(phase, input_ids, mask, past_length, valid)
        if not begun.num_tokens:
            return
        padding = None if valid is None else ~valid
        self.store.begin_pass(decoding=phase == DECODE, padding=padding)
        if self.reads_first is not None and self.rows is None:
            self.reads_first(input_ids, past_length, phase)
        engine, recorder, predicted = self.engine, self.recorder, NO_PREDICTIONS
        is_scan = self.scan_scoring and phase == PREFILL and self.rows is None
        kind: type[_Kind] = _Deferred if engine.can_defer else _Layered
        if is_scan:
            kind = _Scanned
        elif recorder is not None and self.rows is None:
            # It reads hidden states, which are not kept until the end of the pass.
            kind = _Layered
        if self.pass_predictor is not None and not is_scan:
            predicted = self.pass_predictor.begin_pass(input_ids, past_length, valid)
        if recorder is not None and self.rows is None:
            index = self.passes_before() + engine.num_passes
            given = index, phase, input_ids, mask, past_length, valid
            recorder.begin_pass(*given, is_scan=is_scan)
        self._pass = kind(self, begun, predicted)

    def _parts(
        self, phase: str, input_ids: Tensor, mask: Tensor | None, past: int, valid: BoolArray | None
    ) -> Pass:
        """Return the pass that begins, with the tokens of each row that is served by itself."""
        rows, length = input_ids.shape
        counts, owners = [length] * rows, self.rows
        if valid is not None:
            counts = valid.reshape(rows, length).sum(-1).tolist()
        if owners is None:
            owners = [Row(self.engine)]
        if len(owners) < rows:
            # Beams of one request, or rows that are served together.
            counts = [sum(counts)]
        positions = None
        if self.engine.wants_positions or (self.recorder is not None and self.rows is not None):
            positions = positions_of(input_ids, mask, past).ravel()
            positions = positions if valid is None else positions[valid]
        told = [
            (place, row, count)
            for place, (row, count) in enumerate(zip(owners, counts, strict=True))
            if row is not None and count
        ]
        places, served, counts = [[*each] for each in zip(*told, strict=True)] if told else [[]] * 3
        return Pass(phase, len(owners), valid, served, places, counts, positions)

    def _shape_of(self, embeddings: Tensor | None) -> Tensor:
        """Return a tensor [rows, tokens] in place of the tokens that embeddings stand for."""
        if embeddings is None:
            raise ValueError("a pass without input_ids or inputs_embeds. Allowed: one of them.")
        reads_text = self.pass_predictor is not None or self.reads_first is not None
        if self._gates_by_token or reads_text:
            who = "this model's router" if self._gates_by_token else "this policy's prefetcher"
            raise ValueError(
                f"inputs_embeds: {who} reads the tokens themselves. Allowed with it: input_ids."
            )
        return embeddings[..., 0]

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

    def _router_hook(self, layer: int) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(router: nn.Module, args: Any, output: Any) -> Any:
            if self._pass is None:
                return None
            return self._pass.router(layer, args[0], output)

        return hook

    def _end_pass(self, model: nn.Module, args: Any, output: Any) -> None:
        # What calls a part of the model by itself is no pass.
        ended, self._pass = self._pass, None
        if ended is not None:
            ended.end()


class _Kind:
    """A kind of pass: what is done as it begins, with what each router returns, and at its end."""

    def __init__(
        self, wrapped: WrappedModel, begun: Pass, predicted: Mapping[int, FloatArray]
    ) -> None:
        """`predicted` are the logits of all its layers, where a prefetcher predicts passes."""
        self._wrapped, self._begun = wrapped, begun
        engine, recorder = wrapped.engine, wrapped.recorder
        self._predicted = predicted
        self._places: dict[torch.device, Tensor] = {}
        is_lossy = engine.rules.is_lossy
        # A lossy policy's loss is measured by weight, whatever its rules look at.
        self._wants_weights = engine.wants_weights or is_lossy or recorder is not None
        self._wants_logits = engine.wants_logits or (recorder is not None and recorder.wants_logits)
        # An unsorted choice is sorted by its weights.
        self._is_sorted = [layer.gate.sorts for layer in wrapped.layers]
        self._reads_weights = self._wants_weights or not all(self._is_sorted)
        self._reach = 0 if recorder is None else recorder.reach
        if recorder is not None and wrapped.rows is not None:
            for row, own in zip(begun.owners, begun.positions_by_row() or (), strict=True):
                row.noted.append(NotedPass(begun.phase, own, []))
        self.begin()

    def begin(self) -> None:
        raise NotImplementedError

    def router(self, layer: int, hidden: Tensor, output: Any) -> Any:
        """Take a router's output; return another in its place, or None."""
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    def _read(self, layer: int, hidden: Tensor, output: Any) -> RouterCall:
        """Return what is needed of a call, with later layers predicted from the call's input."""
        wrapped, layers, by_gate, predicted = self._wrapped, self._wrapped.layers, {}, {}
        own = wrapped.engine.depth if wrapped.predictor is None else 0
        if self._reach or own:
            ahead = range(layer + 1, min(layer + max(self._reach, own), len(layers) - 1) + 1)
            by_gate = {target: layers[target].gate.predict(hidden) for target in ahead}
            predicted = {target: by_gate[target] for target in ahead[:own]}
        if wrapped.predictor is not None:
            target = target_of(layer, len(layers), self._begun.phase)
            predicted = {} if target is None else {target: wrapped.predictor(layer, hidden)}
        noted = by_gate if self._reach else {}
        if not (self._reads_weights or self._wants_logits):
            return RouterCall(layer, output[2], None, None, predicted, noted)
        choice = layers[layer].gate.read(output)
        logits = choice.logits if self._wants_logits else None
        weights = choice.weights if self._reads_weights else None
        return RouterCall(layer, choice.experts, weights, logits, predicted, noted)

    def _on_host(self, calls: Sequence[RouterCall]) -> Batch:
        """Bring calls to the host in one transfer, restricted to the tokens somebody waits for.

        Returns them as a pass that begins with the first one's layer.
        """
        begun = self._begun
        tensors = [self._whole([call.experts] for call in calls)]
        if self._reads_weights:
            weights = self._whole([call.weights] for call in calls)
            tensors.append(as_dtype(weights, torch.float32))
        if self._wants_logits:
            # Without a weighting rule, algorithms see the rounded logits that a trace keeps.
            is_weighed = self._wrapped.weighting[calls[0].layer] is not None
            logits = self._whole([call.logits] for call in calls)
            tensors.append(as_dtype(logits, torch.float32) if is_weighed else rounded(logits))
        ahead = any(call.predicted for call in calls)
        if ahead:
            tensors.append(rounded(self._whole(call.predicted.values() for call in calls)))
        found = iter(copy_to_host(tensors))
        experts = next(found).astype(np.int64)
        seen: Any = next(found).astype(np.float32) if self._reads_weights else UNSEEN_SCORES
        sizes = self._sizes(calls)
        if not all(self._is_sorted):
            is_sorted = np.repeat([self._is_sorted[call.layer] for call in calls], sizes)
            experts, seen = _in_order(experts, seen, is_sorted[:, None])
        positions = None
        if self._wrapped.engine.wants_positions:
            positions = begun.positions_by_row()
        return Batch(
            phase=begun.phase,
            num_layers=len(calls),
            experts=experts,
            bounds=self._bounds(sizes),
            weights=seen if self._wants_weights else UNSEEN_SCORES,
            logits=next(found) if self._wants_logits else UNSEEN_SCORES,
            targets=[[*call.predicted] for call in calls] if ahead else (),
            predicted=next(found) if ahead else UNSEEN_SCORES,
            positions=positions,
            num_rows=len(begun.counts),
            first_layer=calls[0].layer,
        )

    def _whole(self, values: Iterable[Iterable[Any]]) -> Tensor:
        """Return the tensors of some calls, [T, n] each, as one on the first one's device.

        Of several a call, each token's come in turn.
        """
        flat = []
        for of_call in values:
            each = [rows_of(tensor) for tensor in of_call]
            if each:
                joined_tensor = each[0]
                if len(each) > 1:
                    joined_tensor = torch.stack(each, dim=1)
                if self._begun.valid is not None:
                    joined_tensor = joined_tensor[self._waited(joined_tensor.device)]
                flat.append(rows_of(joined_tensor))
        device = flat[0].device
        if any([tensor.device != device for tensor in flat]):
            flat = [tensor.to(device) for tensor in flat]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def _waited(self, device: torch.device) -> Tensor:
        """Return the places of the tokens that somebody waits for, on a device."""
        assert self._begun.valid is not None, "all tokens are waited for"
        if device not in self._places:
            self._places[device] = copy_to_device(self._begun.valid.nonzero()[0], device)
        return self._places[device]

    def _sizes(self, calls: Sequence[RouterCall]) -> list[int]:
        """Return of how many tokens each call is: some models run the last layer for a prompt's
        last one only."""
        if self._begun.valid is not None:
            return [self._begun.num_tokens] * len(calls)
        return [rows_of(call.experts).shape[0] for call in calls]

    def _bounds(self, sizes: Sequence[int]) -> IntArray | None:
        """Return the bounds of the events of layers with so many tokens; None: a token each."""
        counts = self._begun.counts
        by_event = [count for size in sizes for count in (counts if len(counts) > 1 else [size])]
        return None if max(by_event) == 1 else np.cumsum([0, *by_event])

    def _note(self, batch: Batch, call: RouterCall, hidden: Tensor | None = None) -> None:
        """Record a layer before any policy changes it, or keep it for when its row is served."""
        wrapped, begun, layer = self._wrapped, self._begun, batch.first_layer
        if wrapped.recorder is None:
            return
        noted = {target: self._seen(rounded(values)) for target, values in call.noted.items()}
        num_experts, predicted = wrapped.engine.geometry.num_experts, batch.predicted_at()
        logits: Any = batch.logits.astype(np.float16) if len(batch.logits) else None
        if wrapped.rows is None:
            number, seen = [wrapped.engine.num_passes], (batch.experts, batch.weights)
            event = Event(layer, begun.phase, number, num_experts, *seen, predicted=predicted)
            wrapped.recorder.add(event, logits, noted.__getitem__, hidden, self._seen)
            return
        for row, own in zip(begun.owners, begun.parts, strict=True):
            given = batch.experts[own], batch.weights[own], batch.logits[own]
            ahead = {target: values[own] for target, values in predicted.items()}
            event = Event(layer, begun.phase, [-1], num_experts, *given, predicted=ahead)
            half: Any = {target: values[own].astype(np.float16) for target, values in noted.items()}
            row.noted[-1].events.append((event, None if logits is None else logits[own], half))

    def _seen(self, values: Tensor) -> Any:
        """Return values of all tokens as an array of those that somebody waits for."""
        return copy_to_host([self._whole([[values]])])[0]


class _Deferred(_Kind):
    """A pass whose decisions do not affect the computation: they are taken at its end."""

    def begin(self) -> None:
        self._calls: list[RouterCall] = []

    def router(self, layer: int, hidden: Tensor, output: Any) -> Any:
        self._calls.append(self._read(layer, hidden, output))

    def end(self) -> None:
        if not self._calls:
            return
        batch = self._on_host(self._calls)
        if self._wrapped.recorder is not None:
            for call in self._calls:
                self._note(self._on_host([call]), call)
        if self._wrapped.rows is None:
            self._wrapped.engine.serve(batch, predicted=self._predicted)
            return
        for place, row in enumerate(self._begun.owners):
            row.kept.append((batch, place))


class _Layered(_Kind):
    """A pass that is served layer by layer, as rules may change what the model computes."""

    def begin(self) -> None:
        wrapped, begun = self._wrapped, self._begun
        self._engines = [row.engine for row in begun.owners]
        self._rows = self._engines[0].alone
        positions = begun.positions_by_row() if wrapped.engine.wants_positions else None
        if len(self._engines) == 1:
            own = None if positions is None else positions[0]
            self._engines[0].begin_pass(begun.phase, begun.counts[0], self._predicted, own)
            return
        self._rows = wrapped.rows_of(self._engines)
        seconds = None
        if positions is not None:
            seconds = [wrapped.engine.attention_s(begun.phase, own) for own in positions]
        self._rows.begin(begun.phase, begun.counts, seconds)

    def router(self, layer: int, hidden: Tensor, output: Any) -> Any:
        wrapped, rule = self._wrapped, self._wrapped.weighting[layer]
        call = self._read(layer, hidden, output)
        batch = self._on_host([call])
        self._note(batch, call, hidden)
        weigh = {} if rule is None else {"weigh": rule.in_numpy}
        selection = self._choose(batch, weigh)
        if wrapped.store.levels is not None and wrapped.engine.rules.ladder:
            wrapped.store.levels[layer] = self._levels()
        if selection is None:
            return None
        assert rule is not None, "a lossless policy changed a selection"
        choice = wrapped.layers[layer].gate.read(output)
        return changed_output(output, choice, selection, rule, self._begun.valid, batch.experts)

    def _choose(self, batch: Batch, weigh: Mapping[str, Any]) -> Selection | None:
        selection: Selection | None = self._rows.choose(batch, **weigh)
        return selection

    def _levels(self) -> IntArray | None:
        """Return at which level each row of the batch executes each expert [B, E], -1 for none."""
        rows, levels = self._rows, self._rows.levels
        assert levels is not None, "a ladder without levels"
        shape = self._begun.num_rows, self._wrapped.engine.geometry.num_experts
        executed: IntArray = np.full(shape, -1)
        places = np.repeat(self._begun.places, self._begun.counts)[: len(levels), None]
        live = rows.executed >= 0
        executed[np.broadcast_to(places, live.shape)[live], rows.executed[live]] = levels[live]
        return executed

    def end(self) -> None:
        if len(self._engines) == 1:
            self._engines[0].end_pass()
        else:
            self._rows.finish(self._begun.counts)


class _Scanned(_Layered):
    """A text whose tokens are routed one after another, each a pass of its own."""

    def begin(self) -> None:
        self._rows = self._wrapped.engine.alone
        self._wrapped.engine.begin_scan(self._begun.num_tokens)

    def _choose(self, batch: Batch, weigh: Mapping[str, Any]) -> Selection | None:
        selection: Selection | None = self._wrapped.engine.scan(batch, **weigh)
        return selection

    def _levels(self) -> IntArray | None:
        # Its tokens' lossless misses load the best level.
        return None

    def end(self) -> None:
        self._wrapped.engine.end_scan()


def rounded(logits: Tensor) -> Tensor:
    """Round to float16, the precision of a routing trace, so that a replay sees equal logits."""
    return logits.to(torch.float16).float()


def _in_order(experts: Any, weights: Any, is_sorted: Any) -> tuple[Any, Any]:
    """Sort each token's experts [T, K] heaviest first, where a router has not done so."""
    order = np.argsort(-weights, axis=-1, kind="stable")
    order = np.where(is_sorted, np.arange(weights.shape[-1]), order)
    return np.take_along_axis(experts, order, -1), np.take_along_axis(weights, order, -1)
