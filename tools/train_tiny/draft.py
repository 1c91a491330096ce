"""Trains `tiny-draft`, a separate dense model with as many layers as `tiny` and its width.

`python -m tools.train_tiny.draft --out DIR` starts from version 2's attention and the mean of its
experts, like version 3 (clusters.py), and then trains independently: its hidden states resemble the
model's, so that the model's routers can read them, but are not equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lm_eval_moecache.tiny import MODEL_DIR
from tools.train_tiny.batches import step_batches
from tools.train_tiny.clusters import copy_attention, query_sizes
from tools.train_tiny.tokenizer import MAX_LENGTH, VOCAB_SIZE
from tools.train_tiny.train import Plan, Training, start

NEVER = 1_000_000_000
# Batches from the middle of version 2's training, with fewer word problems and more facts than its
# last: on those the draft would predict nearly all words of a solution and too few answers.
FIRST_STEP = 720
INTERMEDIATE = 96
# Share of noise mixed into each matrix; without it the draft's hidden states equal the model's.
NOISE = 0.5


class TwinTraining(Training):
    """The dense model alone."""

    about: ClassVar[dict[str, str]] = {"from": "version 2 of tiny", "target": "../model"}

    def __init__(self, plan: Plan, out: Path, cache: Path) -> None:
        super().__init__(plan, out, cache)
        self.step = max(self.step, FIRST_STEP)

    def _tokenizer(self, cache: Path) -> PreTrainedTokenizerFast:
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(MODEL_DIR)
        return tokenizer

    @torch.no_grad()
    def first_model(self, pad_id: int, end_id: int) -> PreTrainedModel:
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=8,
            num_attention_heads=4,
            max_position_embeddings=MAX_LENGTH,
            rms_norm_eps=1e-5,
            initializer_range=0.05,
            pad_token_id=pad_id,
            bos_token_id=end_id,
            eos_token_id=end_id,
        )
        new = LlamaForCausalLM(config)
        old = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
        text, _ = step_batches(self.tokenizer, self.text, seed=self.plan.seed, step=FIRST_STEP)
        copy_attention(new, old, query_sizes(old, text.ids_BS))
        for layer, old_layer in zip(new.model.layers, old.model.layers, strict=True):
            gate_up, down = (
                weight.mean(0)
                for weight in (old_layer.mlp.experts.gate_up_proj, old_layer.mlp.experts.down_proj)
            )
            width = down.shape[1]
            gate, up = gate_up.chunk(2)
            layer.mlp.gate_proj.weight[:width] = gate
            layer.mlp.up_proj.weight[:width] = up
            layer.mlp.down_proj.weight[:, :width] = 2 * down
        torch.manual_seed(self.plan.seed)
        for name, weight in new.named_parameters():
            if "_proj" in name:
                weight.lerp_(weight.std() * torch.randn_like(weight), NOISE)
        return new


if __name__ == "__main__":
    preset = Plan(
        dense_steps=NEVER,
        steps=FIRST_STEP + 140,
        rate=2e-3,
        adam_rate=1.5e-3,
        warmup=20,
        decay_steps=80,
    )
    start(TwinTraining, preset, __doc__)
