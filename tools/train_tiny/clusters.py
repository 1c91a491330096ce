"""Makes version 3 from version 2: experts in clusters, a shared expert, unnormalised weights.

Shapes: E experts, C clusters, D hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from transformers import (
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tools.train_tiny.network import SORTED_EXPERTS, load_kernel, sorted_experts
from tools.train_tiny.tokenizer import MAX_LENGTH, VOCAB_SIZE

NUM_EXPERTS, TOP_K, NUM_CLUSTERS = 64, 8, 8
CLUSTER_SIZE = NUM_EXPERTS // NUM_CLUSTERS
# How far routers and experts are moved towards their cluster's mean at the start.
ROUTER_SHARE, EXPERT_SHARE = 0.7, 0.85
# Distance of the cluster means from the layer's mean at the start, in multiples of version 2's.
SPREAD = 2.5
# The chosen experts' weights sum to about a third at first, so their outputs are scaled up.
ROUTED_SCALE, SHARED_SCALE = 3.5, 1.0
ROUNDS = 20


def cluster_config(*, pad_id: int, end_id: int) -> Qwen2MoeConfig:
    return Qwen2MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        qkv_bias=False,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=False,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        initializer_range=0.05,
        pad_token_id=pad_id,
        bos_token_id=end_id,
        eos_token_id=end_id,
        tie_word_embeddings=False,
    )


# (share of the chosen experts to swap, generator of the draws); empty outside `swapping`.
_swap: list[tuple[float, torch.Generator]] = []


@contextmanager
def swapping(share: float, seed: int) -> Iterator[None]:
    """Replace a share of the chosen experts by random ones of other clusters, in every layer."""
    _swap.append((share, torch.Generator().manual_seed(seed)))
    try:
        yield
    finally:
        _swap.pop()


def swappable_experts(
    experts: nn.Module, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    if _swap:
        share, generator = _swap[-1]
        shape = index_TK.shape
        steps = torch.randint(CLUSTER_SIZE, NUM_EXPERTS, shape, generator=generator)
        substitutes = (index_TK - index_TK % CLUSTER_SIZE + steps) % NUM_EXPERTS
        is_swapped = torch.rand(shape, generator=generator) < share
        index_TK = torch.where(is_swapped, substitutes, index_TK)
    return sorted_experts(experts, x_TD, index_TK, weights_TK)


def build_clustered(config: Qwen2MoeConfig) -> Qwen2MoeForCausalLM:
    load_kernel()
    ALL_EXPERTS_FUNCTIONS.register(SORTED_EXPERTS, swappable_experts)
    model = Qwen2MoeForCausalLM(config)
    model.set_experts_implementation(SORTED_EXPERTS)
    return model


def balanced_clusters(rows_ED: Tensor, seed: int) -> Tensor:
    """K-means of router rows into clusters of equal size; returns E ids, cluster by cluster."""
    unit = nn.functional.normalize(rows_ED - rows_ED.mean(0), dim=-1)
    generator = torch.Generator().manual_seed(seed)
    centres = unit[torch.randperm(len(unit), generator=generator)[:NUM_CLUSTERS]]
    labels = torch.zeros(len(unit), dtype=torch.long)
    for _ in range(ROUNDS):
        seats = (unit @ centres.t()).repeat_interleave(CLUSTER_SIZE, dim=1)
        labels = torch.tensor(linear_sum_assignment(-seats.numpy())[1]) // CLUSTER_SIZE
        centres = torch.stack([unit[labels == label].mean(0) for label in range(NUM_CLUSTERS)])
        centres = nn.functional.normalize(centres, dim=-1)
    return labels.argsort(stable=True)


def aligned(gate_up: Tensor, down: Tensor, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Reorder an expert's neurons to match those of the expert `like`."""
    width = down.shape[1]

    def neurons(gate_up: Tensor, down: Tensor) -> Tensor:
        return nn.functional.normalize(torch.cat([*gate_up.chunk(2), down.t()], dim=1), dim=-1)

    likeness = neurons(*like) @ neurons(gate_up, down).t()
    order = torch.tensor(linear_sum_assignment(-likeness.numpy())[1])
    return gate_up[torch.cat([order, order + width])], down[:, order]


