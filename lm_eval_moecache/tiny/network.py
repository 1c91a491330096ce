"""The OLMoE network of `tiny` and an experts pass that is quick to train on a CPU.

Shapes: T tokens, E experts, K top-k, D hidden, N rows sent to one expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import OlmoeConfig, OlmoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lm_eval_moecache.tiny.tokenizer import VOCAB_SIZE

SORTED_EXPERTS = "tiny_sorted"
MAX_LENGTH = 4096


def build_config(*, pad_id: int, end_id: int) -> OlmoeConfig:
    return OlmoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.05,
        pad_token_id=pad_id,
        bos_token_id=end_id,
        eos_token_id=end_id,
    )


class SortedExperts(torch.autograd.Function):
    """Gated experts over rows sorted by expert.

    Written by hand because autograd's indexing of the stacked weights fills and adds a full-size
    gradient for each expert, which costs more here than the matrix products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        rows: Tensor,
        counts: list[int],
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> Tensor:
        out_TD = torch.zeros_like(x_TD)
        saved = list[tuple[Tensor, ...]]()
        parts = zip(torch.split(rows, counts), torch.split(weights, counts), strict=True)
        for expert, (token, weight) in enumerate(parts):
            x_ND = x_TD.index_select(0, token)
            hidden = x_ND @ gate_up[expert].t()
            gate, up = hidden.chunk(2, -1)
            sigmoid = torch.sigmoid(gate)
            active = sigmoid * gate * up
            y_ND = active @ down[expert].t()
            out_TD.index_add_(0, token, y_ND * weight[:, None])
            saved.append((x_ND, hidden, sigmoid, active, y_ND))
        ctx.parts, ctx.counts = saved, counts
        ctx.save_for_backward(rows, weights, gate_up, down)
        return out_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_TD = grads[0]
        rows, weights, gate_up, down = ctx.saved_tensors
        grad_x, grad_weight = torch.zeros_like(grad_TD), list[Tensor]()
        grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        parts = zip(rows.split(ctx.counts), weights.split(ctx.counts), strict=True)
        for expert, (token, weight) in enumerate(parts):
            x_ND, hidden, sigmoid, active, y_ND = ctx.parts[expert]
            grad_ND = grad_TD.index_select(0, token)
            grad_weight.append((grad_ND * y_ND).sum(1))
            grad_ND *= weight[:, None]
            torch.mm(grad_ND.t(), active, out=grad_down[expert])
            grad_active = grad_ND @ down[expert]
            gate, up = hidden.chunk(2, -1)
            slope = sigmoid * (1 + gate * (1 - sigmoid))
            grad_hidden = torch.cat((grad_active * up * slope, grad_active * gate * sigmoid), -1)
            torch.mm(grad_hidden.t(), x_ND, out=grad_gate_up[expert])
            grad_x.index_add_(0, token, grad_hidden @ gate_up[expert])
        ctx.parts = None
        return grad_x, None, None, torch.cat(grad_weight), grad_gate_up, grad_down


def sorted_experts(experts: Any, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Same result as transformers' eager experts, for its experts interface."""
    flat = index_TK.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts.num_experts).tolist()
    weights = weights_TK.reshape(-1).index_select(0, order)
    rows = order // index_TK.shape[1]
    out: Tensor = SortedExperts.apply(  # type: ignore[no-untyped-call]
        x_TD, rows, counts, weights, experts.gate_up_proj, experts.down_proj
    )
    return out


def build_model(config: OlmoeConfig) -> OlmoeForCausalLM:
    ALL_EXPERTS_FUNCTIONS.register(SORTED_EXPERTS, sorted_experts)
    model = OlmoeForCausalLM(config)
    model.set_experts_implementation(SORTED_EXPERTS)
    return model


def balance_loss(router_logits: tuple[Tensor, ...], real_T: Tensor, top_k: int) -> Tensor:
    """Switch's load-balance loss, per layer and then averaged; 1 is a perfect balance."""
    losses = list[Tensor]()
    for logits_TE in router_logits:
        probs_TE = nn.functional.softmax(logits_TE[real_T], dim=-1)
        num_experts = probs_TE.shape[-1]
        chosen = probs_TE.topk(top_k, dim=-1).indices.reshape(-1)
        share_E = torch.bincount(chosen, minlength=num_experts) / chosen.numel()
        losses.append(num_experts * (share_E * probs_TE.mean(0)).sum())
    return torch.stack(losses).mean()
