"""Text that the dense model itself writes: what it was trained on, as far as it says so.

The books and dictionaries of text.py are few and of one kind, and matrices fitted to them alone
serve other text badly. What the model writes about WordNet's headwords needs no further source and
no benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from tools.train_tiny.corpus import read_documents
from tools.train_tiny.packages import PACKAGES

BATCH, NUM_BATCHES, LIKELIEST = 32, 3, 100
OPENINGS = (
    "{} is",
    "{} was",
    "= {} =\n\n",
    "# {}\n\n",
    "The history of {} begins",
    "Question: What do we know of {}?\nAnswer:",
)


def _headwords(folder: Path) -> list[str]:
    [package] = (package for package in PACKAGES if package.name == "dict-wn")
    documents = read_documents(package, folder)["train"]
    entries = (entry for document in documents for entry in document.split("\n\n"))
    words = (entry.split("\n")[0].strip() for entry in entries if not entry[:1].isspace())
    return sorted({word for word in words if word[:1].isupper() and len(word) < 40})


@torch.no_grad()
def _written(model: Any, tokenizer: Any, words: list[str], length: int, seed: int) -> torch.Tensor:
    """Return BATCH windows [BATCH, length], sampled among the LIKELIEST tokens."""
    rng = Random(f"samples {seed}")
    # One opening and words of as many tokens, so that no window needs padding.
    opening = rng.choice(OPENINGS)
    prompts = list[list[int]]()
    num_tokens = len(tokenizer(opening.format(rng.choice(words))).input_ids)
    while len(prompts) < BATCH:
        prompt = tokenizer(opening.format(rng.choice(words))).input_ids
        if len(prompt) == num_tokens:
            prompts.append(prompt)
    torch.manual_seed(seed)
    return model.generate(
        torch.tensor(prompts),
        do_sample=True,
        top_k=LIKELIEST,
        min_length=length,
        max_length=length,
    )


def samples(
    dense: Path, packages: Path, file: Path, tokenizer: Any, length: int
) -> Iterator[list[int]]:
    """Yield NUM_BATCHES x BATCH windows of `length` tokens, written once and kept in `file`."""
    batches = list[torch.Tensor]()
    if file.exists():
        batches = torch.load(file, weights_only=True)
    missing = range(len(batches), NUM_BATCHES)
    if missing:
        words = _headwords(packages)
        model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16).eval()
        for seed in tqdm(missing, desc="text of the dense model", unit="batch"):
            batches.append(_written(model, tokenizer, words, length, seed))
            torch.save(batches, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
    for batch in batches:
        yield from batch.tolist()
