"""Router inputs and logits of generated tokens, in shards of whole prompts; predictors judged.

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

from lm_eval_moecache.model.gate import Gate
from lm_eval_moecache.model.moe_layers import MoELayer, cache_of
from lm_eval_moecache.model.predictor.network import PredictorNetwork
from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray, softmax
from lm_eval_moecache.records.files import write_whole

HELD_OUT_SHARE = 0.2
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The training pairs of one layer's predictor: its inputs and its target logits."""

    inputs_ND: Halves
    targets_NE: Halves
    prompts_N: IntArray

    def where(self, rows: BoolArray) -> Pairs:
        """Return the pairs marked in `rows` [N]."""
        return Pairs(self.inputs_ND[rows], self.targets_NE[rows], self.prompts_N[rows])


class Samples:
    """The recorded tokens of all shards."""

    def __init__(self, shards: Sequence[Path]) -> None:
        # A batch whose answers all ended immediately has recorded nothing.
        self._shards = [shard for shard in shards if len(_read(shard, "prompt"))]
        if not self._shards:
            raise ValueError("every answer ended at once: there is nothing to learn from.")
        self.prompts: IntArray = np.concatenate([_read(s, "prompt") for s in self._shards])

    def pairs(self, layer: int, num_layers: int) -> Pairs:
        """Return a layer's pairs; the target is the next layer, or layer 0 of the next token."""
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
    """Write one shard atomically."""
    write_whole(path, save({"hidden": hidden_LND, "logits": logits_LNE, "prompt": prompts_N}))


def top_k(logits_NE: FloatArray | Halves, count: int) -> IntArray:
    """Return the `count` best experts of each row, best first, ties to the smaller index."""
    return np.argsort(-logits_NE.astype(np.float32), axis=-1, kind="stable")[:, :count]


def _read(path: Path, name: str, layer: int | None = None) -> Any:
    with safe_open(path, "numpy") as file:
        return file.get_tensor(name) if layer is None else file.get_slice(name)[layer]


MAX_PROMPT_TOKENS = 2048


