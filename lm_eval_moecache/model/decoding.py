"""Decodes prompts side by side; where a row has ended, the next prompt takes its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList

from lm_eval_moecache.model.carried import (
    MASK,
    Carried,
    can_join,
    join_rows,
    keep_rows,
    take_prompts,
)
from lm_eval_moecache.model.device import device_of

_READ_TOGETHER = 8
"""Prompts are read where this part of a batch has ended, not one by one."""

_READS_PADDING = (
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    *("sequence_bias", "exponential_decay_length_penalty", "guidance_scale", "token_healing"),
    *("watermarking_config", "penalty_alpha", "dola_layers", "constraints", "force_words_ids"),
)
"""Generation options that look at a row's tokens or length, where padding would count."""


def reads_padding(model: Any, options: dict[str, Any]) -> bool:
    """Whether these generation options, or the model's own, would see a row's padding."""
    plain = GenerationConfig()
    for name in _READS_PADDING:
        value = options.get(name, getattr(model.generation_config, name, None))
        # None and the neutral value both switch an option off.
        if value not in (None, getattr(plain, name, None), 0, 1, 1.0):
            return True
    return any((options.get(name) or 1) > 1 for name in ("num_beams", "num_return_sequences"))


class Batch(NamedTuple):
    """The rows decoded side by side, between two passes."""

    rows: list[int | None]
    """Which prompts they continue; None for one that has ended but cannot leave."""
    input_ids: Tensor
    """All tokens [rows, tokens]; the newest is not computed yet."""
    carried: Carried


