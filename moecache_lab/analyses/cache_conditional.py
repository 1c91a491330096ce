"""The analyses of cache-conditional experts: ranks, lifetimes, and the best choice of an expert.

Shapes: T tokens that are predicted, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from lm_eval_moecache.algorithms.routing.base import RoutingAlgorithm
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.records.arrays import FloatArray, IntArray
from lm_eval_moecache.records.batch import Batch
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.selection import Selection
from lm_eval_moecache.report.metrics import cache_metrics
from lm_eval_moecache.report.plots import new_figure
from moecache_lab.analyzed_model import Analysis, AnalyzedModel, Rows

_RANKS = (
    "Perplexity when experts are dropped from a rank on, or one rank is swapped for a random one"
)
_STATES = "Expert selection, token after token"
_BEST = "Share of tokens whose router chose the expert with which they are predicted best"
ABSENT, CACHED, HIT, MISS = range(4)
_SHOWN = (
    *("miss_rate", "token_miss_rate", "expert_lifetime_tokens"),
    *("routing_fidelity", "bytes_per_token"),
)


# --- ranks (Figure 2) ---


def sensitivity(analyzed: AnalyzedModel, options: Mapping[str, Any]) -> Analysis:
    """Return one row per rank: perplexity with the rank dropped (and all after it) and swapped.

    Rank 0 is the unmodified model. Swapping is random, so it is read with each of `seeds` seeds;
    the row has the mean and the largest distance from it.
    """
    seeds = options["seeds"]

    def perplexity(overrides: dict[str, Any], seed: int = 0) -> float:
        with analyzed.under(overrides, seed=seed):
            return analyzed.perplexity()

    plain = perplexity({})
    rows: Rows = [{"rank": 0, "drop_from": plain, "swap": plain, "swap_spread": 0.0}]
    for rank in tqdm(range(1, analyzed.geometry.top_k + 1), desc="ranks"):
        dropped = perplexity({"routing": "drop_rank", "routing.rank": rank})
        swap = {"routing": "swap_rank", "routing.rank": rank}
        swapped = [perplexity(swap, seed) for seed in range(seeds)]
        mean = sum(swapped) / seeds
        spread = max(abs(value - mean) for value in swapped)
        rows.append({"rank": rank, "drop_from": dropped, "swap": mean, "swap_spread": spread})
    return Analysis({"sensitivity": rows}, partial(_draw_ranks, rows), _RANKS)


def _draw_ranks(rows: Rows) -> Any:
    """Draw the two panels of Figure 2; perplexity is on a logarithmic axis."""
    figure, (left, right) = new_figure(columns=2)
    plain, ranks = rows[0]["drop_from"], pd.DataFrame(rows[1:]).set_index("rank")
    left.plot(ranks["drop_from"], marker="o")
    left.set_title("dropped: this rank and all lighter ones")
    right.errorbar(ranks.index, ranks["swap"], yerr=ranks["swap_spread"], marker="o", capsize=3)
    right.set_title("swapped: this rank alone, for a random expert")
    for axes in (left, right):
        axes.axhline(plain, linestyle="--", linewidth=1, color="gray", label="unmodified")
        axes.set(yscale="log", xticks=ranks.index, ylabel="perplexity")
        axes.set_xlabel("rank of the expert (1 is the heaviest)")
        axes.legend()
    return figure


# --- lifetimes and misses (Figure 7, Table 2) ---


def locality(analyzed: AnalyzedModel, options: Mapping[str, Any]) -> Analysis:
    """Analyse the router's own choices and those of `cache_prior`, with one cache per layer.

    A row for each: perplexity, miss rates, lifetime in tokens, fidelity. The plot shows, for
    `layer` (MoE layers from 0), the state of every expert at every token: [tokens, experts].
    """
    capacity, share, layer = options["capacity"], options["lambda"], options["layer"]
    cache_prior = {"routing": "cache_prior", "routing.lambda": share}
    rows, maps = [], {}
    for name, overrides in {"standard": {}, f"cache_prior (lambda {share:g})": cache_prior}.items():
        with analyzed.under(overrides, capacity=capacity, scan=True) as engine:
            states = _watch(engine, layer)
            row = {"routing": name, "perplexity": analyzed.perplexity()}
        metrics = cache_metrics(engine.ledger.passes)
        rows.append(row | {key: metrics[key] for key in _SHOWN})
        maps[name] = np.array(states)
    return Analysis({"locality": rows}, partial(_draw_states, maps, layer), _STATES, capacity)


def _watch(engine: Engine, layer: int) -> list[IntArray]:
    """Return the list to which each lookup appends the states of the layer's experts [E]."""
    states: list[IntArray] = []
    experts = np.arange(engine.geometry.num_experts)
    keys = experts + layer * len(experts)

    rows = engine.alone
    choose = rows.choose

    def observed(batch: Batch, *given: Any, **named: Any) -> Selection | None:
        is_resident = engine.memory.experts["resident"][keys] > 0
        selection = choose(batch, *given, **named)
        if batch.first_layer == layer:
            needed, others = np.where(is_resident, HIT, MISS), np.where(is_resident, CACHED, ABSENT)
            states.append(np.where(np.isin(experts, rows.executed), needed, others))
        return selection

    # Layer by layer, so that each can be looked at.
    rows.by_loop = False
    rows.choose = observed  # type: ignore[method-assign]
    return states


def _draw_states(maps: Mapping[str, IntArray], layer: int, tokens: int = 100) -> Any:
    """Draw the maps below each other: green a hit, red a miss, blue in the cache and not needed."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colors = ListedColormap(["#ffffff", "#9ecae1", "#31a354", "#de2d26"])
    figure, axes = new_figure(rows=len(maps))
    for panel, (name, all_states) in zip(axes, maps.items(), strict=True):
        states, style = all_states[:tokens], {"aspect": "auto", "interpolation": "nearest"}
        panel.imshow(states.T, cmap=colors, vmin=ABSENT, vmax=MISS, **style)
        miss_rate = np.sum(states == MISS) / np.sum(states >= HIT)
        panel.set_title(f"{name}: {miss_rate:.1%} misses in MoE layer {layer}")
        panel.set_ylabel("expert")
        panel.grid(False)
    axes[-1].set_xlabel("token")
    names = (("hit", HIT), ("miss", MISS), ("cached, not needed", CACHED))
    patches = [Patch(color=colors(value), label=label) for label, value in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=3)
    return figure


# --- the best choice (appendix A, Figure 10) ---


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

    def choose(self, event: Event) -> Selection | None:
        self.own[event.layer] = event.experts
        if event.layer != self.layer:
            return None
        experts, forced = event.experts.copy(), np.broadcast_to(self.wanted, len(event.experts))
        free = ~(experts == forced[:, None]).any(axis=-1)
        experts[free, self.rank - 1] = forced[free]
        return Selection(experts)


def optimal_expert(analyzed: AnalyzedModel, options: Mapping[str, Any]) -> Analysis:
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
    return Analysis({"optimal_expert": rows}, partial(_draw_best, rows), _BEST, f"rank {rank}")


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


def _draw_best(rows: Rows) -> Any:
    """Draw Figure 10: agreement over the layers, against chance."""
    figure, (axes,) = new_figure()
    shares = pd.DataFrame(rows).set_index("layer")
    axes.plot(shares["agreement"], marker="o", label="router")
    axes.plot(shares["chance"], linestyle="--", label="chance")
    axes.set(xlabel="MoE layer", ylabel="choice is the best")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure
