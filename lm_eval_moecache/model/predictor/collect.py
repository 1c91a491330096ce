"""Records what routers see while a model generates: the data that predictors are trained on.

Shapes: B prompts of a batch, S steps, L layers, D hidden size, E experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.predictor.samples import Halves, write_shard
from lm_eval_moecache.records.arrays import IntArray

MAX_PROMPT_TOKENS = 2048


class RouterCapture:
    """Keeps each router's input and logits of the decode steps, while it is entered.

    `prompts` says for each step which prompt it belongs to, counting prefills: that of a batch of
    one. Batches are told apart by whoever asked for them.
    """

    def __init__(self, model: Any, layers: Sequence[MoELayer]) -> None:
        self._model, self._layers = model, layers
        self._handles: list[Any] = []
        self._decoding = False
        self._prompt = -1
        self.prompts: list[int] = []
        self.hidden: list[list[Tensor]] = [[] for _ in layers]
        self.logits: list[list[Tensor]] = [[] for _ in layers]

    def __enter__(self) -> RouterCapture:
        def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            past = kwargs.get("past_key_values")
            self._decoding = past is not None and past.get_seq_length() > 0
            if self._decoding:
                self.prompts.append(self._prompt)
            else:
                self._prompt += 1

        def keep(layer: int) -> Any:
            def hook(router: Any, args: Any, output: Any) -> None:
                if self._decoding:
                    self.hidden[layer].append(_half(args[0]))
                    self.logits[layer].append(_half(output[0]))

            return hook

        self._handles = [self._model.register_forward_pre_hook(begin, with_kwargs=True)]
        for index, layer in enumerate(self._layers):
            self._handles.append(layer.router.register_forward_hook(keep(index)))
        return self

    def write(self, path: Path) -> None:
        """Write what batches of one prompt gave as one shard."""
        hidden, logits = (
            np.stack([torch.cat(layer).numpy() for layer in kept])
            for kept in (self.hidden, self.logits)
        )
        write_shard(path, hidden, logits, np.asarray(self.prompts, dtype=np.int64))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def record(
    model: Any,
    tokenizer: Any,
    layers: Sequence[MoELayer],
    prompts: Sequence[str],
    folder: Path,
    *,
    num_tokens: int,
    batch_size: int,
) -> list[Path]:
    """Write one shard for each batch of prompts; those that are there already are kept.

    The model generates greedily; recorded are the passes over the first `num_tokens` tokens that
    it generates, up to its end token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    starts = range(0, len(prompts), batch_size)
    for start in tqdm(starts, desc="recording", unit="batch"):
        path = folder / f"{start:08d}.safetensors"
        shards.append(path)
        if path.is_file():
            continue
        batch = prompts[start : start + batch_size]
        hidden, logits, rows = _record_batch(model, tokenizer, layers, batch, num_tokens)
        write_shard(path, hidden, logits, rows + start)
    return shards


def digest_prompts(prompts: Sequence[str]) -> str:
    """Identify a list of prompts."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{len(prompt)} {prompt}".encode())
    return digest.hexdigest()


@torch.no_grad()
def _record_batch(
    model: Any, tokenizer: Any, layers: Sequence[MoELayer], prompts: Sequence[str], num_tokens: int
) -> tuple[Halves, Halves, IntArray]:
    # The end of a prompt is what it asks.
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    encoded = tokenizer(
        list(prompts),
        return_tensors="pt",
        padding=True,
        truncation=True,
        max_length=MAX_PROMPT_TOKENS,
        return_token_type_ids=False,
    ).to(model.device)
    with RouterCapture(model, layers) as seen:
        # The last generated token is never read, so one more than is recorded.
        output = model.generate(
            **encoded,
            max_new_tokens=num_tokens + 1,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    generated_BS = output[:, encoded.input_ids.shape[1] :][:, :-1].cpu().numpy()
    ends = model.generation_config.eos_token_id
    ended = np.isin(generated_BS, ends if isinstance(ends, list) else [ends])
    alive_BS = ~np.maximum.accumulate(ended, axis=1)
    rows = np.nonzero(alive_BS)[0].astype(np.int64)
    return _gather(seen.hidden, alive_BS), _gather(seen.logits, alive_BS), rows


def _gather(kept: Sequence[Sequence[Tensor]], alive_BS: Any) -> Halves:
    """Stack the steps of every layer and leave out rows that have ended: [L, N, D or E]."""
    steps = alive_BS.shape[1]
    if not steps:
        return np.zeros((len(kept), 0, 1), dtype=np.float16)
    by_layer = [torch.stack(list(layer[:steps]), dim=1).numpy()[alive_BS] for layer in kept]
    return np.stack(by_layer)


def _half(values: Tensor) -> Tensor:
    flat = values.detach().reshape(-1, values.shape[-1])
    return flat.to(torch.float16).cpu()
