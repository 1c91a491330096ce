"""What held-out text costs without some of the routed experts, for each model given.

`python -m tools.train_tiny.ranks MODEL ...` (folders, or states in safetensors) prints, for the
first 512 tokens of 60 of the held-out pages, the loss in nats a token, and what is added to it by
keeping only the first ranks (their weights renormalised), by another expert in place of each chosen
one (index + 17, or at random), and by none.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, OlmoeForCausalLM

from lm_eval_moecache.tiny import MODEL_DIR
from tools.train_tiny.network import NUM_EXPERTS, TOP_K, build_config

PAGES = MODEL_DIR.parent / "rows" / "pages.jsonl"
NUM_PAGES, LENGTH, SHIFT = 60, 512, 17
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def load(place: Path) -> OlmoeForCausalLM:
    """Load a model's folder, or a state of version 4 whose weights sum to k."""
    if place.is_dir():
        return OlmoeForCausalLM.from_pretrained(place).float().eval()
    model = OlmoeForCausalLM(build_config(num_experts=NUM_EXPERTS, top_k=TOP_K, pad_id=0, end_id=1))
    state = {
        name: weight.float() * (TOP_K if name.endswith("experts.down_proj") else 1)
        for name, weight in load_file(place).items()
    }
    model.load_state_dict(state)
    return model.eval()


@contextmanager
def routed(model: Any, change: Change) -> Iterator[None]:
    """Change every router's weights and experts [tokens, top-k]."""

    def hook(module: Any, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (output[0], *change(output[1], output[2]))

    hooks = [layer.mlp.gate.register_forward_hook(hook) for layer in model.model.layers]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@torch.no_grad()
def loss_of(model: Any, texts: list[Tensor]) -> float:
    """Return nats a token."""
    losses = [float(model(ids, labels=ids).loss) * (ids.shape[1] - 1) for ids in texts]
    return sum(losses) / sum(ids.shape[1] - 1 for ids in texts)


def kept(num_ranks: int) -> Change:
    def change(weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        first = weights.clone()
        first[:, num_ranks:] = 0
        return first / first.sum(-1, keepdim=True) * weights.sum(-1, keepdim=True), experts

    return change


def at_random(weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    drawn = torch.rand(len(experts), NUM_EXPERTS, generator=_GENERATOR).argsort(-1)
    return weights, drawn[:, : experts.shape[1]]


_GENERATOR = torch.Generator()
CHANGES: dict[str, Change] = {
    **{f"top {ranks}": kept(ranks) for ranks in (4, 2, 1)},
    "wrong": lambda weights, experts: (weights, (experts + SHIFT) % NUM_EXPERTS),
    "random": at_random,
    "none": lambda weights, experts: (weights * 0, experts),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    pages = [json.loads(line)["page"] for line in PAGES.read_text().splitlines()[:NUM_PAGES]]
    texts = [torch.tensor([tokenizer(page).input_ids[:LENGTH]]) for page in pages]
    print(f"{'':40}{'loss':>8}", *(f"{name:>8}" for name in CHANGES))
    for place in parser.parse_args().models:
        model = load(place)
        base, cells = loss_of(model, texts), []
        for change in CHANGES.values():
            _GENERATOR.manual_seed(0)
            with routed(model, change):
                cells.append(loss_of(model, texts) - base)
        print(f"{str(place)[-40:]:40}{base:8.3f}", *(f"{cell:8.3f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
