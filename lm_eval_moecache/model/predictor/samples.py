"""What routers see while a model generates, in shards of whole prompts; predictions judged by it.

Shapes: B prompts of a batch, S steps, N recorded tokens, L layers, D hidden size, E experts, K
chosen per token. A shard holds `hidden` [L, N, D] and `logits` [L, N, E] in float16 and `prompt`
[N], its tokens in the order of generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.numpy import save
from torch import Tensor
from tqdm import tqdm

from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.predictor.network import PredictorNetwork
from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray, softmax
from lm_eval_moecache.records.files import write_whole

HELD_OUT_SHARE = 0.2
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Pairs:
    """What one layer's predictor learns from: its inputs and the logits it has to give."""

    inputs_ND: Halves
    targets_NE: Halves
    prompts_N: IntArray

    def where(self, rows: BoolArray) -> Pairs:
        return Pairs(self.inputs_ND[rows], self.targets_NE[rows], self.prompts_N[rows])


class Samples:
    """The recorded tokens of all shards, or of some prompts."""

    def __init__(self, shards: Sequence[Path]) -> None:
        # A batch whose answers all ended at once has recorded nothing.
        self._shards = [shard for shard in shards if len(_read(shard, "prompt"))]
        if not self._shards:
            raise ValueError("every answer ended at once: there is nothing to learn from.")
        self.prompts: IntArray = np.concatenate([_read(s, "prompt") for s in self._shards])

    def pairs(self, layer: int, num_layers: int) -> Pairs:
        """Return what is predicted at `layer`: the next layer, or layer 0 of the next token."""
        target = (layer + 1) % num_layers
        inputs = np.concatenate([_read(shard, "hidden", layer) for shard in self._shards])
        logits = np.concatenate([_read(shard, "logits", target) for shard in self._shards])
        if target > 0:
            return Pairs(inputs, logits, self.prompts)
        follows = self.prompts[1:] == self.prompts[:-1]
        return Pairs(inputs[:-1][follows], logits[1:][follows], self.prompts[:-1][follows])

    def split(self, seed: int) -> tuple[IntArray, IntArray]:
        """Divide the prompts 80/20, so that no token of a held-out prompt was trained on."""
        prompts = np.unique(self.prompts)
        np.random.default_rng(seed).shuffle(prompts)
        held_out = max(1, round(HELD_OUT_SHARE * len(prompts)))
        if held_out >= len(prompts):
            raise ValueError(f"prompts: {len(prompts)} cannot be divided into train and held-out.")
        return np.sort(prompts[held_out:]), np.sort(prompts[:held_out])


def write_shard(path: Path, hidden_LND: Halves, logits_LNE: Halves, prompts_N: IntArray) -> None:
    """Write one shard whole or not at all."""
    write_whole(path, save({"hidden": hidden_LND, "logits": logits_LNE, "prompt": prompts_N}))


def top_k(logits_NE: FloatArray | Halves, count: int) -> IntArray:
    """Return the `count` best experts of each row, best first, ties to the smaller index."""
    return np.argsort(-logits_NE.astype(np.float32), axis=-1, kind="stable")[:, :count]


def _read(path: Path, name: str, layer: int | None = None) -> Any:
    with safe_open(path, "numpy") as file:
        return file.get_tensor(name) if layer is None else file.get_slice(name)[layer]


MAX_PROMPT_TOKENS = 2048