class RowDecoding:
    """The decoding loop of `generate(custom_generate=...)`, in which ended rows make place.

    Up to `most` of the prompts are computed together. Where rows have ended the next prompts are
    read, in a pass of their own, and take their places. A row's tokens are those that transformers'
    own loop gives it alone: greedy ones, or drawn from a generator of its own. It ends as there:
    with an end token, after `most_new` tokens, or where `has_stopped` says so.

    Args:
        most: Prompts computed together.
        most_new: Tokens after which a row ends.
        joins: Whether rows of different lengths may stand side by side.
        has_stopped: Takes the tokens generated so far by each row still decoded.
        generators: Source of randomness by prompt; empty where nothing is drawn.
        on_rows: Called before passes with the rows that they compute, and how many tokens of a
            prompt they read, padding included; 0 while decoding.
        on_end: Called once for each row that has ended.
    """

    def __init__(
        self,
        most: int,
        most_new: int,
        joins: bool,
        has_stopped: Callable[[Sequence[Sequence[int]]], Sequence[bool]],
        generators: Sequence[torch.Generator],
        on_rows: Callable[[list[int | None], int], object],
        on_end: Callable[[], object],
    ) -> None:
        self._most, self._most_new, self._joins = most, most_new, joins
        self._has_stopped, self._generators = has_stopped, generators
        self._on_rows, self._on_end = on_rows, on_end
        self.generated: list[list[int]] = []
        """By row, the tokens after the prompt."""
        self.computed, self.useful = 0, 0
        """Rows of all decode steps, and those of them that a request was waiting for."""

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor:
        self._model, self._config, self._process = model, generation_config, logits_processor
        # Rows that begin at different times reach a maximum length at different times.
        ends = [rule for rule in stopping_criteria if not isinstance(rule, MaxLengthCriteria)]
        self._criteria = StoppingCriteriaList(ends)
        self.generated = [[] for _ in input_ids]
        if len(input_ids) > self._most and model_kwargs.get(MASK) is None:
            # `generate` leaves out a mask that hides nothing.
            model_kwargs[MASK] = torch.ones_like(input_ids)
        begun, batch = 0, None
        while batch is not None or begun < len(input_ids):
            free = self._free(batch) if begun < len(input_ids) else 0
            if batch is not None and not free:
                batch = self._decode(batch)
                continue
            prompts = slice(begun, min(begun + free, len(input_ids)))
            begun = prompts.stop
            read = self._read(prompts, input_ids, model_kwargs)
            if batch is None or read is None:
                batch = read if batch is None else batch
            else:
                batch = self._join(batch, read)
        return input_ids

    def _free(self, batch: Batch | None) -> int:
        """Return how many prompts to read next: a few at a time, as each reading costs a pass."""
        if batch is None:
            return self._most
        free = self._most - len(batch.rows)
        if free < max(1, self._most // _READ_TOGETHER) or not self._joins:
            return 0
        return free if can_join(batch.carried) else 0

    def _read(self, prompts: slice, input_ids: Tensor, carried: Carried) -> Batch | None:
        """Read prompts and choose their first tokens; None if these have ended all."""
        rows: list[int | None] = [*range(prompts.start, prompts.stop)]
        if len(rows) < len(input_ids):
            carried = take_prompts(carried, prompts)
            input_ids = input_ids[prompts, -carried[MASK].shape[1] :]
        self._on_rows(rows, input_ids.shape[1])
        outputs = self._model._prefill(input_ids, self._config, carried)
        return self._advance(Batch(rows, input_ids, carried), outputs)

    def _join(self, batch: Batch, read: Batch) -> Batch:
        """Let prompts just read stand beside the rows decoded already."""
        carried = join_rows(batch.carried, read.carried)
        length = carried[MASK].shape[1]
        ids = [part.input_ids[:, -length:] for part in (batch, read)]
        padded = [nn.functional.pad(own, (length - own.shape[1], 0)) for own in ids]
        return Batch([*batch.rows, *read.rows], torch.cat(padded), carried)

    def _decode(self, batch: Batch) -> Batch | None:
        """Compute the newest token of each row and choose the next; None if all have ended."""
        self._on_rows(batch.rows, 0)
        self.computed += len(batch.rows)
        self.useful += sum(row is not None for row in batch.rows)
        inputs = self._model.prepare_inputs_for_generation(
            batch.input_ids, next_sequence_length=1, **batch.carried
        )
        return self._advance(batch, self._model(**inputs, return_dict=True))

    def _advance(self, batch: Batch, outputs: Any) -> Batch | None:
        """Choose each row's next token; let those leave that end with it."""
        rows, input_ids, carried = batch
        carried = self._model._update_model_kwargs_for_generation(outputs, carried)
        logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        scores = self._process(input_ids, logits.to(input_ids.device))
        chosen = self._choose(scores, rows, bool(self._config.do_sample))
        input_ids = torch.cat([input_ids, chosen[:, None]], dim=-1)
        ended: list[bool] = self._criteria(input_ids, None).tolist()
        live: list[int] = []
        for place, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
            if row is not None:
                self.generated[row].append(token)
                if not ended[place] and len(self.generated[row]) < self._most_new:
                    live.append(place)
        texts = [self.generated[rows[place]] for place in live]  # type: ignore[index]
        stopped = self._has_stopped(texts) if live else []
        live = [place for place, stop in zip(live, stopped, strict=True) if not stop]
        for _ in range(sum(row is not None for row in rows) - len(live)):
            self._on_end()
        if not live:
            return None
        if len(live) == len(rows):
            return Batch(rows, input_ids, carried)
        if keep_rows(carried, live, len(rows)):
            return Batch([rows[place] for place in live], input_ids[live], carried)
        kept = [row if place in live else None for place, row in enumerate(rows)]
        return Batch(kept, input_ids, carried)

    def _choose(self, scores: Tensor, rows: Sequence[int | None], draws: bool) -> Tensor:
        if not draws:
            return scores.argmax(dim=-1)
        shares = nn.functional.softmax(scores, dim=-1)
        chosen = [
            torch.multinomial(share, 1, generator=None if row is None else self._generators[row])
            for share, row in zip(shares, rows, strict=True)
        ]
        return torch.cat(chosen)


_PROBED = 24
"""Tokens of the prompt that `pads_exactly` tries, of which a second one has a third."""


@torch.no_grad()
def pads_exactly(model: Any) -> bool:
    """Whether a left-padded prompt gets the logits that it gets alone, but for rounding.

    Some state-space and convolution layers carry padding into a row's state.
    """
    config, device = model.config.get_text_config(), device_of(model)
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, config.vocab_size, (2, _PROBED), generator=source).to(device)
    mask = torch.ones_like(tokens)
    mask[1, : 2 * _PROBED // 3] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    padded = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    alone = model(tokens[1:, 2 * _PROBED // 3 :], use_cache=False).logits
    padded, alone = padded[1, -1].float(), alone[0, -1].float()
    return bool((padded - alone).abs().max() <= 0.02 * alone.std())
