"""How well a draft's layers foretell the target's experts (SP-MoE Figures 2, 7a and 7b).

Both models read the same text, as drafts that are accepted make them do. Letters: T tokens, E
experts, K experts per token, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lm_eval_moecache.analysis.analyzed_model import Analysis, AnalyzedModel, Rows, watched
from lm_eval_moecache.harness.preflight import check_draft
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.speculative import make_draft, matching_layers
from lm_eval_moecache.records.arrays import softmax
from lm_eval_moecache.report.plots import legend, new_figure

TITLE = "Predicting a layer's experts, by layer"
Array = np.ndarray[Any, Any]
_PREDICTORS = ("draft", "next_gate", "frequency", "random")
_NAMES = (
    *("cosine", "router_entropy"),
    *(f"{predictor}_{form}" for predictor in _PREDICTORS for form in ("top1", "topk")),
    *("draft_entropy", "frequency_entropy"),
)
_NEIGHBOURS = (1, 2, 3, 4, 6, 8)


def run(analyzed: AnalyzedModel, options: Mapping[str, Any]) -> Analysis:
    """Return how often each predictor is right, and how sure it is: by MoE layer, and by text.

    Beside it what neighbouring tokens of a text ask for, as drafts do (`_neighbours`).

    `top1`: share of tokens whose likeliest expert is the router's heaviest; `topk`: share of the
    router's K experts among the K likeliest. `draft` is the target's gate on the draft's attention
    output, `next_gate` the same gate on the target's layer before, `frequency` the experts chosen
    most often by the tokens before, of earlier texts too, `random` the chance. Entropies are in
    bits, per token. A text's figures are means over its tokens, then over the layers.
    """
    draft = options["draft"]
    check_draft(draft, analyzed.name, {}, needs_layers=True)
    model = make_draft(draft, analyzed.model)
    matches = matching_layers(model.blocks, analyzed.layers)
    offered = [model.blocks[i].feed_forward for i in sorted(matches, key=matches.__getitem__)]
    # What the gates of the target see, and what the draft offers them: [T, D] by layer.
    hidden = _inputs(analyzed.routers, analyzed.model, analyzed.windows)
    drafted = _inputs(offered, model.model, analyzed.windows)
    sizes = [len(window) for window in analyzed.windows]
    figures = [_figures(analyzed, at, hidden, drafted) for at in range(len(analyzed.layers))]
    text_of_T = np.repeat(analyzed.text_of, sizes)
    texts = []
    for text in dict.fromkeys(analyzed.text_of):
        of_text = [{n: own[n][text_of_T == text].mean() for n in own} for own in figures]
        means = {n: float(np.mean([own[n] for own in of_text if n in own])) for n in _NAMES}
        texts.append({"text": text} | means)
    chosen: list[Array] = []
    for layer, hidden_TD in zip(analyzed.layers, hidden, strict=True):
        experts_TK = _ask(layer, hidden_TD)[1]
        chosen_TE = np.zeros((len(experts_TK), analyzed.geometry.num_experts), dtype=bool)
        np.put_along_axis(chosen_TE, experts_TK, True, axis=-1)
        chosen += np.split(chosen_TE, np.cumsum(sizes)[:-1])
    rows: Rows = [
        {"layer": at} | {n: float(own[n].mean()) if n in own else None for n in _NAMES}
        for at, own in enumerate(figures)
    ]
    neighbours = _neighbours(chosen)
    tables = {"drafting": rows, "drafting_texts": texts, "drafting_neighbours": neighbours}
    return Analysis(tables, f"{TITLE} ({analyzed.name}, {draft})", partial(draw, rows))


def draw(rows: Rows, title: str) -> Any:
    """Draw the share of experts predicted rightly over the layers."""
    figure, panels = new_figure(columns=2)
    for axes, form in zip(panels, ("top1", "topk"), strict=True):
        for predictor in _PREDICTORS:
            points = [(r["layer"], r[f"{predictor}_{form}"]) for r in rows]
            known = [(layer, value) for layer, value in points if value is not None]
            axes.plot(*zip(*known, strict=True), marker="o", label=predictor)
        axes.set_xlabel("MoE layer")
        axes.set_ylim(0, 1.05)
    panels[0].set_ylabel("heaviest expert predicted rightly")
    panels[1].set_ylabel("experts predicted rightly")
    legend(figure, dict(zip(_PREDICTORS, panels[1].lines, strict=True)))
    figure.suptitle(title)
    return figure


def _inputs(modules: Sequence[nn.Module], model: Any, windows: Sequence[Tensor]) -> list[Tensor]:
    """Return what each module is given while the model reads the windows: [T, D] by module."""
    found: list[list[Tensor]] = [[] for _ in modules]

    def note(at: int, args: Any, output: Any) -> None:
        found[at].append(args[0].reshape(-1, args[0].shape[-1]))

    with watched(modules, note), torch.no_grad():
        for window in windows:
            model(window[None].to(model.device))
    return [torch.cat(parts) for parts in found]


def _figures(
    analyzed: AnalyzedModel, at: int, hidden: Sequence[Tensor], drafted: Sequence[Tensor]
) -> dict[str, Array]:
    """Return each figure of a layer by token, [T]."""
    layer, geometry = analyzed.layers[at], analyzed.geometry
    top_k, num_experts = geometry.top_k, geometry.num_experts
    logits_TE, experts_TK = _ask(layer, hidden[at])
    counts_TE = _counts_before(experts_TK, num_experts)
    draft_TE = _ask(layer, drafted[at])[0]
    predictions = {"draft": draft_TE, "frequency": counts_TE}
    if at:
        predictions["next_gate"] = _ask(layer, hidden[at - 1])[0]
    cosine = nn.functional.cosine_similarity(hidden[at].float(), drafted[at].float())
    found = {
        "cosine": cosine.cpu().numpy(),
        "router_entropy": _entropy(logits_TE),
        "random_top1": np.full(len(logits_TE), 1 / num_experts),
        "random_topk": np.full(len(logits_TE), top_k / num_experts),
        "draft_entropy": _entropy(draft_TE),
        "frequency_entropy": _entropy(np.log(counts_TE + 1e-9)),
    }
    for name, scores_TE in predictions.items():
        found[f"{name}_top1"], found[f"{name}_topk"] = _shares(experts_TK, scores_TE, top_k)
    return found


def _neighbours(windows: Sequence[Array]) -> Rows:
    """Return a row for each number of neighbouring tokens, as means over layers and places.

    `activated`: share of a layer's experts that they ask for together; `if_independent`: the same
    if each token drew its experts at random; `common`: share of the last one's experts that the
    first one asks for, too; `any_common`: share of the places where it is any.
    """
    num_experts, top_k = windows[0].shape[1], int(windows[0][0].sum())
    rows = []
    for count in _NEIGHBOURS:
        parts = [
            np.lib.stride_tricks.sliding_window_view(each, count, axis=0)
            for each in windows
            if len(each) >= count
        ]
        if not parts:
            break
        asked = np.concatenate([part.any(axis=-1).mean(axis=-1) for part in parts])
        shared = np.concatenate([(part[..., 0] & part[..., -1]).sum(axis=-1) for part in parts])
        rows.append(
            {
                "tokens": count,
                "activated": float(asked.mean()),
                "if_independent": 1 - (1 - top_k / num_experts) ** count,
                "common": float(shared.mean() / top_k),
                "any_common": float((shared > 0).mean()),
            }
        )
    return rows


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


def _shares(experts_TK: Array, scores_TE: Array, top_k: int) -> tuple[Array, Array]:
    """Return by token whether the scores' first is the first expert, and the share they find."""
    guess_TK = np.argsort(-scores_TE, axis=-1, kind="stable")[:, :top_k]
    found_TK = (guess_TK[:, :, None] == experts_TK[:, None, :]).any(axis=1)
    return guess_TK[:, 0] == experts_TK[:, 0], found_TK.mean(axis=-1)


def _entropy(logits_TE: Array) -> Array:
    """Return the entropy of each token's distribution over experts, in bits."""
    shares: Array = softmax(logits_TE.astype(np.float32)).astype(np.float64)
    bits: Array = -(shares * np.log2(np.maximum(shares, 1e-30))).sum(axis=-1)
    return bits
