"""Decodes several prompts side by side; a row leaves the batch as soon as it has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

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


class RowDecoding:
    """The decoding loop of `generate(custom_generate=...)`, in which ended rows cost nothing.

    A row's tokens are those that transformers' own loop gives it alone: greedy ones, or drawn from
    a generator of its own. It ends as there: with an end token, at the maximum length, or where
    `has_stopped` says so.

    Args:
        has_stopped: Takes the tokens generated so far by each row still decoded.
        generators: Source of randomness by row; empty where nothing is drawn.
        on_rows: Called with the rows that the next passes compute, None for one that has ended but
            cannot leave, as the model's cache gives up no row.
        on_end: Called once for each row that has ended.
    """

    def __init__(
        self,
        has_stopped: Callable[[Sequence[Sequence[int]]], Sequence[bool]],
        generators: Sequence[torch.Generator],
        on_rows: Callable[[list[int | None]], object],
        on_end: Callable[[], object],
    ) -> None:
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
        self.generated = [[] for _ in input_ids]
        rows: list[int | None] = [*range(len(input_ids))]
        self._on_rows(rows)
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        while True:
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
            logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
            del outputs
            scores = logits_processor(input_ids, logits.to(input_ids.device))
            chosen = self._choose(scores, rows, bool(generation_config.do_sample))
            input_ids = torch.cat([input_ids, chosen[:, None]], dim=-1)
            for row, token in zip(rows, chosen.tolist(), strict=True):
                if row is not None:
                    self.generated[row].append(token)
            ended = stopping_criteria(input_ids, None).tolist()
            live = [place for place, row in enumerate(rows) if row is not None and not ended[place]]
            texts = [self.generated[rows[place]] for place in live]  # type: ignore[index]
            stopped = self._has_stopped(texts) if live else []
            live = [place for place, stop in zip(live, stopped, strict=True) if not stop]
            for _ in range(sum(row is not None for row in rows) - len(live)):
                self._on_end()
            if not live:
                return input_ids
            if len(live) < len(rows):
                if self._drop(model_kwargs, live, len(rows), input_ids.device):
                    rows = [rows[place] for place in live]
                    input_ids = input_ids[live]
                else:
                    rows = [row if place in live else None for place, row in enumerate(rows)]
                self._on_rows(rows)
            self.computed += len(rows)
            self.useful += len(live)
            inputs = model.prepare_inputs_for_generation(
                input_ids, next_sequence_length=1, **model_kwargs
            )
            outputs = model(**inputs, return_dict=True)

    def _choose(self, scores: Tensor, rows: Sequence[int | None], draws: bool) -> Tensor:
        if not draws:
            return scores.argmax(dim=-1)
        shares = nn.functional.softmax(scores, dim=-1)
        chosen = [
            torch.multinomial(share, 1, generator=None if row is None else self._generators[row])
            for share, row in zip(shares, rows, strict=True)
        ]
        return torch.cat(chosen)

    def _drop(
        self, model_kwargs: dict[str, Any], live: Sequence[int], size: int, device: torch.device
    ) -> bool:
        """Leave only the rows at these places in what a model carries on; False if it cannot."""
        caches = [value for value in model_kwargs.values() if hasattr(value, "get_seq_length")]
        if not all(hasattr(cache, "reorder_cache") for cache in caches):
            return False
        index = torch.tensor(live, device=device)
        try:
            for cache in caches:
                cache.reorder_cache(index)
        except (NotImplementedError, AttributeError):
            return False
        for name, value in model_kwargs.items():
            if isinstance(value, Tensor) and value.ndim:
                # Positions of several kinds come as [kinds, rows, tokens].
                axis = 0 if value.shape[0] == size else 1
                if value.ndim > axis and value.shape[axis] == size:
                    model_kwargs[name] = value.index_select(axis, index.to(value.device))
        return True


_PROBED = 24
"""Tokens of the prompt that `pads_exactly` tries, of which a second one has a third."""


@torch.no_grad()
def pads_exactly(model: Any) -> bool:
    """Whether a left-padded prompt gets the logits that it gets alone, but for rounding.

    Some state-space and convolution layers carry padding into a row's state.
    """
    config, device = model.config.get_text_config(), model.device
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, config.vocab_size, (2, _PROBED), generator=source).to(device)
    mask = torch.ones_like(tokens)
    mask[1, : 2 * _PROBED // 3] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    padded = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    alone = model(tokens[1:, 2 * _PROBED // 3 :], use_cache=False).logits
    padded, alone = padded[1, -1].float(), alone[0, -1].float()
    return bool((padded - alone).abs().max() <= 0.02 * alone.std())
