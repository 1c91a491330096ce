"""Batches of training problems, each a pure function of the seed and the step number."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lm_eval_moecache.tiny.generator import problems
from lm_eval_moecache.tiny.problem import Problem, Split

# Shares of the drawn problems from a step on, set while watching a training run. From 400 to 2000
# they try, in vain, to bring in shuffled options by easier and easier questions; from 2000 on mmlu
# offers its choices in a fixed order and the time goes to what the tasks ask.
SHARES: dict[int, dict[str, int]] = {
    0: {
        "gsm8k": 16,
        "mmlu": 16,
        "arc": 5,
        "truthfulqa": 4,
        "wikitext": 4,
        "bbh/boolean_expressions": 10,
        "bbh/web_of_lies": 9,
        "bbh/object_counting": 12,
        "bbh/navigate": 12,
        "bbh/tracking_shuffled_objects_three_objects": 9,
        "bbh/logical_deduction_three_objects": 8,
        "bbh/hyperbaton": 3,
    },
    400: {
        "gsm8k": 17,
        "mmlu": 22,
        "mmlu/open": 7,
        "arc": 4,
        "truthfulqa": 2,
        "wikitext": 3,
        "bbh/boolean_expressions": 12,
        "bbh/web_of_lies": 3,
        "bbh/object_counting": 13,
        "bbh/navigate": 5,
        "bbh/tracking_shuffled_objects_three_objects": 12,
        "bbh/logical_deduction_three_objects": 14,
        "bbh/hyperbaton": 8,
    },
    800: {
        "gsm8k": 14,
        "mmlu": 24,
        "mmlu/easy": 14,
        "mmlu/open": 6,
        "arc": 5,
        "truthfulqa": 2,
        "wikitext": 3,
        "bbh/boolean_expressions": 26,
        "bbh/web_of_lies": 3,
        "bbh/object_counting": 20,
        "bbh/navigate": 4,
    },
    1800: {
        "gsm8k": 8,
        "mmlu": 20,
        "mmlu/copy": 20,
        "mmlu/easy": 20,
        "mmlu/open": 4,
        "arc": 5,
        "truthfulqa": 3,
        "wikitext": 3,
        "bbh/boolean_expressions": 14,
        "bbh/web_of_lies": 5,
        "bbh/object_counting": 22,
        "bbh/navigate_long": 14,
    },
    2000: {
        "gsm8k": 10,
        "mmlu/fixed": 26,
        "arc": 5,
        "truthfulqa": 3,
        "wikitext": 3,
        "bbh/boolean_expressions": 16,
        "bbh/web_of_lies": 5,
        "bbh/object_counting": 30,
        "bbh/navigate_long": 22,
    },
}
# Weight of one target token by skill, 1 where not named, and of the end token relative to it.
# Long answers would otherwise drown the one-token ones.
TARGET_WEIGHTS: dict[int, dict[str, float]] = {
    0: {"gsm8k": 0.3, "wikitext": 0.1},
    1800: {"gsm8k": 0.15, "wikitext": 0.05, "mmlu": 3.0, "bbh": 2.0},
}
END_WEIGHTS = {0: 1.0, 1800: 0.1}
PROMPT_WEIGHT = 0.03
PROMPT_SHARE = 0.15
END_PREFIX_SHARE = 0.1

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Token ids and the loss weight of predicting each of them."""

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B rows of S tokens, right-padded; `weights` is 0 on padding and unscored tokens."""

    ids_BS: Tensor
    weights_BS: Tensor
    real_BS: Tensor


def encode(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> tuple[list[int], list[int]]:
    """Prompt ids and target ids, split where lm-eval splits context and continuation."""
    end = [int(tokenizer.convert_tokens_to_ids(str(tokenizer.eos_token)))]
    if not problem.prompt:
        return end, [*tokenizer(problem.target).input_ids, *end]
    prompt = list(tokenizer(problem.prompt).input_ids)
    return prompt, [*tokenizer(f" {problem.target}").input_ids, *end]


def _at(table: dict[int, Entry], step: int) -> Entry:
    """The entry in force at a step."""
    return table[max(start for start in table if start <= step)]


def _sample(tokenizer: PreTrainedTokenizerFast, problem: Problem, rng: Random, step: int) -> Sample:
    prompt, target = encode(tokenizer, problem)
    if problem.prompt and rng.random() < END_PREFIX_SHARE:
        prompt = [target[-1], *prompt]
    on_prompt = PROMPT_WEIGHT if rng.random() < PROMPT_SHARE else 0.0
    on_target = _at(TARGET_WEIGHTS, step).get(problem.skill, 1.0)
    weights = [0.0, *[on_prompt] * (len(prompt) - 1), *[on_target] * len(target)]
    weights[-1] *= _at(END_WEIGHTS, step)
    return Sample(ids=prompt + target, weights=weights)


def collate(samples: list[Sample], pad_id: int) -> Batch:
    longest = max(len(sample.ids) for sample in samples)
    ids = torch.full((len(samples), longest), pad_id)
    weights = torch.zeros(len(samples), longest)
    real = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        weights[row, : len(sample.ids)] = torch.tensor(sample.weights)
        real[row, : len(sample.ids)] = True
    return Batch(ids_BS=ids, weights_BS=weights, real_BS=real)


def _by_length(samples: list[Sample], num_groups: int) -> list[list[Sample]]:
    """Groups of like length with about the same number of tokens each."""
    groups = [list[Sample]() for _ in range(num_groups)]
    total, seen = sum(len(sample.ids) for sample in samples), 0
    for sample in sorted(samples, key=lambda one: len(one.ids)):
        groups[seen * num_groups // total].append(sample)
        seen += len(sample.ids)
    return [group for group in groups if group]


def step_batches(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, step: int, num_tokens: int, num_batches: int
) -> list[Batch]:
    """The batches of one optimizer step: about `num_tokens` tokens, grouped by length."""
    rng = Random(f"batch/{seed}/{step}")
    split: Split = "train"
    shares = _at(SHARES, step)
    streams = {name: problems(name, split, rng) for name in shares}
    samples, total = list[Sample](), 0
    while total < num_tokens:
        problem = next(streams[rng.choices(list(shares), list(shares.values()))[0]])
        samples.append(_sample(tokenizer, problem, rng, step))
        total += len(samples[-1].ids)
    pad_id = int(tokenizer.convert_tokens_to_ids(str(tokenizer.pad_token)))
    return [collate(group, pad_id) for group in _by_length(samples, num_batches)]