class RouterCapture(ExitStack):
    """Keeps each router's input and logits of the decode steps, until it is left.

    `prompts` says for each step which prompt it belongs to, counting prefills: that of a batch of
    one. Batches are told apart by whoever asked for them.
    """

    def __init__(self, model: Any, layers: Sequence[MoELayer]) -> None:
        super().__init__()
        self._decoding, self._prompt = False, -1
        self.prompts: list[int] = []
        self.hidden: list[list[Tensor]] = [[] for _ in layers]
        self.logits: list[list[Tensor]] = [[] for _ in layers]
        self.callback(model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        for index, layer in enumerate(layers):
            self.callback(layer.router.register_forward_hook(partial(self._keep, index)).remove)

    def _begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        past = kwargs.get("past_key_values")
        self._decoding = past is not None and past.get_seq_length() > 0
        if self._decoding:
            self.prompts.append(self._prompt)
        else:
            self._prompt += 1

    def _keep(self, layer: int, router: Any, args: Any, output: Any) -> None:
        if self._decoding:
            for kept, values in ((self.hidden, args[0]), (self.logits, output[0])):
                flat = values.detach().reshape(-1, values.shape[-1])
                kept[layer].append(flat.to(torch.float16).cpu())

    def write(self, path: Path) -> None:
        """Write what batches of one prompt gave as one shard."""
        hidden, logits = (
            np.stack([torch.cat(layer).numpy() for layer in kept])
            for kept in (self.hidden, self.logits)
        )
        write_shard(path, hidden, logits, np.asarray(self.prompts, dtype=np.int64))


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
    shards = []
    starts = range(0, len(prompts), batch_size)
    for start in tqdm(starts, desc="recording", unit="batch"):
        path = folder / f"{start:08d}.safetensors"
        shards.append(path)
        if path.is_file():
            continue
        batch = prompts[start : start + batch_size]
        with RouterCapture(model, layers) as seen:
            # The last generated token is never read, so one more than is recorded.
            _, real, begin = generate(model, tokenizer, batch, num_tokens + 1)
        alive_BS = real[:, begin:-1].cpu().numpy()
        rows = np.nonzero(alive_BS)[0].astype(np.int64)
        steps = alive_BS.shape[1]
        # The steps of every layer, without rows that have ended.
        hidden, logits = (
            np.stack([torch.stack(own[:steps], dim=1).numpy()[alive_BS] for own in kept])
            if steps
            else np.zeros((len(kept), 0, 1), dtype=np.float16)
            for kept in (seen.hidden, seen.logits)
        )
        write_shard(path, hidden, logits, rows + start)
    return shards


@torch.no_grad()
def generate(
    model: Any, tokenizer: Any, prompts: Sequence[str], num_tokens: int
) -> tuple[Tensor, Tensor, int]:
    """Let the model answer the prompts greedily.

    Returns the tokens [B, prompt + S], which of them are the prompt's or come before the answer's
    end token, and where answers begin.
    """
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
    output = model.generate(
        **encoded,
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    begin = encoded.input_ids.shape[1]
    ends = model.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [ends], device=output.device)
    alive = torch.isin(output[:, begin:], ends).int().cumsum(1).eq(0)
    return output, torch.cat([encoded.attention_mask.bool(), alive], dim=1), begin


PREDICTOR, NEXT_GATE, FREQUENCY = "predictor", "next_gate", "frequency"
DECILES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One layer's predictions: how many of each token's K experts each predictor had right [N]."""

    layer: int
    target: int
    right: Mapping[str, IntArray]
    certainty: FloatArray
    """Of the target's router: KL divergence of its softmax from uniform, in nats [N]."""
    first: IntArray
    """Whether the predictor's likeliest expert is the router's, 0 or 1 [N]."""
    gap: FloatArray
    """Between the logits of the router's last chosen expert and the next one [N]."""
    prompts: IntArray
    """Which prompt each token answers [N]."""


def certainty(logits_NE: FloatArray | Halves) -> FloatArray:
    """Return the KL divergence of each row's softmax from the uniform distribution, in nats."""
    shares = softmax(logits_NE.astype(np.float32)).astype(np.float64)
    terms = np.where(shares > 0, shares * np.log(np.maximum(shares, 1e-300) * shares.shape[1]), 0.0)
    return np.asarray(terms.sum(axis=-1), dtype=np.float32)


def count_right(predicted_NK: IntArray, true_NK: IntArray) -> IntArray:
    """Return how many of each row's true experts were predicted: k times eq. 3."""
    found = (predicted_NK[:, :, None] == true_NK[:, None, :]).any(axis=-1)
    return np.asarray(found.sum(axis=-1), dtype=np.int64)


def judge(
    samples: Samples,
    network: PredictorNetwork,
    layers: Sequence[MoELayer],
    *,
    num_chosen: int,
    known: IntArray,
    held_out: IntArray,
) -> list[Judged]:
    """Judge all layers on the held-out prompts; the frequencies are counted on the known ones."""
    found = []
    for layer in range(len(layers)):
        pairs = samples.pairs(layer, len(layers))
        target = (layer + 1) % len(layers)
        judged = pairs.where(np.isin(pairs.prompts_N, held_out))
        counted = pairs.where(np.isin(pairs.prompts_N, known))
        true, inputs = top_k(judged.targets_NE, num_chosen), torch.from_numpy(judged.inputs_ND)
        named = top_k(network(layer, inputs).numpy(), num_chosen)
        gate = layers[target].gate
        with torch.no_grad():
            asked = gate.predict(inputs.to(gate.dtype)).float().cpu().numpy()
        counts = np.bincount(
            top_k(counted.targets_NE, num_chosen).ravel(), minlength=pairs.targets_NE.shape[1]
        )
        frequent = np.argsort(-counts, kind="stable")[:num_chosen]
        predictions = {
            PREDICTOR: named,
            NEXT_GATE: top_k(asked, num_chosen),
            FREQUENCY: np.broadcast_to(frequent, true.shape),
        }
        ordered = -np.sort(-judged.targets_NE.astype(np.float32), axis=-1)
        following = ordered[:, min(num_chosen, ordered.shape[1] - 1)]
        found.append(
            Judged(
                layer=layer,
                target=target,
                right={name: count_right(chosen, true) for name, chosen in predictions.items()},
                certainty=certainty(judged.targets_NE),
                first=(named[:, 0] == true[:, 0]).astype(np.int64),
                gap=ordered[:, num_chosen - 1] - following,
                prompts=judged.prompts_N,
            )
        )
    return found


def layer_rows(judged: Sequence[Judged], num_chosen: int) -> list[dict[str, Any]]:
    """Return one row a layer: the share of the target's experts that each predictor names."""
    return [
        {
            "layer": one.layer,
            "target": one.target,
            "tokens": len(one.certainty),
            **{name: float(right.mean()) / num_chosen for name, right in one.right.items()},
        }
        for one in judged
    ]


def certainty_rows(judged: Sequence[Judged], num_chosen: int) -> list[dict[str, Any]]:
    """Return one row for each number of rightly predicted experts (Figure 2)."""
    right = np.concatenate([one.right[PREDICTOR] for one in judged])
    kld = np.concatenate([one.certainty for one in judged])
    rows = []
    for count in range(num_chosen + 1):
        here = right == count
        rows.append(
            {
                "right": count,
                "accuracy": count / num_chosen,
                "tokens": int(here.sum()),
                "share": float(here.mean()),
                "certainty": float(kld[here].mean()) if here.any() else None,
            }
        )
    return rows


def decile_rows(judged: Sequence[Judged], num_chosen: int) -> list[dict[str, Any]]:
    """Return one row for each tenth of the predictions, from the least certain router up."""
    right = np.concatenate([one.right[PREDICTOR] for one in judged])
    kld = np.concatenate([one.certainty for one in judged])
    parts = np.array_split(np.argsort(kld, kind="stable"), DECILES)
    return [
        {
            "decile": number,
            "tokens": len(here),
            "certainty": float(kld[here].mean()),
            "accuracy": float(right[here].mean()) / num_chosen,
            "half_or_less": float((right[here] <= num_chosen // 2).mean()),
            "all_right": float((right[here] == num_chosen).mean()),
        }
        for number, here in enumerate(parts, 1)
        if len(here)
    ]


def correlation_rows(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return one row a layer: what goes with how much of a token's set is predicted rightly."""
    return [
        {
            "layer": one.layer,
            "target": one.target,
            "set_by_certainty": _correlation(one.right[PREDICTOR], one.certainty),
            "first_by_certainty": _correlation(one.first, one.certainty),
            "set_by_gap": _correlation(one.right[PREDICTOR], one.gap),
        }
        for one in judged
    ]


def document_rows(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return one row a prompt: what goes with its tokens' accuracy, over all layers as in Figure 2.

    `within_layers` takes each layer's own means off both sides first: layers that are surer than
    others, and better or worse foretold, then make no trend of their own.
    """
    prompts = np.concatenate([one.prompts for one in judged])
    by_layer = [(one.right[PREDICTOR], one.certainty, one.gap) for one in judged]
    right, kld, gap = map(np.concatenate, zip(*by_layer, strict=True))
    centred = [[side - side.mean() for side in sides] for sides in by_layer]
    centred_right, centred_kld, _ = map(np.concatenate, zip(*centred, strict=True))
    rows = []
    for prompt in np.unique(prompts).tolist():
        here = prompts == prompt
        rows.append(
            {
                "prompt": prompt,
                "tokens": int(here.sum()),
                "set_by_certainty": _correlation(right[here], kld[here]),
                "within_layers": _correlation(centred_right[here], centred_kld[here]),
                "set_by_gap": _correlation(right[here], gap[here]),
            }
        )
    return rows


def _correlation(left: IntArray | FloatArray, right: FloatArray) -> float | None:
    """Return Pearson's coefficient, or None where one side does not vary."""
    if len(left) < 2 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return None
    return float(np.corrcoef(left, right)[0, 1])
