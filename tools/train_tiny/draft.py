"""Trains the dense draft of `tiny` on what `tiny` is trained on.

`python -m tools.train_tiny.draft --out DIR` writes `DIR/model`. Give it the tokenizer of the model
first: copy `tokenizer/` (and `text/`, to save encoding it again) from the folder of its run.
"""

from __future__ import annotations

from typing import ClassVar

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tools.train_tiny.tokenizer import MAX_LENGTH, VOCAB_SIZE
from tools.train_tiny.train import Plan, Training, start

NEVER = 1_000_000_000


class DraftTraining(Training):
    """The dense stage alone, of a model half as deep and half as wide."""

    about: ClassVar[dict[str, str]] = {"target": "../model"}

    def first_model(self, pad_id: int, end_id: int) -> PreTrainedModel:
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB_SIZE,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                max_position_embeddings=MAX_LENGTH,
                initializer_range=0.05,
                pad_token_id=pad_id,
                bos_token_id=end_id,
                eos_token_id=end_id,
            )
        )


if __name__ == "__main__":
    start(DraftTraining, Plan(dense_steps=NEVER, steps=500, decay_steps=150), __doc__)
