"""How much of a layer's output a carved layer misses, by groups of neurons, k and what is fitted.

Usage: python -m examples.carved_gemma.curve --out results/real_lm

Writes carving.csv, carving.md and carving.png: three layers on the dense model's inputs; shares of
the output's variance on tokens that nothing was fitted on.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from examples.carved_gemma import carving
from examples.carved_gemma.carve import LENGTH, RIDGES, attend, ids_of
from examples.carved_gemma.carving import MaskedFFN, Shape
from examples.carved_gemma.dense import dense_folder, loaded
from examples.carved_gemma.text import windows

LAYERS = (2, 9, 16)
TOPS = (8, 12, 16, 20, 24)
NUM_WINDOWS = 8
CUTS = {
    "by use, 4 always on": Shape(linear_path=False),
    "by use": Shape(num_shared=0, linear_path=False),
    "at random": Shape(num_shared=0, linear_path=False),
}
FITS = ("best k, known afterwards", "router", "router, refitted", "router, refitted, linear path")


@torch.no_grad()
def inputs(model: Any, ids: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield the measured layers and the inputs of their FFNs [T, D] in the dense model."""
    hidden = model.model.embed_tokens(ids)
    for index in range(max(LAYERS) + 1):
        layer = model.model.layers[index]
        hidden = attend(model, index, hidden)
        x = layer.pre_feedforward_layernorm(hidden)
        if index in LAYERS:
            yield layer, x[:, 1:].flatten(0, 1)
        hidden = hidden + layer.post_feedforward_layernorm(layer.mlp(x))


@torch.no_grad()
def missing(layer: Any, x: Tensor, cut: str, top: int, order: Tensor) -> list[float]:
    """Return the share of the variance that each of FITS misses on the last tenth of the tokens."""
    shape = Shape(num_shared=CUTS[cut].num_shared, top=top, linear_path=False)
    last = slice(len(x) * 9 // 10, None)
    found = []

    def share(ffn: MaskedFFN, target: Tensor) -> float:
        error = ffn(x[last]) - target[last]
        return float((error.square().sum(1) / target[last].square().sum(1)).mean())

    ffn = MaskedFFN(layer.mlp, shape, order)
    hidden = ffn.neurons(x)
    target = nn.functional.linear(hidden, ffn.down_proj)
    ffn.choose = carving.by_energy(ffn)
    found.append(share(ffn, target))
    ffn.choose = None
    carving.fit_router(ffn, x, hidden)
    found.append(share(ffn, target))
    with_path = MaskedFFN(layer.mlp, Shape(num_shared=shape.num_shared, top=top), order)
    with_path.router.load_state_dict(ffn.router.state_dict())
    for fitted in (ffn, with_path):
        carving.refit(fitted, x, hidden, target, RIDGES)
        found.append(share(fitted, target))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/real_lm"))
    parser.add_argument("--work", type=Path, default=Path("output/carved_gemma"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = dense_folder(options.work)
    text = windows("train", options.work / "text", AutoTokenizer.from_pretrained(folder), LENGTH, 3)
    rows = list[dict[str, Any]]()
    model = loaded(folder).requires_grad_(False)
    for layer, x in inputs(model, ids_of(text, NUM_WINDOWS)):
        neurons = layer.mlp.act_fn(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x)
        sizes = carving.contributions(neurons, layer.mlp.down_proj.weight)
        for cut, shape in CUTS.items():
            is_random = cut == "at random"
            order = (
                carving.at_random(sizes.shape[1]) if is_random else carving.in_groups(sizes, shape)
            )
            for top in TOPS:
                for fit, share in zip(FITS, missing(layer, x, cut, top, order), strict=True):
                    at = {"layer": layer.layer_idx}
                    rows.append({**at, "groups": cut, "top": top, "fit": fit, "missing": share})
                print(rows[-4:], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "carving.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "missing": f"{row['missing']:.4f}"} for row in rows)
    write(rows, options.out)


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """Write the mean over layers as a table and a picture."""
    from matplotlib import pyplot

    def at(cut: str, fit: str, top: int) -> float:
        return mean(
            row["missing"]
            for row in rows
            if (row["groups"], row["fit"], row["top"]) == (cut, fit, top)
        )

    lines = [
        "# What a carved layer misses of the whole one's output",
        "",
        "Share of the variance on tokens that nothing was fitted on, mean of "
        f"layers {', '.join(map(str, LAYERS))}; columns: groups of 32 that a token gets.",
        "",
        f"| groups | chosen by | {' | '.join(map(str, TOPS))} |",
        "|---|---|" + "--:|" * len(TOPS),
    ]
    figure, axes = pyplot.subplots(1, len(CUTS), figsize=(10, 3.2), sharey=True)
    for axis, cut in zip(axes, CUTS, strict=True):
        for fit in FITS:
            shares = [at(cut, fit, top) for top in TOPS]
            lines.append(f"| {cut} | {fit} | {' | '.join(f'{share:.3f}' for share in shares)} |")
            axis.plot(TOPS, shares, marker="o", label=fit)
        axis.set(title=cut, xlabel="groups of 32", xticks=TOPS)
    axes[0].set(ylabel="variance missing", ylim=(0, None))
    axes[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out / "carving.png", dpi=120)
    (out / "carving.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
