"""Accuracy of a model on test-split problems, by the answer it would write greedily."""

from __future__ import annotations

import torch
from transformers import OlmoeForCausalLM, PreTrainedTokenizerFast

from lm_eval_moecache.tiny.batches import Sample, collate, encode
from lm_eval_moecache.tiny.generator import BBH_ASKED, MAKERS, MMLU_ASKED, held_out
from lm_eval_moecache.tiny.problem import Problem

EVAL_BATCH = 50


@torch.no_grad()
def share_exact(
    model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerFast, chosen: list[Problem]
) -> float:
    """Share of problems whose whole target is the greedy continuation, end token included.

    One forward pass with the target in place decides that: if each target token is the most
    likely one after its predecessors, greedy decoding writes exactly the target.
    """
    num_right = 0
    pad_id = int(tokenizer.convert_tokens_to_ids(str(tokenizer.pad_token)))
    samples = list[Sample]()
    for problem in chosen:
        prompt, target = encode(tokenizer, problem)
        weights = [0.0] * len(prompt) + [1.0] * len(target)
        samples.append(Sample(ids=prompt + target, weights=weights))
    samples.sort(key=lambda sample: len(sample.ids))
    for start in range(0, len(samples), EVAL_BATCH):
        batch = collate(samples[start : start + EVAL_BATCH], pad_id)
        best = model(input_ids=batch.ids_BS).logits[:, :-1].argmax(-1)
        wrong = (best != batch.ids_BS[:, 1:]) & (batch.weights_BS[:, 1:] > 0)
        num_right += int((~wrong.any(1)).sum())
    return num_right / len(samples)


def accuracies(
    model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerFast, *, count: int, seed: int
) -> dict[str, float]:
    """`share_exact` of every maker except the pages, which have no answer."""
    model.eval()
    scores = {
        name: round(share_exact(model, tokenizer, held_out((name,), count, seed)), 4)
        for name in dict.fromkeys((*MAKERS, *MMLU_ASKED, *BBH_ASKED))
        if name != "wikitext"
    }
    model.train()
    return scores
