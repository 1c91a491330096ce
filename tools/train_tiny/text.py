"""Windows of real English: one token stream per package, documents separated by the end token."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tools.train_tiny.corpus import read_documents
from tools.train_tiny.packages import PACKAGES
from tools.train_tiny.tokenizer import END

# More than a run reads from any package.
MOST_CHARS = 12_000_000


def encode_package(index: int, tokenizer: PreTrainedTokenizerFast, cache: Path) -> np.ndarray:
    """Tokenise a package's training documents in a fixed random order, up to MOST_CHARS."""
    documents = read_documents(PACKAGES[index], cache)["train"]
    Random(f"documents/{index}").shuffle(documents)
    end, size, chosen = int(tokenizer.convert_tokens_to_ids(END)), 0, list[str]()
    while documents and size < MOST_CHARS:
        chosen.append(documents.pop())
        size += len(chosen[-1])
    ids = list[int]()
    for document_ids in tokenizer(chosen).input_ids:
        ids += [*document_ids, end]
    return np.array(ids, dtype=np.int16)


class Text:
    """Token streams of all packages, encoded once and stored next to the run."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, cache: Path, kept: Path) -> None:
        self.streams = list[np.ndarray]()
        kept.mkdir(parents=True, exist_ok=True)
        for index, package in enumerate(PACKAGES):
            file = kept / f"{package.name}.npy"
            if not file.exists():
                np.save(file, encode_package(index, tokenizer, cache))
            self.streams.append(np.load(file, mmap_mode="r"))
        self.weights = [package.weight for package in PACKAGES]

    def rows(self, rng: Random, count: int, length: int) -> Tensor:
        """Draw `count` windows of `length` tokens, each from one package."""
        chosen = list[np.ndarray]()
        for stream in rng.choices(self.streams, self.weights, k=count):
            start = rng.randrange(len(stream) - length)
            chosen.append(np.asarray(stream[start : start + length], dtype=np.int64))
        return torch.from_numpy(np.stack(chosen))
