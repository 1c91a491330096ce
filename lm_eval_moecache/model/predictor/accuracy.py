"""Judges predictions of experts: how many are right, beside two baselines and router certainty.

Shapes: N tokens, E experts, K chosen per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.predictor.network import PredictorNetwork
from lm_eval_moecache.model.predictor.samples import Halves, Samples, top_k
from lm_eval_moecache.records.arrays import FloatArray, IntArray, softmax

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
