"""The batches of one optimizer step, a pure function of its random numbers and the mixture."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tools.train_tiny.evaluate import encode
from tools.train_tiny.skills.generator import problems
from tools.train_tiny.skills.problem import Problem
from tools.train_tiny.text import Text

# The mixtures of problems, in order of training. The later ones turn from facts, which are known by
# then, to problems of several steps; in the last one webs of lies are known as well, and word
# problems take their share.
EARLY, LATE, FINAL = range(3)
# Relative frequency of each maker, by grade; the harder or rarer grades come last.
EARLY_SHARES = {
    "gsm8k": (5, 4, 3),
    "mmlu": (9, 5, 3),
    "arc": (5, 3, 2),
    "truthfulqa": (5, 3, 2),
    "bbh/boolean_expressions": (5, 5, 3),
    "bbh/web_of_lies": (3, 3, 2),
    "bbh/object_counting": (5, 5, 3),
    "bbh/navigate": (5, 5, 2),
}
LATE_SHARES = {
    "gsm8k": (8, 5, 2),
    "mmlu": (3, 3, 3),
    "arc": (1, 1, 1),
    "truthfulqa": (1, 1, 1),
    "bbh/boolean_expressions": (4, 4, 2),
    "bbh/web_of_lies": (9, 4, 1),
    "bbh/object_counting": (9, 4, 1),
    "bbh/navigate": (9, 4, 1),
}
FINAL_SHARES = LATE_SHARES | {
    "gsm8k": (18, 7, 1),
    "bbh/web_of_lies": (3, 4, 2),
    "bbh/navigate": (6, 5, 2),
}
AUXILIARY_SHARES = {"pages": 3, "mmlu/shuffled": 5, "mmlu/open": 2, "mmlu/letters": 3}


def _by_maker(table: dict[str, tuple[int, ...]]) -> dict[str, int]:
    return {
        f"{name}/{grade}": share
        for name, shares in table.items()
        for grade, share in enumerate(shares, start=1)
    }


MAKER_SHARES = (
    AUXILIARY_SHARES | _by_maker(EARLY_SHARES),
    {"pages": 1} | _by_maker(LATE_SHARES),
    {"pages": 1} | _by_maker(FINAL_SHARES),
)
# Loss weight of a target token by skill, 1 by default: long answers would otherwise drown the
# one-token ones. The end token counts little, and the prompt only in some problems.
LATE_WEIGHTS = {"gsm8k": 0.3, "pages": 0.1, "bbh": 3.0}
TARGET_WEIGHTS = (LATE_WEIGHTS | {"letters": 0.2, "bbh": 1.5}, LATE_WEIGHTS, LATE_WEIGHTS)
END_WEIGHT = 0.1
PROMPT_WEIGHT = 0.05
ROW_LENGTH = 256
PROMPT_SHARE = 0.15
NUM_ROWS = 8
# Rows of English and their length.
TEXT_SHAPE = 4, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B rows of S tokens. `weights` is the loss weight of predicting each token.

    `document_BS` numbers the problems of a packed row, which attend only to themselves; -1 is
    padding.
    """

    ids_BS: Tensor
    weights_BS: Tensor
    document_BS: Tensor | None = None

    @property
    def mask(self) -> Tensor | None:
        """(B, 1, S, S), added to the attention scores; None if rows are not packed."""
        if self.document_BS is None:
            return None
        same_document = self.document_BS[:, None, :, None] == self.document_BS[:, None, None, :]
        visible = same_document & torch.ones(same_document.shape[-2:], dtype=torch.bool).tril()
        return torch.zeros(same_document.shape).masked_fill(
            ~visible, torch.finfo(torch.float32).min
        )


def _weighted(
    tokenizer: PreTrainedTokenizerFast, problem: Problem, rng: Random, mixture: int
) -> tuple[list[int], list[float]]:
    prompt, target = encode(tokenizer, problem)
    on_prompt = PROMPT_WEIGHT if rng.random() < PROMPT_SHARE else 0.0
    on_target = TARGET_WEIGHTS[mixture].get(problem.skill, 1.0)
    weights = [0.0, *[on_prompt] * (len(prompt) - 1), *[on_target] * len(target)]
    weights[-1] *= END_WEIGHT
    return prompt + target, weights


def skill_batch(tokenizer: PreTrainedTokenizerFast, rng: Random, mixture: int) -> Batch:
    """Pack problems into rows in order; a problem that no longer fits opens the next row."""
    pad_id = int(tokenizer.convert_tokens_to_ids(str(tokenizer.pad_token)))
    shares, shape = MAKER_SHARES[mixture], (NUM_ROWS, ROW_LENGTH)
    ids, weights, document = torch.full(shape, pad_id), torch.zeros(shape), torch.full(shape, -1)
    streams = {name: problems(name, "train", rng) for name in shares}
    row = start = number = 0
    while True:
        name = rng.choices(list(shares), list(shares.values()))[0]
        tokens, weight = _weighted(tokenizer, next(streams[name]), rng, mixture)
        if len(tokens) > ROW_LENGTH:
            continue
        if start + len(tokens) > ROW_LENGTH:
            row, start = row + 1, 0
        if row == NUM_ROWS:
            return Batch(ids_BS=ids, weights_BS=weights, document_BS=document)
        place = slice(start, start + len(tokens))
        ids[row, place], weights[row, place] = torch.tensor(tokens), torch.tensor(weight)
        document[row, place] = number
        start, number = start + len(tokens), number + 1


def text_batch(text: Text, rng: Random) -> Batch:
    ids = text.rows(rng, *TEXT_SHAPE)
    weights = torch.ones(ids.shape)
    weights[:, 0] = 0.0
    return Batch(ids_BS=ids, weights_BS=weights)
