"""How well a draft's layers predict the target's experts (SP-MoE Figures 2, 7a and 7b).

Both models read the same text, as they do when drafts are accepted. Letters: T tokens, E
experts, K experts per token, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import entropy
from torch import Tensor, nn

from lm_eval_moecache.harness.preflight import check_draft
from lm_eval_moecache.model.device import device_of
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.predictor.training import count_right
from lm_eval_moecache.model.predictor.training import top_k as best
from lm_eval_moecache.model.reading import watched
from lm_eval_moecache.model.speculative import make_draft, matching_layers
from lm_eval_moecache.records.arrays import softmax
from lm_eval_moecache.report.plots import legend, new_figure
from moecache_lab.analyzed_model import Analysis, AnalyzedModel, Rows

TITLE = "Predicting a layer's experts, by layer"
Array = np.ndarray[Any, Any]
_PREDICTORS = ("draft", "next_gate", "frequency", "random")
_NAMES = (
    *("cosine", "router_entropy"),
    *(f"{predictor}_{form}" for predictor in _PREDICTORS for form in ("top1", "topk")),
    *("draft_entropy", "frequency_entropy"),
)
_NEIGHBOURS = (1, 2, 3, 4, 6, 8)


def drafting(analyzed: AnalyzedModel, options: Mapping[str, Any]) -> Analysis:
    """Return how often each predictor is right, and how sure it is: by MoE layer, and by text.

    Next to it the experts that neighbouring tokens of a text share, as drafts do (`_neighbours`).

    `top1`: share of tokens whose likeliest expert is the router's heaviest; `topk`: share of the
    router's K experts among the K likeliest. `draft` is the target's gate on the draft's attention
    output, `next_gate` the same gate on the target's layer before, `frequency` the experts chosen
    most often by the tokens before, of earlier texts too, `random` chance. Entropies are in bits,
    per token. A text's figures are means over its tokens, then over the layers.
    """
    draft = options["draft"]
    check_draft(draft, analyzed.name, {}, needs_layers=True)
    model = make_draft(draft, analyzed.model)
    matches = matching_layers(model.blocks, analyzed.layers)
    feed_forwards = [model.blocks[i].feed_forward for i in sorted(matches, key=matches.__getitem__)]
    # The inputs of the target's gates, and the draft's in their place: [T, D] by layer.
    hidden = _inputs(analyzed.routers, analyzed.model, analyzed.windows)
    drafted = _inputs(feed_forwards, model.model, analyzed.windows)
    analyzed.tell_gates(torch.cat(analyzed.windows))
    sizes = [len(window) for window in analyzed.windows]
    figures = [
        _layer_metrics(analyzed, index, hidden, drafted) for index in range(len(analyzed.layers))
    ]
    text_of_T = np.repeat(analyzed.text_of, sizes)
    texts = []
    for text in dict.fromkeys(analyzed.text_of):
        layer_means = [{n: row[n][text_of_T == text].mean() for n in row} for row in figures]
        means = {n: float(np.mean([row[n] for row in layer_means if n in row])) for n in _NAMES}
        texts.append({"text": text} | means)
    chosen: list[Array] = []
    for layer, hidden_TD in zip(analyzed.layers, hidden, strict=True):
        chosen_TE = _chosen(_ask(layer, hidden_TD)[1], layer.num_experts)
        chosen += np.split(chosen_TE, np.cumsum(sizes)[:-1])
    rows: Rows = [
        {"layer": index} | {n: float(row[n].mean()) if n in row else None for n in _NAMES}
        for index, row in enumerate(figures)
    ]
    neighbours = _neighbours(chosen)
    tables = {"drafting": rows, "drafting_texts": texts, "drafting_neighbours": neighbours}
    return Analysis(tables, partial(draw, rows), TITLE, draft)


def draw(rows: Rows) -> Any:
    """Draw the share of experts predicted rightly over the layers."""
    figure, panels = new_figure(columns=2)
    frame = pd.DataFrame(rows).set_index("layer").astype(float)
    for axes, form in zip(panels, ("top1", "topk"), strict=True):
        axes.plot(frame[[f"{name}_{form}" for name in _PREDICTORS]], marker="o")
        axes.set(xlabel="MoE layer", ylim=(0, 1.05))
    panels[0].set_ylabel("heaviest expert predicted rightly")
    panels[1].set_ylabel("experts predicted rightly")
    legend(figure, dict(zip(_PREDICTORS, panels[1].lines, strict=True)))
    return figure


def _inputs(modules: Sequence[nn.Module], model: Any, windows: Sequence[Tensor]) -> list[Tensor]:
    """Return each module's inputs while the model reads the windows: [T, D] by module."""
    inputs: list[list[Tensor]] = [[] for _ in modules]

    def note(at: int, args: Any, output: Any) -> None:
        inputs[at].append(args[0].reshape(-1, args[0].shape[-1]))

    with watched(modules, note), torch.no_grad():
        for window in windows:
            model(window[None].to(device_of(model)))
    return [torch.cat(parts) for parts in inputs]


