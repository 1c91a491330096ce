"""Accuracy of a model on test-split problems by exact match of its greedy answer."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tools.train_tiny.skills.problem import Problem

EVAL_BATCH = 50


def encode(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> tuple[list[int], list[int]]:
    """Return prompt ids and target ids, split where lm-eval splits context and continuation."""
    end = [int(tokenizer.convert_tokens_to_ids(str(tokenizer.eos_token)))]
    if not problem.prompt:
        return end, [*tokenizer(problem.target).input_ids, *end]
    prompt = list(tokenizer(problem.prompt).input_ids)
    return prompt, [*tokenizer(f" {problem.target}").input_ids, *end]


@torch.no_grad()
def share_exact(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, chosen: list[Problem]
) -> float:
    """Return the share of problems whose greedy continuation is the target, end token included.

    One teacher-forced forward pass suffices: if each target token is the likeliest after its
    predecessors, greedy decoding writes exactly the target.
    """
    num_right = 0
    encoded = sorted(
        (encode(tokenizer, problem) for problem in chosen), key=lambda pair: sum(map(len, pair))
    )
    for start in range(0, len(encoded), EVAL_BATCH):
        group = encoded[start : start + EVAL_BATCH]
        longest = sum(map(len, group[-1]))
        ids, is_target = torch.zeros(2, len(group), longest, dtype=torch.long)
        for row, (prompt, target) in enumerate(group):
            sequence = prompt + target
            ids[row, : len(sequence)] = torch.tensor(sequence)
            is_target[row, len(prompt) : len(sequence)] = 1
        best = model(input_ids=ids).logits[:, :-1].argmax(-1)
        wrong = (best != ids[:, 1:]) & (is_target[:, 1:] > 0)
        num_right += int((~wrong.any(1)).sum())
    return num_right / len(chosen)
