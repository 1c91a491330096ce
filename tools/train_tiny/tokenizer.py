"""The byte-level BPE of `tiny`: every digit is a token, and any text round-trips."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tools.train_tiny.corpus import read_documents
from tools.train_tiny.packages import PACKAGES
from tools.train_tiny.skills.bbh import RETURN_QUESTION
from tools.train_tiny.skills.generator import AUXILIARY, BBH, MAKERS, problems
from tools.train_tiny.skills.knowledge import MMLU_HEADER

END = "<|endoftext|>"
PAD = "<|pad|>"
VOCAB_SIZE = 4096
MAX_LENGTH = 4096
# The boilerplate of each kind of prompt is one token, which halves some prompts.
PHRASES = (
    *(description for description, _ in BBH.values()),
    RETURN_QUESTION,
    MMLU_HEADER.partition("{")[0].strip(),
)
NUM_TEXTS_PER_MAKER = 300
CHARS_PER_WEIGHT = 80_000


def training_texts(seed: int, cache: Path) -> Iterator[str]:
    """Yield training-split text only: problems of each maker, documents of each package."""
    for name in MAKERS | AUXILIARY:
        stream = problems(name, "train", Random(f"tokenizer/{name}/{seed}"))
        for _ in range(NUM_TEXTS_PER_MAKER):
            problem = next(stream)
            text = f"{problem.prompt} {problem.target}"
            for phrase in PHRASES:
                text = text.replace(phrase, " ")
            yield text
    for package in PACKAGES:
        documents = read_documents(package, cache)["train"]
        Random(f"tokenizer/{package.name}/{seed}").shuffle(documents)
        budget = package.weight * CHARS_PER_WEIGHT
        while budget > 0 and documents:
            text = documents.pop()
            budget -= len(text)
            yield text


def train_tokenizer(seed: int, cache: Path) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(PHRASES),
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(training_texts(seed, cache), trainer)
    core.add_tokens([AddedToken(phrase, normalized=False) for phrase in PHRASES])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        bos_token=END,
        pad_token=PAD,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
