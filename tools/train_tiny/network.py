"""The OLMoE network of `tiny` and an experts forward pass that trains fast on a CPU.

Shapes: T tokens, E experts, K top-k, D hidden, I intermediate.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.cpp_extension import load
from transformers import OlmoeConfig, OlmoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tools.train_tiny.tokenizer import MAX_LENGTH, VOCAB_SIZE

SORTED_EXPERTS = "tiny_sorted"
NUM_EXPERTS, TOP_K = 64, 8


def build_config(*, pad_id: int, end_id: int) -> OlmoeConfig:
    """The shipped shape."""
    return OlmoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.05,
        pad_token_id=pad_id,
        bos_token_id=end_id,
        eos_token_id=end_id,
    )


@cache
def load_kernel() -> None:
    """Compile the kernel once for this machine, in torch's own cache of extensions."""
    load(
        "train_tiny_experts",
        [str(Path(__file__).with_name("experts.cpp"))],
        extra_cflags=["-O3", "-march=native", "-ffast-math"],
        is_python_module=False,
    )


class SortedExperts(torch.autograd.Function):
    """Gated experts over rows sorted by expert, in C++ (experts.cpp).

    Written by hand because autograd's indexing of the stacked weights allocates and adds a
    full-size gradient for each expert, which costs more here than the matrix products.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, *rest: Tensor) -> Tensor:
        out_TD, hidden = torch.ops.train_tiny.forward(x_TD, *rest)
        ctx.save_for_backward(x_TD, *rest, hidden)
        return out_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weights, grad_gate_up, grad_down = torch.ops.train_tiny.backward(
            grads[0].contiguous(), *ctx.saved_tensors
        )
        return grad_x, None, None, grad_weights, grad_gate_up, grad_down


def sorted_experts(experts: Any, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Equals transformers' eager experts; for its experts interface."""
    flat = index_TK.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts.num_experts)
    weights = weights_TK.reshape(-1).index_select(0, order)
    rows = order // index_TK.shape[1]
    out: Tensor = SortedExperts.apply(  # type: ignore[no-untyped-call]
        x_TD, rows, counts, weights, experts.gate_up_proj, experts.down_proj
    )
    return out


def build_model(config: OlmoeConfig) -> OlmoeForCausalLM:
    load_kernel()
    ALL_EXPERTS_FUNCTIONS.register(SORTED_EXPERTS, sorted_experts)
    model = OlmoeForCausalLM(config)
    model.set_experts_implementation(SORTED_EXPERTS)
    return model


def balance_loss(router_logits: list[Tensor], top_k: int) -> Tensor:
    """Switch's load-balance loss over all tokens of a step, averaged over layers; 1 is uniform.

    Over the whole batch, not per sequence, so that experts may specialise by topic.
    """
    losses = list[Tensor]()
    for logits_TE in router_logits:
        probs_TE = nn.functional.softmax(logits_TE, dim=-1)
        num_experts = probs_TE.shape[-1]
        chosen = logits_TE.detach().topk(top_k, dim=-1).indices.reshape(-1)
        share_E = torch.bincount(chosen, minlength=num_experts) / chosen.numel()
        losses.append(num_experts * (share_E * probs_TE.mean(0)).sum())
    return torch.stack(losses).mean()


def sharpness(router_logits: list[Tensor], top_k: int) -> Tensor:
    """Mean sum of squares of a token's weights, from 1 / top_k (uniform) to 1 (a single expert)."""
    sums = list[Tensor]()
    for logits_TE in router_logits:
        weights_TK = nn.functional.softmax(logits_TE.topk(top_k, dim=-1).values, dim=-1)
        sums.append(weights_TK.square().sum(-1).mean())
    return torch.stack(sums).mean()
