"""Accuracy on the offline tasks and bits per byte on held-out text, without the harness."""

from __future__ import annotations

import json
import math
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from byte_ngram import ByteNgram
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lm_eval_moecache.tiny import documents
from lm_eval_moecache.tiny.generator import ASKED, held_out
from lm_eval_moecache.tiny.problem import Problem

WINDOW = 1024
CHARS_PER_WEIGHT = 250_000


def held_out_pages() -> list[str]:
    return list(documents.wikitext()["test"]["page"])


def read_pages(file: Path) -> list[str]:
    return [json.loads(line)["page"] for line in file.read_text(encoding="utf-8").splitlines()]


def options(problem: Problem) -> tuple[list[str], int] | None:
    """What is offered as the harness scores it, and which is right; None if it is written."""
    row: Any = problem.row
    if "mc1_targets" in row:
        return row["mc1_targets"]["choices"], 0
    if "answerKey" in row:
        return row["choices"]["text"], "ABCD".index(row["answerKey"])
    if "choices" in row:
        return list("ABCD"), row["answer"]
    return None


class Scorer:
    """A model and its answers, one problem at a time, so that a cache sees them in order."""

    tasks = tuple(ASKED)

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model, self.tokenizer = model, tokenizer

    @torch.no_grad()
    def _log_likelihoods(self, prompt: str, answers: list[str]) -> list[tuple[float, bool]]:
        """Of each answer after the prompt, and whether it is what greedy decoding writes."""
        before = self.tokenizer(prompt).input_ids
        rows = [self.tokenizer(f" {answer}").input_ids for answer in answers]
        longest = max(map(len, rows))
        ids = torch.tensor([[*before, *row, *[0] * (longest - len(row))] for row in rows])
        logits = self.model(input_ids=ids).logits[:, len(before) - 1 : -1]
        found = list[tuple[float, bool]]()
        for row, row_logits in zip(rows, logits, strict=True):
            asked, ours = torch.tensor(row), row_logits[: len(row)]
            scores = ours.log_softmax(-1).gather(1, asked[:, None])
            found.append((float(scores.sum()), bool((ours.argmax(-1) == asked).all())))
        return found

    def is_right(self, problem: Problem) -> bool:
        offered = options(problem)
        if offered is None:
            return self._log_likelihoods(problem.prompt, [problem.target])[0][1]
        texts, right = offered
        scores = [score for score, _ in self._log_likelihoods(problem.prompt, texts)]
        return max(range(len(scores)), key=scores.__getitem__) == right

    def accuracy(self, task: str, count: int) -> float:
        chosen = held_out(ASKED[task], count, seed=0)
        return sum(map(self.is_right, chosen)) / len(chosen)

    @cached_property
    def _pages(self) -> list[str]:
        return held_out_pages()

    def bits_per_byte(self, pages: list[str] | None = None) -> float:
        """Each page in windows, of which only the tokens not seen before count."""
        total, pages = 0.0, pages or self._pages
        for page in pages:
            ids = [self.tokenizer.eos_token_id, *self.tokenizer(page).input_ids]
            for start in range(0, len(ids) - 1, WINDOW):
                part = torch.tensor([ids[start : start + WINDOW + 1]])
                with torch.no_grad():
                    logits = self.model(input_ids=part[:, :-1]).logits[0]
                total -= float(logits.log_softmax(-1).gather(1, part[0, 1:, None]).sum())
        return total / math.log(2) / sum(len(page.encode()) for page in pages)


def ngram_bits(cache: Path) -> float:
    """Bits per byte of the baseline, trained on documents in the mixture of the training."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tools.train_tiny.corpus import read_documents
    from tools.train_tiny.packages import PACKAGES

    texts = list[str]()
    for package in PACKAGES:
        left = package.weight * CHARS_PER_WEIGHT
        for document in read_documents(package, cache)["train"]:
            if left <= 0:
                break
            texts.append(document)
            left -= len(document)
    model = ByteNgram("\n\n".join(texts).encode())
    return model.bits_per_byte("\n\n".join(held_out_pages()).encode())