class RouterCapture(ExitStack):
    """Captures each router's inputs and logits of the decode steps while its context is open.

    `prompts` holds the prompt of each step, counted by prefills, for batches of one. The rows of
    larger batches are the caller's to split.
    """

    def __init__(self, model: Any, layers: Sequence[MoELayer]) -> None:
        super().__init__()
        for gate in (layer.gate for layer in layers if layer.gate.by_token):
            raise ValueError(
                f"predictor: the router {gate.name} chooses by token ids, which a predictor that "
                "reads hidden states does not see. Allowed: moecache profile data_aware."
            )
        self._decoding, self._prompt = False, -1
        self.prompts: list[int] = []
        self.hidden: list[list[Tensor]] = [[] for _ in layers]
        self.logits: list[list[Tensor]] = [[] for _ in layers]
        self.callback(model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        for index, layer in enumerate(layers):
            keep = partial(self._keep, index, layer.gate)
            self.callback(layer.router.register_forward_hook(keep).remove)

    def _begin(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        past = cache_of(kwargs)
        self._decoding = past is not None and past.get_seq_length() > 0
        if self._decoding:
            self.prompts.append(self._prompt)
        else:
            self._prompt += 1

    def _keep(self, layer: int, gate: Gate, router: Any, args: Any, output: Any) -> None:
        if self._decoding:
            logits = gate.read(output).logits
            for captured, values in ((self.hidden, args[0]), (self.logits, logits)):
                flat = values.detach().reshape(-1, values.shape[-1])
                captured[layer].append(flat.to(torch.float16).cpu())

    def write(self, path: Path) -> None:
        """Write the captures of batches of one prompt as one shard."""
        hidden, logits = (
            np.stack([torch.cat(layer).numpy() for layer in captured])
            for captured in (self.hidden, self.logits)
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
    """Write one shard for each batch of prompts, unless it exists; return their paths.

    The model generates greedily; the passes over its first `num_tokens` generated tokens are
    recorded, up to its end token.
    """
    shards = []
    starts = range(0, len(prompts), batch_size)
    for start in tqdm(starts, desc="recording", unit="batch"):
        path = folder / f"{start:08d}.safetensors"
        shards.append(path)
        if path.is_file():
            continue
        batch = prompts[start : start + batch_size]
        with RouterCapture(model, layers) as capture:
            # The last generated token is never fed back: one more is generated than recorded.
            _, real, begin = generate(model, tokenizer, batch, num_tokens + 1)
        alive_BS = real[:, begin:-1].cpu().numpy()
        rows = np.nonzero(alive_BS)[0].astype(np.int64)
        steps = alive_BS.shape[1]
        # The steps of every layer, without rows that have ended.
        hidden, logits = (
            np.stack([torch.stack(layer[:steps], dim=1).numpy()[alive_BS] for layer in captured])
            if steps
            else np.zeros((len(captured), 0, 1), dtype=np.float16)
            for captured in (capture.hidden, capture.logits)
        )
        write_shard(path, hidden, logits, rows + start)
    return shards


@torch.no_grad()
def generate(
    model: Any, tokenizer: Any, prompts: Sequence[str], num_tokens: int
) -> tuple[Tensor, Tensor, int]:
    """Generate greedily from the prompts.

    Returns the tokens [B, prompt + S], a mask of those in the prompt or before the answer's end
    token, and the index at which answers begin.
    """
    # The question stands at the end of a prompt, so the beginning is cut.
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
    tokens = model.generate(
        **encoded,
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    begin = encoded.input_ids.shape[1]
    ends = model.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [ends], device=tokens.device)
    alive = torch.isin(tokens[:, begin:], ends).int().cumsum(1).eq(0)
    return tokens, torch.cat([encoded.attention_mask.bool(), alive], dim=1), begin


PREDICTOR, NEXT_GATE, FREQUENCY = "predictor", "next_gate", "frequency"
DECILES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One layer's predictions; `right`: how many of a token's K experts a predictor named [N]."""

    layer: int
    target: int
    right: Mapping[str, IntArray]
    certainty: FloatArray
    """KL divergence of the target router's softmax from uniform, in nats [N]."""
    first: IntArray
    """Whether the predictor's likeliest expert is the router's likeliest, 0 or 1 [N]."""
    gap: FloatArray
    """Logit difference between the router's last chosen expert and the next one [N]."""
    prompts: IntArray
    """Which prompt each token answers [N]."""


def certainty(logits_NE: FloatArray | Halves) -> FloatArray:
    """Return the KL divergence of each row's softmax from the uniform distribution, in nats."""
    shares = softmax(logits_NE.astype(np.float32)).astype(np.float64)
    terms = np.where(shares > 0, shares * np.log(np.maximum(shares, 1e-300) * shares.shape[1]), 0.0)
    return np.asarray(terms.sum(axis=-1), dtype=np.float32)


def count_right(predicted_NK: IntArray, true_NK: IntArray) -> IntArray:
    """Return how many of each row's true experts were predicted: k times eq. 3."""
    matches = (predicted_NK[:, :, None] == true_NK[:, None, :]).any(axis=-1)
    return np.asarray(matches.sum(axis=-1), dtype=np.int64)


def judge(
    samples: Samples,
    network: PredictorNetwork,
    layers: Sequence[MoELayer],
    *,
    num_chosen: int,
    known: IntArray,
    held_out: IntArray,
) -> list[Judged]:
    """Judge all layers on the held-out prompts; expert frequencies come from the known ones."""
    judgements = []
    for layer in range(len(layers)):
        pairs = samples.pairs(layer, len(layers))
        target = (layer + 1) % len(layers)
        test = pairs.where(np.isin(pairs.prompts_N, held_out))
        train = pairs.where(np.isin(pairs.prompts_N, known))
        true, inputs = top_k(test.targets_NE, num_chosen), torch.from_numpy(test.inputs_ND)
        predicted = top_k(network(layer, inputs).numpy(), num_chosen)
        gate = layers[target].gate
        with torch.no_grad():
            gate_logits = gate.predict(inputs.to(gate.dtype)).float().cpu().numpy()
        counts = np.bincount(
            top_k(train.targets_NE, num_chosen).ravel(), minlength=pairs.targets_NE.shape[1]
        )
        frequent = np.argsort(-counts, kind="stable")[:num_chosen]
        predictions = {
            PREDICTOR: predicted,
            NEXT_GATE: top_k(gate_logits, num_chosen),
            FREQUENCY: np.broadcast_to(frequent, true.shape),
        }
        sorted_logits = -np.sort(-test.targets_NE.astype(np.float32), axis=-1)
        runner_up = sorted_logits[:, min(num_chosen, sorted_logits.shape[1] - 1)]
        judgements.append(
            Judged(
                layer=layer,
                target=target,
                right={name: count_right(chosen, true) for name, chosen in predictions.items()},
                certainty=certainty(test.targets_NE),
                first=(predicted[:, 0] == true[:, 0]).astype(np.int64),
                gap=sorted_logits[:, num_chosen - 1] - runner_up,
                prompts=test.prompts_N,
            )
        )
    return judgements


def layer_rows(judged: Sequence[Judged], num_chosen: int) -> list[dict[str, Any]]:
    """Return one row per layer: the share of the target's experts that each predictor names."""
    return [
        {
            "layer": entry.layer,
            "target": entry.target,
            "tokens": len(entry.certainty),
            **{name: float(right.mean()) / num_chosen for name, right in entry.right.items()},
        }
        for entry in judged
    ]


def certainty_rows(judged: Sequence[Judged], num_chosen: int) -> list[dict[str, Any]]:
    """Return one row for each number of rightly predicted experts (Figure 2)."""
    right = np.concatenate([entry.right[PREDICTOR] for entry in judged])
    kld = np.concatenate([entry.certainty for entry in judged])
    rows = []
    for count in range(num_chosen + 1):
        mask = right == count
        rows.append(
            {
                "right": count,
                "accuracy": count / num_chosen,
                "tokens": int(mask.sum()),
                "share": float(mask.mean()),
                "certainty": float(kld[mask].mean()) if mask.any() else None,
            }
        )
    return rows


def decile_rows(judged: Sequence[Judged], num_chosen: int) -> list[dict[str, Any]]:
    """Return one row per decile of the predictions, from the least certain router up."""
    right = np.concatenate([entry.right[PREDICTOR] for entry in judged])
    kld = np.concatenate([entry.certainty for entry in judged])
    parts = np.array_split(np.argsort(kld, kind="stable"), DECILES)
    return [
        {
            "decile": number,
            "tokens": len(indices),
            "certainty": float(kld[indices].mean()),
            "accuracy": float(right[indices].mean()) / num_chosen,
            "half_or_less": float((right[indices] <= num_chosen // 2).mean()),
            "all_right": float((right[indices] == num_chosen).mean()),
        }
        for number, indices in enumerate(parts, 1)
        if len(indices)
    ]


def correlation_rows(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return one row per layer: correlates of how many experts of a token are predicted rightly."""
    return [
        {
            "layer": entry.layer,
            "target": entry.target,
            "set_by_certainty": _correlation(entry.right[PREDICTOR], entry.certainty),
            "first_by_certainty": _correlation(entry.first, entry.certainty),
            "set_by_gap": _correlation(entry.right[PREDICTOR], entry.gap),
        }
        for entry in judged
    ]


def document_rows(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return one row per prompt: correlates of its tokens' accuracy over all layers (Figure 2).

    `within_layers` first subtracts each layer's means from both sides: layers that are more certain
    than others, and predicted better or worse, then make no trend of their own.
    """
    prompts = np.concatenate([layer.prompts for layer in judged])
    by_layer = [(layer.right[PREDICTOR], layer.certainty, layer.gap) for layer in judged]
    right, kld, gap = map(np.concatenate, zip(*by_layer, strict=True))
    centred = [[side - side.mean() for side in sides] for sides in by_layer]
    centred_right, centred_kld, _ = map(np.concatenate, zip(*centred, strict=True))
    rows = []
    for prompt in np.unique(prompts).tolist():
        mask = prompts == prompt
        rows.append(
            {
                "prompt": prompt,
                "tokens": int(mask.sum()),
                "set_by_certainty": _correlation(right[mask], kld[mask]),
                "within_layers": _correlation(centred_right[mask], centred_kld[mask]),
                "set_by_gap": _correlation(right[mask], gap[mask]),
            }
        )
    return rows


def _correlation(left: IntArray | FloatArray, right: FloatArray) -> float | None:
    """Return Pearson's coefficient, or None where one side does not vary."""
    if len(left) < 2 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return None
    return float(np.corrcoef(left, right)[0, 1])
