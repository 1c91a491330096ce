"""A model seen through plain transformers hooks: its routing, its experts and what swaps cost.

Shapes: T tokens, E experts, K top-k, D hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from specimen_routing import Routing
from torch import Tensor, nn
from transformers import PreTrainedModel

Swap = Callable[[int, Tensor, Tensor], Tensor]


def moe_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks with a router `gate` and stacked `experts`, in layer order."""
    return [one for one in model.modules() if hasattr(one, "gate") and hasattr(one, "experts")]


@contextmanager
def router_calls(model: PreTrainedModel) -> Iterator[list[list[tuple[Tensor, Tensor]]]]:
    """Collects (input_TD, logits_TE) of each layer's router, one entry a forward pass."""
    seen = [list[tuple[Tensor, Tensor]]() for _ in moe_blocks(model)]

    def watch(layer: int) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
            x_TD = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
            seen[layer].append((x_TD, output[0].detach()))

        return hook

    handles = [
        block.gate.register_forward_hook(watch(layer))
        for layer, block in enumerate(moe_blocks(model))
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def observe(model: PreTrainedModel, ids: list[int]) -> list[tuple[Tensor, Tensor]]:
    """(router input, router logits) of each layer over one text."""
    with router_calls(model) as seen:
        model(input_ids=torch.tensor([ids]))
    return [layer[0] for layer in seen]


def routing_of(model: PreTrainedModel, calls: list[tuple[Tensor, Tensor]]) -> Routing:
    """The same, as a trace of one token after another."""
    top_k = int(model.config.num_experts_per_tok)
    best = [logits.softmax(-1).topk(top_k) for _, logits in calls]
    experts = [layer.indices.tolist() for layer in best]
    weights = [layer.values.tolist() for layer in best]
    return Routing(
        num_experts=int(model.config.num_experts),
        chosen=[list(layers) for layers in zip(*experts, strict=True)],
        weights=[list(layers) for layers in zip(*weights, strict=True)],
    )


def next_gate_recall(model: PreTrainedModel, calls: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Share of a layer's experts that its router finds in the input of the layer before, in %."""
    top_k, recalls = int(model.config.num_experts_per_tok), list[float]()
    for layer, block in enumerate(moe_blocks(model)[1:], start=1):
        guessed = (calls[layer - 1][0] @ block.gate.weight.t()).topk(top_k).indices
        real = calls[layer][1].topk(top_k).indices
        found = (guessed[:, :, None] == real[:, None, :]).any(1).float().mean()
        recalls.append(100 * float(found))
    return recalls


@torch.no_grad()
def chosen_cosine(model: PreTrainedModel, calls: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Mean cosine of the outputs of experts chosen together for a token, by layer."""
    top_k, means = int(model.config.num_experts_per_tok), list[float]()
    for block, (x_TD, logits_TE) in zip(moe_blocks(model), calls, strict=True):
        gate_up, down = block.experts.gate_up_proj.float(), block.experts.down_proj.float()
        gate, up = torch.einsum("td,eid->tei", x_TD.float(), gate_up).chunk(2, -1)
        out = torch.einsum("tei,edi->ted", nn.functional.silu(gate) * up, down)
        unit = nn.functional.normalize(out, dim=-1)
        chosen = logits_TE.topk(top_k).indices[..., None].expand(-1, -1, unit.shape[-1])
        unit = unit.gather(1, chosen)
        pairs = unit @ unit.mT
        means.append(float((pairs.sum((1, 2)) - top_k).mean() / (top_k * (top_k - 1))))
    return means


@contextmanager
def swapped(model: PreTrainedModel, swap: Swap) -> Iterator[None]:
    """Routes tokens to `swap(layer, index_TK, weights_TK)` instead of their experts."""

    def hook_of(layer: int) -> Callable[..., Any]:
        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, index, weights = inputs
            return hidden, swap(layer, index, weights), weights

        return hook

    handles = [
        block.experts.register_forward_pre_hook(hook_of(layer))
        for layer, block in enumerate(moe_blocks(model))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def random_resident(model: PreTrainedModel, share: float, seed: int) -> Swap:
    """Each layer's LRU cache holds a share of its experts; a miss takes a random resident.

    The missing expert is loaded after the token, as if fetched in the background.
    """
    num_experts = int(model.config.num_experts)
    rng, size = Random(seed), int(share * num_experts)
    caches = [OrderedDict.fromkeys(rng.sample(range(num_experts), size)) for _ in moe_blocks(model)]

    def swap(layer: int, index: Tensor, _: Tensor) -> Tensor:
        cache, rows = caches[layer], index.tolist()
        for row, experts in enumerate(index.tolist()):
            spare = [one for one in cache if one not in experts]
            rng.shuffle(spare)
            for slot, expert in enumerate(experts):
                if expert not in cache:
                    rows[row][slot] = spare.pop() if spare else expert
            for expert in experts:
                cache[expert] = None
                cache.move_to_end(expert)
            while len(cache) > size:
                cache.popitem(last=False)
        return torch.tensor(rows, dtype=index.dtype)

    return swap


def last_rank(model: PreTrainedModel, seed: int) -> Swap:
    """The expert of the smallest weight gives way to a random one that was not chosen."""
    num_experts, rng = int(model.config.num_experts), Random(seed)

    def swap(_: int, index: Tensor, weights: Tensor) -> Tensor:
        rows = index.tolist()
        for row, last in zip(rows, weights.argmin(-1).tolist(), strict=True):
            row[last] = rng.choice([one for one in range(num_experts) if one not in row])
        return torch.tensor(rows, dtype=index.dtype)

    return swap
