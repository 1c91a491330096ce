"""How often a router's choice is the best one (cache-conditional experts, appendix A, Figure 10).

Shapes: T tokens that are predicted, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from tqdm import tqdm

from lm_eval_moecache.algorithms.routing.base import RoutingAlgorithm
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.report.plots import new_figure
from moecache_lab.analyzed_model import Analysis, AnalyzedModel, Rows

TITLE = "Share of tokens whose router chose the expert with which they are predicted best"


class ForcedExpert(RoutingAlgorithm):
    """Puts a given expert in the place of one rank, at one layer: the oracle of a search.

    Where a token has the expert at another rank already, its own choice stays.
    """

    source: ClassVar[str] = "Cache-conditional experts, appendix A"

    def __init__(self, geometry: Geometry, *, seed: int = 0, rank: int = 2) -> None:
        super().__init__(geometry, seed=seed)
        self.rank, self.layer = rank, -1
        self.wanted: IntArray = np.zeros(1, dtype=np.int64)
        """The expert of each token of the pass, or one for all."""
        self.own: dict[int, IntArray] = {}
        """Layer -> the router's choice [tokens, K] in the last pass."""

    def select(self, event: Event, resident: Container[int]) -> Selection | None:
        self.own[event.layer] = event.experts
        if event.layer != self.layer:
            return None
        experts, forced = event.experts.copy(), np.broadcast_to(self.wanted, len(event.experts))
        free = ~(experts == forced[:, None]).any(axis=-1)
        experts[free, self.rank - 1] = forced[free]
        return Selection(experts)


def run(analyzed: AnalyzedModel, options: Mapping[str, Any]) -> Analysis:
    """Return one row per layer: agreement, agreement by chance, and perplexities.

    The experts of all ranks but `rank` are fixed and every choice for it is tried, at one layer at
    a time; best is the one with which the token's successor is likeliest (ties go to the router's).
    A trial changes all tokens of the text at once, as trials of single tokens would take as many
    readings as there are tokens: a token's loss includes the change of those before it. `oracle` is
    the perplexity when every token gets its best expert there.
    """
    geometry, rank = analyzed.geometry, options["rank"]
    rows = []
    forced = {"routing": f"{__name__}.{ForcedExpert.__name__}", "routing.rank": rank}
    with analyzed.under(forced) as engine:
        routing = engine.rules.routing
        assert isinstance(routing, ForcedExpert)
        for layer in tqdm(range(geometry.num_layers), desc="layers"):
            searches = [_search(analyzed, routing, window, layer) for window in analyzed.windows]
            router_loss, oracle_loss, agreements = (
                sum(column) for column in zip(*searches, strict=True)
            )
            count = sum(len(window) - 1 for window in analyzed.windows)
            rows.append(
                {
                    "layer": layer,
                    "agreement": agreements / count,
                    "chance": 1 / (geometry.num_experts - geometry.top_k + 1),
                    "perplexity": float(np.exp(router_loss / count)),
                    "oracle": float(np.exp(oracle_loss / count)),
                }
            )
    return Analysis({"optimal_expert": rows}, partial(draw, rows), f"rank {rank}")


def _search(
    analyzed: AnalyzedModel, routing: ForcedExpert, window: torch.Tensor, layer: int
) -> tuple[float, float, int]:
    """Return summed losses of the router's choice and of the best, and how often they agree."""

    def losses() -> FloatArray:
        return np.asarray(analyzed.losses(window).cpu().numpy())

    routing.layer = -1
    router_T = losses()
    # The last token predicts nothing.
    chosen_TK = routing.own[layer][:-1]
    routing.layer = layer
    num_experts = analyzed.geometry.num_experts
    trial_TE = np.full((len(router_T), num_experts), np.inf, dtype=np.float32)
    for expert in range(num_experts):
        routing.wanted = np.asarray([expert])
        trial_TE[:, expert] = losses()
    # A trial of an expert that the token has at another rank has changed nothing.
    np.put_along_axis(trial_TE, chosen_TK, np.float32(np.inf), axis=-1)
    agrees_T = router_T <= trial_TE.min(axis=-1)
    best_T = np.where(agrees_T, chosen_TK[:, routing.rank - 1], trial_TE.argmin(axis=-1))
    routing.wanted = np.append(best_T, routing.own[layer][-1, routing.rank - 1])
    return float(router_T.sum()), float(losses().sum()), int(agrees_T.sum())


def draw(rows: Rows) -> Any:
    """Draw Figure 10: agreement over the layers, against chance."""
    figure, (axes,) = new_figure()
    layers = [row["layer"] for row in rows]
    axes.plot(layers, [row["agreement"] for row in rows], marker="o", label="router")
    axes.plot(layers, [row["chance"] for row in rows], linestyle="--", label="chance")
    axes.set(xlabel="MoE layer", ylabel="choice is the best")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure
