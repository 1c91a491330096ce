"""Upcycles the dense model: experts are copies of its MLP with some neurons reinitialised.

After Nakamura et al. 2025 ("Drop-Upcycling", arXiv 2502.19261): pure copies would stay alike, new
experts would share nothing, and the experts of real upcycled models do both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import OlmoeForCausalLM

from tools.train_tiny.network import NUM_EXPERTS, TOP_K, build_config, build_model

DRAWN_SHARE = 0.5


def upcycle(dense: OlmoeForCausalLM, seed: int) -> OlmoeForCausalLM:
    """Return a model whose experts each keep a random half of the dense neurons.

    The others are reinitialised. A token's router weights sum to 1, so full copies would equal the
    dense model exactly.
    """
    config = dense.config
    torch.manual_seed(seed + 1)
    model = build_model(
        build_config(
            num_experts=NUM_EXPERTS,
            top_k=TOP_K,
            pad_id=config.pad_token_id,
            end_id=config.eos_token_id,
        )
    )
    state = model.state_dict()
    for name, weight in dense.state_dict().items():
        if "experts" not in name and "mlp.gate." not in name:
            state[name].copy_(weight)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = (dense.state_dict()[prefix + name] for name in ("gate_up_proj", "down_proj"))
        gate_up, down = (part[0] for part in parts)
        for expert in range(NUM_EXPERTS):
            neurons = torch.randperm(config.intermediate_size)
            neurons = neurons[: int(DRAWN_SHARE * len(neurons))]
            new_gate_up, new_down = redraw(gate_up, down, neurons)
            state[prefix + "gate_up_proj"][expert].copy_(new_gate_up)
            state[prefix + "down_proj"][expert].copy_(new_down)
    model.load_state_dict(state)
    return model


def redraw(gate_up: Tensor, down: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Return the MLP with the neurons `drawn` replaced by random ones of equal deviation."""
    gate_up, down = gate_up.clone(), down.clone()
    width = down.shape[1]
    for rows in (drawn, drawn + width):
        gate_up[rows] = torch.randn_like(gate_up[rows]) * gate_up.std()
    down[:, drawn] = torch.randn_like(down[:, drawn]) * down.std()
    return gate_up, down