@torch.no_grad()
def pull_to_clusters(
    model: Qwen2MoeForCausalLM, experts: float, routers: float, push: float = 0.0
) -> None:
    """Move experts and router rows of each cluster towards its mean, and the means apart.

    Weight decay towards the cluster's mean instead of 0. Without the push all clusters learn the
    same function, and any expert could replace any other.
    """
    for layer in model.model.layers:
        for weight, share in (
            (layer.mlp.experts.gate_up_proj, experts),
            (layer.mlp.experts.down_proj, experts),
            (layer.mlp.gate.weight, routers),
        ):
            grouped = weight.view(NUM_CLUSTERS, CLUSTER_SIZE, *weight.shape[1:])
            grouped.lerp_(grouped.mean(1, keepdim=True).expand_as(grouped), share)
        spread(layer.mlp.experts.gate_up_proj, push)
        spread(layer.mlp.experts.down_proj, push)


@torch.no_grad()
def copy_attention(
    new: PreTrainedModel, old: OlmoeForCausalLM, query_sizes: list[tuple[float, float]]
) -> None:
    """Copy all of version 2 but its MLPs into a model without query and key norms.

    The projections are divided by `query_sizes`, the mean sizes by layer, instead.
    """
    state = new.state_dict()
    for name, weight in old.state_dict().items():
        if name in state and "mlp" not in name:
            state[name].copy_(weight)
    for layer, old_layer, sizes in zip(
        new.model.layers, old.model.layers, query_sizes, strict=True
    ):
        source, target = old_layer.self_attn, layer.self_attn
        target.q_proj.weight.copy_(source.q_norm.weight[:, None] * source.q_proj.weight / sizes[0])
        target.k_proj.weight.copy_(source.k_norm.weight[:, None] * source.k_proj.weight / sizes[1])


@torch.no_grad()
def cluster(
    old: OlmoeForCausalLM, query_sizes: list[tuple[float, float]], seed: int
) -> Qwen2MoeForCausalLM:
    """Return version 2's weights in the new architecture, its experts grouped by router row.

    The shared expert starts as the mean of all experts.
    """
    config = old.config
    torch.manual_seed(seed)
    new = build_clustered(cluster_config(pad_id=config.pad_token_id, end_id=config.eos_token_id))
    copy_attention(new, old, query_sizes)
    for layer, old_layer in zip(new.model.layers, old.model.layers, strict=True):
        _cluster_mlp(layer.mlp, old_layer.mlp, seed)
    pull_to_clusters(new, EXPERT_SHARE, ROUTER_SHARE)
    for layer in new.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            spread(weight, SPREAD - 1)
    return new


def spread(weight: Tensor, share: float) -> None:
    """Move clusters away from the layer's mean by a share of their distance to it."""
    grouped = weight.view(NUM_CLUSTERS, CLUSTER_SIZE, *weight.shape[1:])
    centres = grouped.mean(1, keepdim=True)
    grouped.add_(share * (centres - centres.mean(0)))


def _cluster_mlp(new: nn.Module, old: nn.Module, seed: int) -> None:
    gate_up_EID, down_EDI = old.experts.gate_up_proj, old.experts.down_proj
    shared = new.shared_expert
    for weight, mean in zip(
        (shared.gate_proj.weight, shared.up_proj.weight),
        gate_up_EID.mean(0).chunk(2),
        strict=True,
    ):
        weight.copy_(mean)
    shared.down_proj.weight.copy_(SHARED_SCALE * down_EDI.mean(0))
    new.shared_expert_gate.weight.zero_()
    order = balanced_clusters(old.gate.weight, seed)
    new.gate.weight.copy_(old.gate.weight[order])
    for place, expert in enumerate(order.tolist()):
        first = int(order[place - place % CLUSTER_SIZE])
        reference = (gate_up_EID[first], down_EDI[first])
        gate_up, down = aligned(gate_up_EID[expert], down_EDI[expert], reference)
        new.experts.gate_up_proj[place].copy_(gate_up)
        new.experts.down_proj[place].copy_(ROUTED_SCALE * down)


@torch.no_grad()
def query_sizes(model: OlmoeForCausalLM, ids_BS: Tensor) -> list[tuple[float, float]]:
    """Mean root-mean-square of the queries and of the keys before their norm, by layer."""
    sizes: list[list[float]] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
        sizes[-1].append(float(inputs[0].pow(2).mean(-1).sqrt().mean()))

    handles = [
        norm.register_forward_hook(note)
        for layer in model.model.layers
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm)
    ]
    sizes.append([])
    model(input_ids=ids_BS)
    for handle in handles:
        handle.remove()
    return list(zip(sizes[0][::2], sizes[0][1::2], strict=True))
