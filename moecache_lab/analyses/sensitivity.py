"""How much each rank of a router's choice matters (cache-conditional experts, Figure 2)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tqdm import tqdm

from lm_eval_moecache.report.plots import new_figure
from moecache_lab.analyzed_model import Analysis, AnalyzedModel, Rows

TITLE = (
    "Perplexity when experts are dropped from a rank on, or one rank is swapped for a random one"
)


def run(analyzed: AnalyzedModel, options: Mapping[str, Any]) -> Analysis:
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
    return Analysis({"sensitivity": rows}, partial(draw, rows))


def draw(rows: Rows) -> Any:
    """Draw the two panels of Figure 2; perplexity is on a logarithmic axis."""
    figure, (left, right) = new_figure(columns=2)
    plain, ranked = rows[0]["drop_from"], rows[1:]
    columns = {key: [row[key] for row in ranked] for key in rows[0]}
    ranks, spread = columns["rank"], columns["swap_spread"]
    left.plot(ranks, columns["drop_from"], marker="o")
    left.set_title("dropped: this rank and all lighter ones")
    right.errorbar(ranks, columns["swap"], yerr=spread, marker="o", capsize=3)
    right.set_title("swapped: this rank alone, for a random expert")
    for axes in (left, right):
        axes.axhline(plain, linestyle="--", linewidth=1, color="gray", label="unmodified")
        axes.set(yscale="log", xticks=ranks, ylabel="perplexity")
        axes.set_xlabel("rank of the expert (1 is the heaviest)")
        axes.legend()
    return figure
