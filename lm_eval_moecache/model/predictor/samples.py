"""Router inputs and logits of generated tokens, and predictors judged by them.

Shapes: N recorded tokens, T tokens of a text, D hidden size, E experts, K chosen per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from lm_eval_moecache.model.device import device_of
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.predictor.network import PredictorNetwork
from lm_eval_moecache.model.reading import watched
from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray, softmax

HELD_OUT_SHARE = 0.2
MAX_PROMPT_TOKENS = 2048
Halves = npt.NDArray[np.float16]


class Answer(NamedTuple):
    """A prompt and what the model wrote after it, up to its end token, as its routers read it."""

    tokens: Tensor
    """[T]"""
    begin: int
    """The index of the first token that the model wrote."""
    hidden: list[Tensor]
    """Each router's inputs [T, D]."""
    logits: list[Tensor]
    """Each router's logits [T, E]."""


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: Any,
    layers: Sequence[MoELayer],
    prompts: Sequence[str],
    *,
    num_tokens: int,
    batch_size: int,
) -> Iterator[Answer]:
    """Generate greedily from the prompts, and read each text once more; one by one, to be cut."""
    hidden, logits = list[Tensor](), list[Tensor]()

    def note(layer: int, args: Any, output: Any) -> None:
        for captured, values in (
            (hidden, args[0]),
            (logits, layers[layer].gate.read(output).logits),
        ):
            captured.append(values.detach().reshape(-1, values.shape[-1]).float().cpu())

    for start in tqdm(range(0, len(prompts), batch_size), desc="recording", unit="batch"):
        batch = prompts[start : start + batch_size]
        for tokens, begin in generate(model, tokenizer, batch, num_tokens):
            hidden.clear()
            logits.clear()
            with watched([layer.router for layer in layers], note):
                model(tokens[None])
            yield Answer(tokens.cpu(), begin, [*hidden], [*logits])


def generate(
    model: Any, tokenizer: Any, prompts: Sequence[str], num_tokens: int
) -> Iterator[tuple[Tensor, int]]:
    """Generate greedily; yield each prompt with its answer up to the end token, and its length."""
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
    ).to(device_of(model))
    rows = model.generate(
        **encoded,
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    begin = encoded.input_ids.shape[1]
    ends = model.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [ends], device=rows.device)
    alive = torch.isin(rows[:, begin:], ends).int().cumsum(1).eq(0)
    prompt_mask = encoded.attention_mask.bool()
    is_real = torch.cat([prompt_mask, alive], dim=1)
    for row, real, mask in zip(rows, is_real, prompt_mask, strict=True):
        yield row[real], int(mask.sum())


def check_routers(layers: Sequence[MoELayer]) -> None:
    """Raise ValueError for a router that no predictor of its inputs can follow."""
    for gate in (layer.gate for layer in layers if layer.gate.by_token):
        raise ValueError(
            f"predictor: the router {gate.name} chooses by token ids, which a predictor that reads "
            "hidden states does not see. Allowed: moecache profile data_aware."
        )


def split(prompts: IntArray, seed: int) -> tuple[IntArray, IntArray]:
    """Divide prompts 80/20, so that no token of a held-out one is trained on."""
    prompts = np.random.default_rng(seed).permutation(prompts)
    held_out = max(1, round(HELD_OUT_SHARE * len(prompts)))
    if held_out >= len(prompts):
        raise ValueError(f"prompts: {len(prompts)} cannot be divided into train and held-out.")
    return np.sort(prompts[held_out:]), np.sort(prompts[:held_out])


@dataclass(frozen=True, slots=True)
class Pairs:
    """The training pairs of one layer's predictor: its inputs and its target logits."""

    inputs_ND: Halves
    targets_NE: Halves
    prompts_N: IntArray

    def where(self, rows: BoolArray) -> Pairs:
        """Return the pairs marked in `rows` [N]."""
        return Pairs(self.inputs_ND[rows], self.targets_NE[rows], self.prompts_N[rows])


@dataclass(frozen=True, slots=True)
class Samples:
    """The recorded tokens of all answers, prompt after prompt, by layer."""

    hidden: Sequence[Halves]
    logits: Sequence[Halves]
    prompts: IntArray
    """Which prompt each token answers [N]."""

    @classmethod
    def of(cls, recorded: Iterable[Answer]) -> Samples:
        """Keep the passes over the tokens that a model wrote, in half precision."""
        kept = [
            [[part[answer.begin :].half().numpy() for part in parts] for parts in answer[2:]]
            for answer in recorded
        ]
        lengths = [len(hidden[0]) for hidden, _ in kept]
        if not sum(lengths):
            raise ValueError("every answer ended at once: there is nothing to learn from.")
        hidden, logits = (
            [np.concatenate(parts) for parts in zip(*by_prompt, strict=True)]
            for by_prompt in zip(*kept, strict=True)
        )
        return cls(hidden, logits, np.repeat(np.arange(len(kept)), lengths))

    def pairs(self, layer: int) -> Pairs:
        """Return a layer's pairs; the target is the next layer, or layer 0 of the next token."""
        target = (layer + 1) % len(self.hidden)
        inputs, logits = self.hidden[layer], self.logits[target]
        if target > 0:
            return Pairs(inputs, logits, self.prompts)
        follows = self.prompts[1:] == self.prompts[:-1]
        return Pairs(inputs[:-1][follows], logits[1:][follows], self.prompts[:-1][follows])


def top_k(logits_NE: FloatArray | Halves, count: int) -> IntArray:
    """Return the `count` best experts of each row, best first, ties to the smaller index."""
    return np.argsort(-logits_NE.astype(np.float32), axis=-1, kind="stable")[:, :count]


PREDICTOR, NEXT_GATE, FREQUENCY = "predictor", "next_gate", "frequency"


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
) -> pd.DataFrame:
    """Judge all layers on the held-out prompts; expert frequencies come from the known ones.

    Returns a row a token and layer: `layer`, `target` and `prompt`; how many of the token's K
    experts `predictor`, `next_gate` and `frequency` named; whether the predictor's likeliest is the
    router's (`first`, 0 or 1); `certainty`, the KL divergence of the target router's softmax from
    uniform, in nats; `gap`, the logit difference between its last chosen expert and the next one.
    """
    frames = []
    for layer in range(len(layers)):
        pairs = samples.pairs(layer)
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
        sorted_logits = -np.sort(-test.targets_NE.astype(np.float32), axis=-1)
        runner_up = sorted_logits[:, min(num_chosen, sorted_logits.shape[1] - 1)]
        columns = {
            "layer": layer,
            "target": target,
            "prompt": test.prompts_N,
            PREDICTOR: count_right(predicted, true),
            NEXT_GATE: count_right(top_k(gate_logits, num_chosen), true),
            FREQUENCY: count_right(np.broadcast_to(frequent, true.shape), true),
            "first": (predicted[:, 0] == true[:, 0]).astype(np.int64),
            "certainty": certainty(test.targets_NE),
            "gap": sorted_logits[:, num_chosen - 1] - runner_up,
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def layer_rows(judged: pd.DataFrame, num_chosen: int) -> list[dict[str, Any]]:
    """Return one row per layer: the share of the target's experts that each predictor names."""
    names = (PREDICTOR, NEXT_GATE, FREQUENCY)
    return [
        {"layer": layer, "target": target, "tokens": len(tokens)}
        | {name: float(tokens[name].mean()) / num_chosen for name in names}
        for (layer, target), tokens in judged.groupby(["layer", "target"])
    ]


def certainty_rows(judged: pd.DataFrame, num_chosen: int) -> list[dict[str, Any]]:
    """Return one row for each number of rightly predicted experts (Figure 2)."""
    rows = []
    for count in range(num_chosen + 1):
        certainties = judged["certainty"][judged[PREDICTOR] == count].to_numpy()
        rows.append(
            {
                "right": count,
                "accuracy": count / num_chosen,
                "tokens": len(certainties),
                "share": len(certainties) / len(judged),
                "certainty": float(certainties.mean()) if len(certainties) else None,
            }
        )
    return rows
