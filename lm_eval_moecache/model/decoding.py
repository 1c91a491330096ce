"""Decodes prompts side by side; where rows have ended, the next prompts take their places.

A batch is what transformers' `generate` carries from step to step: keywords of the next call, with
tensors (mask, positions) [.., rows, tokens], and among them the cache of the model's layers. The
cache holds all tokens but the newest, which the mask already counts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, GenerationConfig

MASK = "attention_mask"
_READ_TOGETHER = 8
"""Prompts are read where this part of a batch has ended, not one by one."""
_JOINED = {
    *("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer"),
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}
"""Classes of transformers' cache layers that hold nothing but keys, values and states."""
_KEYS, _STATES = ("keys", "values"), ("conv_states", "recurrent_states")


class Batch(NamedTuple):
    """The rows decoded side by side, between two passes."""

    rows: list[int]
    """Which prompts they continue."""
    newest: Tensor
    """The last token of each row [rows, 1], not computed yet."""
    kwargs: dict[str, Any]


class RowDecoding:
    """The decoding loop of `generate(custom_generate=...)`, in which ended rows make place.

    Up to `most` of the prompts are computed together. Where rows have ended the next prompts are
    read, in a pass of their own, and take their places. Each row's tokens are greedy ones, or drawn
    from a generator of its own. It ends with an end token, after as many tokens as transformers'
    own loop generates, or where `has_stopped` says so.

    Options that look at a row's earlier tokens or its length are not for this loop: padding would
    count, and logits processors are given the newest token alone.

    Args:
        most: Prompts computed together.
        has_stopped: Takes the tokens generated so far by each row still decoded.
        generators: Source of randomness by prompt.
        on_rows: Called before passes with the rows that they compute, and how many tokens of a
            prompt they read, padding included; 0 while decoding.
        on_end: Called once for each row that has ended.
    """

    def __init__(
        self,
        most: int,
        has_stopped: Callable[[Sequence[Sequence[int]]], Sequence[bool]],
        generators: Sequence[torch.Generator],
        on_rows: Callable[[Sequence[int], int], object],
        on_end: Callable[[], object],
    ) -> None:
        self._most, self._has_stopped, self._generators = most, has_stopped, generators
        self._on_rows, self._on_end = on_rows, on_end
        self.generated: list[list[int]] = []
        """By row, the tokens after the prompt."""

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        self._model, self._config, self._process = model, generation_config, logits_processor
        # Rows that begin at different times reach a maximum length at different times.
        self._most_new = generation_config.max_length - input_ids.shape[1]
        ends = generation_config.eos_token_id
        self._ends = {*ends} if isinstance(ends, list) else {ends}
        self.generated = [[] for _ in input_ids]
        total, begun = len(input_ids), 0
        if not any(type(value) is DynamicCache for value in kwargs.values()):
            # No row could leave a batch: a model's own kind of cache need not give up any.
            self._most = 1
        if total > self._most and kwargs.get(MASK) is None:
            # `generate` leaves out a mask that hides nothing.
            kwargs[MASK] = torch.ones_like(input_ids)
        batch: Batch | None = None
        while batch is not None or begun < total:
            free = min(self._free(batch), total - begun)
            if batch is not None and not free:
                batch = self._decode(batch)
                continue
            prompts = slice(begun, begun + free)
            begun += free
            read = self._read(prompts, input_ids, kwargs)
            batch = _join(batch, read) if batch is not None and read is not None else batch or read
        return input_ids

    def _free(self, batch: Batch | None) -> int:
        """Return how many prompts to read next: a few at a time, as each reading costs a pass."""
        if batch is None:
            return self._most
        free = self._most - len(batch.rows)
        is_due = free >= max(1, self._most // _READ_TOGETHER)
        return free if is_due and can_join(batch.kwargs) else 0

    def _read(self, prompts: slice, input_ids: Tensor, kwargs: dict[str, Any]) -> Batch | None:
        """Read prompts and choose their first tokens; None if these have ended all."""
        rows = [*range(prompts.start, prompts.stop)]
        if len(rows) < len(input_ids):
            kwargs = _take(kwargs, prompts)
            input_ids = input_ids[prompts, -kwargs[MASK].shape[1] :]
        self._on_rows(rows, input_ids.shape[1])
        outputs = self._model._prefill(input_ids, self._config, kwargs)
        return self._advance(Batch(rows, input_ids, kwargs), outputs)

    def _decode(self, batch: Batch) -> Batch | None:
        """Compute the newest token of each row and choose the next; None if all have ended."""
        self._on_rows(batch.rows, 0)
        inputs = self._model.prepare_inputs_for_generation(
            batch.newest, next_sequence_length=1, **batch.kwargs
        )
        return self._advance(batch, self._model(**inputs, return_dict=True))

    def _advance(self, batch: Batch, outputs: Any) -> Batch | None:
        """Choose each row's next token; let those leave that end with it."""
        rows, input_ids, kwargs = batch
        kwargs = self._model._update_model_kwargs_for_generation(outputs, kwargs)
        logits = outputs.logits[:, -1].to(input_ids.device, torch.float32, copy=True)
        chosen = self._choose(self._process(input_ids, logits), rows)
        live: list[int] = []
        for place, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
            self.generated[row].append(token)
            if token not in self._ends and len(self.generated[row]) < self._most_new:
                live.append(place)
        stopped = self._has_stopped([self.generated[rows[place]] for place in live]) if live else []
        live = [place for place, stop in zip(live, stopped, strict=True) if not stop]
        for _ in range(len(rows) - len(live)):
            self._on_end()
        if not live:
            return None
        if len(live) < len(rows):
            rows, chosen = [rows[place] for place in live], chosen[live]
            _keep(kwargs, live)
        return Batch(rows, chosen[:, None], kwargs)

    def _choose(self, scores: Tensor, rows: Sequence[int]) -> Tensor:
        if not self._config.do_sample:
            return scores.argmax(dim=-1)
        shares = nn.functional.softmax(scores, dim=-1)
        own = zip(shares, rows, strict=True)
        return torch.cat(
            [torch.multinomial(each, 1, generator=self._generators[row]) for each, row in own]
        )


# --- what rows carry from step to step ---


def _take(kwargs: dict[str, Any], rows: slice) -> dict[str, Any]:
    """Return what some rows carry before the first pass, without padding that all of them have.

    Caches are empty then: each set of rows gets one of its own.
    """
    taken, length = dict(kwargs), int(kwargs[MASK][rows].sum(-1).max())
    for name, value in kwargs.items():
        if isinstance(value, Cache):
            taken[name] = copy.deepcopy(value)
        elif _is_by_token(value):
            taken[name] = value[..., rows, -length:]
    return taken


def _keep(kwargs: dict[str, Any], rows: Sequence[int]) -> None:
    """Keep only these rows."""
    index = torch.tensor(rows)
    for name, value in kwargs.items():
        if isinstance(value, Cache):
            value.reorder_cache(index)
        elif _is_by_token(value):
            kwargs[name] = value.index_select(-2, index.to(value.device))


def can_join(kwargs: dict[str, Any]) -> bool:
    """Whether rows of other prompts may come to stand beside these."""
    layers = [
        layer for value in kwargs.values() if isinstance(value, Cache) for layer in value.layers
    ]
    return all(type(layer).__name__ in _JOINED for layer in layers)


def _join(first: Batch, second: Batch) -> Batch:
    """Return one batch of the rows of both, which must allow it (`can_join`) and are used up.

    Rows are padded on the left to the longest; padding that all have is cut off.
    """
    own = [int(part.kwargs[MASK].sum(-1).max()) for part in (first, second)]
    length, joined = max(own), dict(first.kwargs)
    for name, value in first.kwargs.items():
        other = second.kwargs[name]
        if isinstance(value, Cache):
            for layer, more in zip(value.layers, other.layers, strict=True):
                _set_length(layer, own[0] - 1, length - 1)
                _set_length(more, own[1] - 1, length - 1)
                for (holder, key), (others, _) in zip(_held(layer), _held(more), strict=True):
                    holder[key] = torch.cat([holder[key], others[key]])
        elif _is_by_token(value):
            parts = [value[..., -own[0] :], other[..., -own[1] :]]
            padded = [pad(part, (length - part.shape[-1], 0)) for part in parts]
            joined[name] = torch.cat(padded, dim=-2)
    newest = torch.cat([first.newest, second.newest])
    return Batch([*first.rows, *second.rows], newest, joined)


def _is_by_token(value: Any) -> bool:
    """Whether a keyword has a value for each token: [.., rows, tokens]."""
    return isinstance(value, Tensor) and value.ndim > 1


def _held(layer: Any) -> Iterator[tuple[dict[Any, Any], Any]]:
    """Yield where a layer holds each tensor [rows, ..]: in which dictionary, under which key."""
    attributes = vars(layer)
    for holder, keys in (
        (attributes, _KEYS),
        *((attributes[name], attributes[name]) for name in _STATES if name in attributes),
    ):
        for key in keys:
            if holder.get(key) is not None:
                yield holder, key


def _set_length(layer: Any, own: int, length: int) -> None:
    """Cut a layer's keys and values to the last `own` tokens, then pad them to `length`."""
    if getattr(layer, "keys", None) is None:
        return
    window = getattr(layer, "sliding_window", None)
    if window is not None:
        # Such a layer keeps the last ones only, and counts all.
        layer.cumulative_length = length
        own, length = min(own, window - 1), min(length, window - 1)
    for name in _KEYS:
        kept = getattr(layer, name)
        first = kept.shape[-2] - own
        setattr(layer, name, pad(kept[..., first:, :], (0, 0, length - own, 0)))
