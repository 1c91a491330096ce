"""Gemma 3 whose FFNs are mixtures of experts: each is cut into groups of its neurons.

A layer's `shared_intermediate_size` neurons run for every token, `num_experts` groups of
`moe_intermediate_size` share the rest, and a token gets `num_experts_per_tok` of them. A chosen
expert's weight is the sigmoid of its logit, not renormalised. What the groups left out would add
on average is predicted linearly (`linear_path`). The experts use transformers' experts interface.

The file is copied into the folder that carve.py saves, which loads with `trust_remote_code=True`.
Shapes: T tokens, D hidden size, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3PreTrainedModel,
    Gemma3TextConfig,
    Gemma3TextModel,
)
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation


@strict
class CarvedGemma3Config(Gemma3TextConfig):
    model_type = "carved_gemma3"

    num_experts: int = 28
    num_experts_per_tok: int = 12
    moe_intermediate_size: int = 64
    shared_intermediate_size: int = 256
    linear_path: bool = True


class CarvedRouter(nn.Module):
    """Returns logits [T, E], the chosen experts' weights [T, K] and their indices [T, K]."""

    def __init__(self, config: CarvedGemma3Config) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.num_experts
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = nn.functional.linear(hidden_states.float(), self.weight.float(), self.bias.float())
        top_logits, top_indices = logits.topk(self.top_k, dim=-1)
        return logits, top_logits.sigmoid().to(hidden_states.dtype), top_indices


@use_experts_implementation
class CarvedExperts(nn.Module):
    def __init__(self, config: CarvedGemma3Config) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        shape = self.num_experts, 2 * self.intermediate_dim, self.hidden_dim
        self.gate_up_proj = nn.Parameter(torch.empty(*shape))
        shape = self.num_experts, self.hidden_dim, self.intermediate_dim
        self.down_proj = nn.Parameter(torch.empty(*shape))
        self.act_fn = ACT2FN[config.hidden_activation]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, rank = torch.where(top_k_index == expert)
            inputs = hidden_states[token]
            gate, up = nn.functional.linear(inputs, self.gate_up_proj[expert]).chunk(2, -1)
            outputs = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            output.index_add_(0, token, outputs * top_k_weights[token, rank, None])
        return output


class SharedExpert(nn.Module):
    def __init__(self, config: CarvedGemma3Config) -> None:
        super().__init__()
        width = config.hidden_size, config.shared_intermediate_size
        self.gate_proj = nn.Linear(*width, bias=False)
        self.up_proj = nn.Linear(*width, bias=False)
        self.down_proj = nn.Linear(*reversed(width), bias=False)
        self.act_fn = ACT2FN[config.hidden_activation]

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate = self.act_fn(self.gate_proj(hidden_states))
        return self.down_proj(gate * self.up_proj(hidden_states))


class CarvedMLP(nn.Module):
    def __init__(self, config: CarvedGemma3Config) -> None:
        super().__init__()
        self.gate = CarvedRouter(config)
        self.experts = CarvedExperts(config)
        self.shared_expert = SharedExpert(config) if config.shared_intermediate_size else None
        width = config.hidden_size
        self.linear_path = nn.Linear(width, width) if config.linear_path else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, experts = self.gate(flat)
        output = self.experts(flat, experts, weights)
        if self.shared_expert is not None:
            output = output + self.shared_expert(flat)
        if self.linear_path is not None:
            output = output + self.linear_path(flat)
        return output.reshape(hidden_states.shape)


class CarvedGemma3PreTrainedModel(Gemma3PreTrainedModel):
    config: CarvedGemma3Config
    config_class = CarvedGemma3Config

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        super()._init_weights(module)
        if isinstance(module, CarvedExperts | CarvedRouter):
            for parameter in module.parameters():
                init.normal_(parameter, std=self.config.initializer_range)


class CarvedGemma3TextModel(CarvedGemma3PreTrainedModel, Gemma3TextModel):
    def __init__(self, config: CarvedGemma3Config) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.mlp = CarvedMLP(config)


class CarvedGemma3ForCausalLM(CarvedGemma3PreTrainedModel, Gemma3ForCausalLM):
    def __init__(self, config: CarvedGemma3Config) -> None:
        # Gemma3ForCausalLM's own would build Gemma3TextModel, which takes no experts interface.
        Gemma3PreTrainedModel.__init__(self, config)
        self.model = CarvedGemma3TextModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
