"""A draft against its model: how alike their hidden states are, how often it says the same."""

from __future__ import annotations

from statistics import mean

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lm_eval_moecache.tiny.generator import ASKED, held_out

MOST_TOKENS = 48


@torch.no_grad()
def hidden_cosine(
    model: PreTrainedModel, draft: PreTrainedModel, texts: list[list[int]]
) -> list[float]:
    """Mean cosine of the two hidden states of a token after each layer; layers one to one."""
    by_text = list[list[float]]()
    for ids in texts:
        ours, theirs = (
            one(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[1:]
            for one in (model, draft)
        )
        pairs = zip(ours, theirs, strict=True)
        by_text.append([float(nn.functional.cosine_similarity(a, b, -1).mean()) for a, b in pairs])
    return [mean(layer) for layer in zip(*by_text, strict=True)]


@torch.no_grad()
def acceptance(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: str,
    count: int,
) -> float:
    """Share of the model's greedy tokens that the draft, given the same text, says as well.

    Up to 48 tokens after each of `count` prompts of the task, its end token included.
    """
    same = total = 0
    for problem in held_out(ASKED[task], count, seed=0):
        prompt = torch.tensor([tokenizer(problem.prompt).input_ids])
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=MOST_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        said = draft(input_ids=written).logits[0, :-1].argmax(-1)[prompt.shape[1] - 1 :]
        same += int((said == written[0, prompt.shape[1] :]).sum())
        total += len(said)
    return same / total
