"""How well a draft's layers foretell the target's experts (SP-MoE Figures 2c, 7a and 7b).

Both models read the same text, as drafts that are accepted make them do. Letters: T tokens, E
experts, K experts per token, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel
from lm_eval_moecache.harness.preflight import check_draft
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.speculative.draft_model import DraftModel, make_draft, matching_layers
from lm_eval_moecache.records.arrays import softmax

TITLE = "Predicting a layer's experts, by layer"
Array = np.ndarray[Any, Any]
Rows = list[dict[str, Any]]


def analyze(analyzed: AnalyzedModel, draft: str) -> Rows:
    """Return a row per MoE layer: how often each predictor is right, and how sure it is.

    `top1`: share of tokens whose likeliest expert is the router's heaviest; `topk`: share of the
    router's K experts among the K likeliest. `draft` is the target's gate on the draft's attention
    output, `next_gate` the same gate on the target's layer before, `frequency` the experts chosen
    most often by the tokens before, `random` the chance. Entropies are in bits, per token.
    """
    check_draft(draft, analyzed.name, {}, needs_layers=True)
    model = make_draft(draft, analyzed.model)
    seen = [_read(analyzed, model, window) for window in analyzed.windows]
    layers = range(len(analyzed.layers))
    hidden = [torch.cat([target[at] for target, _ in seen]) for at in layers]
    drafted = [torch.cat([own[at] for _, own in seen]) for at in layers]
    return [_row(analyzed, at, hidden, drafted) for at in layers]


def draw(rows: Rows, title: str) -> Any:
    """Draw the share of experts predicted rightly over the layers."""
    from lm_eval_moecache.report.mpl_style import new_figure

    figure, panels = new_figure(columns=2)
    for axes, form in zip(panels, ("top1", "topk"), strict=True):
        for predictor in ("draft", "next_gate", "frequency", "random"):
            points = [(r["layer"], r[f"{predictor}_{form}"]) for r in rows]
            known = [(layer, value) for layer, value in points if value is not None]
            axes.plot(*zip(*known, strict=True), marker="o", label=predictor)
        axes.set_xlabel("MoE layer")
        axes.set_ylim(0, 1.05)
    panels[0].set_ylabel("heaviest expert predicted rightly")
    panels[1].set_ylabel("experts predicted rightly")
    panels[1].legend()
    figure.suptitle(title)
    return figure


def _read(
    analyzed: AnalyzedModel, draft: DraftModel, window: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what the gates of the target see, and what the draft offers them, [T, D] by layer."""
    matches = matching_layers(draft.blocks, analyzed.layers)
    offered = [draft.blocks[i].feed_forward for i in sorted(matches, key=matches.__getitem__)]
    with torch.no_grad():
        target = _inputs([layer.router for layer in analyzed.layers], analyzed.model, window)
        return target, _inputs(offered, draft.model, window)


def _inputs(modules: Sequence[nn.Module], model: Any, window: Tensor) -> list[Tensor]:
    found: list[Tensor] = []

    def hook(module: nn.Module, args: Any) -> None:
        found.append(args[0].reshape(-1, args[0].shape[-1]))

    with ExitStack() as stack:
        for module in modules:
            handle = module.register_forward_pre_hook(hook)
            stack.callback(handle.remove)
        model(window[None].to(model.device))
    return found


def _row(
    analyzed: AnalyzedModel, at: int, hidden: Sequence[Tensor], drafted: Sequence[Tensor]
) -> dict[str, Any]:
    layer, top_k = analyzed.layers[at], analyzed.geometry.top_k
    logits_TE, experts_TK = _ask(layer, hidden[at])
    row: dict[str, Any] = {
        "layer": at,
        "cosine": float(
            nn.functional.cosine_similarity(hidden[at].float(), drafted[at].float()).mean()
        ),
        "router_entropy": _entropy(logits_TE),
    }
    predictions: dict[str, Array | None] = {
        "draft": _ask(layer, drafted[at])[0],
        "next_gate": _ask(layer, hidden[at - 1])[0] if at else None,
        "frequency": _counts_before(experts_TK, analyzed.geometry.num_experts),
    }
    for name, scores_TE in predictions.items():
        right = _shares(experts_TK, scores_TE, top_k)
        row |= {f"{name}_top1": right[0], f"{name}_topk": right[1]}
    num_experts = analyzed.geometry.num_experts
    row |= {"random_top1": 1 / num_experts, "random_topk": top_k / num_experts}
    assert predictions["draft"] is not None and predictions["frequency"] is not None
    row["draft_entropy"] = _entropy(predictions["draft"])
    row["frequency_entropy"] = _entropy(np.log(predictions["frequency"] + 1e-9))
    return row


def _ask(layer: MoELayer, hidden_TD: Tensor) -> tuple[Array, Array]:
    """Return a router's logits [T, E] and its experts [T, K], heaviest first."""
    logits, weights, experts = layer.gate.ask(hidden_TD)
    order = weights.float().argsort(dim=-1, descending=True, stable=True)
    return logits.float().cpu().numpy(), experts.gather(-1, order).cpu().numpy()


def _counts_before(experts_TK: Array, num_experts: int) -> Array:
    """Return how often each expert was chosen by the tokens before each one: [T, E]."""
    chosen = np.zeros((len(experts_TK), num_experts), dtype=np.float64)
    np.put_along_axis(chosen, experts_TK, 1.0, axis=-1)
    counts: Array = chosen.cumsum(axis=0) - chosen
    return counts


def _shares(
    experts_TK: Array, scores_TE: Array | None, top_k: int
) -> tuple[float | None, float | None]:
    """Return the shares of first and of all experts that the scores' top K have."""
    if scores_TE is None:
        return None, None
    guess_TK = np.argsort(-scores_TE, axis=-1, kind="stable")[:, :top_k]
    first = float((guess_TK[:, 0] == experts_TK[:, 0]).mean())
    every = float((guess_TK[:, :, None] == experts_TK[:, None, :]).any(axis=1).mean())
    return first, every


def _entropy(logits_TE: Array) -> float:
    """Return the mean entropy of the tokens' distributions over experts, in bits."""
    shares: Array = softmax(logits_TE.astype(np.float32)).astype(np.float64)
    bits = -(shares * np.log2(np.maximum(shares, 1e-30))).sum(axis=-1)
    return float(bits.mean())