def _layer_metrics(
    analyzed: AnalyzedModel, at: int, hidden: Sequence[Tensor], drafted: Sequence[Tensor]
) -> dict[str, Array]:
    """Return each value of a layer by token, [T]."""
    layer, geometry = analyzed.layers[at], analyzed.geometry
    top_k, num_experts = geometry.top_k, geometry.num_experts
    logits_TE, experts_TK = _ask(layer, hidden[at])
    counts_TE = _counts_before(_chosen(experts_TK, num_experts))
    draft_TE = _ask(layer, drafted[at])[0]
    # What prefetching takes, where token ids decide and not the logits alone.
    guesses = {"draft": drafted[at]} | ({"next_gate": hidden[at - 1]} if at else {})
    predictions = {n: layer.gate.predict(h).float().cpu().numpy() for n, h in guesses.items()}
    predictions["frequency"] = counts_TE
    cosine = nn.functional.cosine_similarity(hidden[at].float(), drafted[at].float())
    figures = {
        "cosine": cosine.cpu().numpy(),
        "router_entropy": _entropy(logits_TE),
        "random_top1": np.full(len(logits_TE), 1 / num_experts),
        "random_topk": np.full(len(logits_TE), top_k / num_experts),
        "draft_entropy": _entropy(draft_TE),
        "frequency_entropy": _entropy(np.log(counts_TE + 1e-9)),
    }
    for name, scores_TE in predictions.items():
        guess_TK = best(scores_TE, top_k)
        figures[f"{name}_top1"] = guess_TK[:, 0] == experts_TK[:, 0]
        figures[f"{name}_topk"] = count_right(guess_TK, experts_TK) / top_k
    return figures


def _neighbours(windows: Sequence[Array]) -> Rows:
    """Return a row for each number of neighbouring tokens, as means over layers and positions.

    `activated`: share of a layer's experts that they choose together; `if_independent`: the same
    if each token drew its experts at random; `common`: share of the last one's experts that the
    first one chooses, too; `any_common`: share of the positions with any such expert.
    """
    num_experts, top_k = windows[0].shape[1], int(windows[0][0].sum())
    rows = []
    for count in _NEIGHBOURS:
        parts = [
            np.lib.stride_tricks.sliding_window_view(window, count, axis=0)
            for window in windows
            if len(window) >= count
        ]
        if not parts:
            break
        activated = np.concatenate([part.any(axis=-1).mean(axis=-1) for part in parts])
        shared = np.concatenate([(part[..., 0] & part[..., -1]).sum(axis=-1) for part in parts])
        rows.append(
            {
                "tokens": count,
                "activated": float(activated.mean()),
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


def _chosen(experts_TK: Array, num_experts: int) -> Array:
    """Return whether each token chose each expert: [T, E]."""
    chosen_TE = np.zeros((len(experts_TK), num_experts), dtype=bool)
    np.put_along_axis(chosen_TE, experts_TK, True, axis=-1)
    return chosen_TE


def _counts_before(chosen_TE: Array) -> Array:
    """Return how often each expert was chosen by the tokens before each one: [T, E]."""
    counts: Array = chosen_TE.cumsum(axis=0, dtype=np.float64) - chosen_TE
    return counts


def _entropy(logits_TE: Array) -> Array:
    """Return the entropy of each token's distribution over experts, in bits."""
    shares = softmax(logits_TE.astype(np.float32)).astype(np.float64)
    return np.asarray(entropy(shares, base=2, axis=-1))
