"""How far a policy moves a model's answers: routes, next tokens and their distribution.

The same text goes through the unmodified model and through the model under each policy, teacher
forced and routed token after token as if decoded, so that neither sees what the other would have
written. Letters: T tokens, V vocabulary, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from lm_eval_moecache.model.reading import watched
from lm_eval_moecache.report.metrics import MEGABYTE, cache_metrics, clustered_stderr
from lm_eval_moecache.report.plots import legend, look, new_figure
from moecache_lab.analyzed_model import Analysis, AnalyzedModel, Rows

TITLE = "What a policy changes of the output"
UNMODIFIED = "unmodified"
_OF_THE_CACHE = (
    *("routing_fidelity", "lost_weight_share", "avoided_miss_share"),
    *("miss_rate", "bytes_per_token"),
)


class Reading(NamedTuple):
    """One window as a model reads it. Logits stay in memory: T x V values."""

    tokens_T: Tensor
    logits_TV: Tensor
    experts_LTK: tuple[Tensor, ...]


def divergence(analyzed: AnalyzedModel, options: Mapping[str, Any]) -> Analysis:
    """Analyse the named `policies` under one capacity."""
    capacity = options["capacity"]
    policies = {name: {"policy": name} for name in options["policies"].split(",")}
    rows = analyze(analyzed, policies, capacity)
    return Analysis({"divergence": rows}, partial(draw, rows), TITLE, capacity)


def compare(before: Reading, after: Reading) -> dict[str, float]:
    """Compare a model's reading of a window with the unmodified model's.

    Returns sums over its `tokens` that predict another: `loss`, the negative log-likelihood of the
    text, and `kl`, the divergence of the output from the unmodified model's, in nats; `same_top`,
    tokens after which both models find the same next token likeliest; `routes`, the shares of the
    unmodified model's experts, in all layers, that the routers choose as well, before the policy
    changes their choice.
    """
    after_TV = functional.log_softmax(after.logits_TV.float(), dim=-1)
    before_TV = functional.log_softmax(before.logits_TV.float(), dim=-1)
    same = [
        (before_TK[:, :, None] == after_TK[:, None, :]).any(dim=-1).float().mean(dim=-1)
        for before_TK, after_TK in zip(before.experts_LTK, after.experts_LTK, strict=True)
    ]
    return {
        "tokens": len(after_TV),
        "loss": float(functional.nll_loss(after_TV, before.tokens_T[1:], reduction="sum")),
        "kl": float((before_TV.exp() * (before_TV - after_TV)).sum()),
        "same_top": int((after_TV.argmax(dim=-1) == before_TV.argmax(dim=-1)).sum()),
        "routes": float(torch.stack(same).mean(dim=0)[: len(after_TV)].sum()),
    }


def read_window(analyzed: AnalyzedModel, window: Tensor) -> Reading:
    """Read one window: logits after each token but the last, and each router's choice."""
    choices: list[Tensor] = []

    def note(layer: int, args: Any, output: Any) -> None:
        # The gate's own choice: a policy may have replaced the router's output.
        hidden_TD = args[0].reshape(-1, args[0].shape[-1])
        choices.append(analyzed.layers[layer].gate.ask(hidden_TD)[2].cpu())

    with watched(analyzed.routers, note):
        logits_TV = analyzed.logits(window)
    return Reading(tokens_T=window, logits_TV=logits_TV.cpu(), experts_LTK=tuple(choices))


def analyze(
    analyzed: AnalyzedModel, policies: Mapping[str, Mapping[str, Any]], capacity: str
) -> Rows:
    """Return a row for the unmodified model and for each policy: a name and what it overrides.

    The override `policy` names the composition (default on_demand). `kl_stderr` is over windows.
    With a lossless policy the divergence is 0 but for rounding.
    """
    plain = [read_window(analyzed, window) for window in analyzed.windows]
    unmodified = figures([compare(reading, reading) for reading in plain])
    rows = [{"policy": UNMODIFIED, **unmodified, **dict.fromkeys(_OF_THE_CACHE)}]
    for name, overrides in policies.items():
        with analyzed.under(overrides, capacity=capacity, scan=True) as engine:
            windows = [
                compare(reading, read_window(analyzed, reading.tokens_T)) for reading in plain
            ]
        metrics = cache_metrics(engine.ledger.passes)
        cache_columns = {key: metrics[key] for key in _OF_THE_CACHE}
        rows.append({"policy": name, **figures(windows), **cache_columns})
    return rows


def figures(windows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return perplexity and agreements over all tokens of some windows."""
    frame = pd.DataFrame(windows)
    tokens = int(frame["tokens"].sum())
    means = {name: float(total / tokens) for name, total in frame.sum().items()}
    # That of a ratio of sums over windows, as windows differ in length.
    residuals = (frame["kl"] - means["kl"] * frame["tokens"]).to_numpy()
    return {
        "tokens": tokens,
        "perplexity": math.exp(means["loss"]),
        "kl": means["kl"],
        "kl_stderr": clustered_stderr(residuals, range(len(windows)), tokens),
        "top1_agreement": means["same_top"],
        "route_agreement": means["routes"],
    }


def draw(rows: Rows) -> Any:
    """Draw the divergence of each policy over the bytes that it moves."""
    figure, (left, right) = new_figure(columns=2)
    series = {}
    for index, row in enumerate(rows[1:]):
        megabytes = row["bytes_per_token"] / MEGABYTE
        series[row["policy"]] = left.errorbar(
            megabytes, row["kl"], yerr=row["kl_stderr"] or 0.0, **look(index)
        )
        right.plot(megabytes, row["top1_agreement"], **look(index))
    left.set_ylabel("KL from the unmodified model [nats a token]")
    right.set_ylabel("same likeliest next token [of tokens]")
    for axes in (left, right):
        axes.set(xlabel="moved per token [MB]", xlim=(0, None))
    left.set_ylim(bottom=0)
    legend(figure, series)
    return figure
