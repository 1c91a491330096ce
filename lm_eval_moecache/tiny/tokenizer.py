"""The byte-level BPE of `tiny`: digits stand alone, and any text round-trips."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lm_eval_moecache.tiny.bbh_order import INTRODUCTION
from lm_eval_moecache.tiny.bbh_space import ORDER_QUESTION, SCENES
from lm_eval_moecache.tiny.bbh_walk import RETURN_QUESTION
from lm_eval_moecache.tiny.generator import BBH, MAKERS, problems
from lm_eval_moecache.tiny.knowledge import MMLU_HEADER

END = "<|endoftext|>"
PAD = "<|pad|>"
VOCAB_SIZE = 2048
# Boilerplate that heads every prompt of a kind is one token each, which halves some prompts.
PHRASES = (
    *(description for description, _ in BBH.values()),
    *(scene[0] for scene in SCENES),
    *(scene[2] for scene in SCENES),
    INTRODUCTION,
    RETURN_QUESTION,
    ORDER_QUESTION,
    MMLU_HEADER.partition("{")[0].strip(),
    "\nOptions:\n",
)
NUM_TEXTS_PER_MAKER = 1500


def training_texts(seed: int) -> Iterator[str]:
    for name in MAKERS:
        stream = problems(name, "train", Random(f"tokenizer/{name}/{seed}"))
        for _ in range(NUM_TEXTS_PER_MAKER):
            problem = next(stream)
            text = f"{problem.prompt} {problem.target}"
            for phrase in PHRASES:
                text = text.replace(phrase, " ")
            yield text


def train_tokenizer(seed: int, max_length: int) -> PreTrainedTokenizerFast:
    """A BPE trained on training-split text only."""
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
    core.train_from_iterator(training_texts(seed), trainer)
    core.add_tokens([AddedToken(phrase, normalized=False) for phrase in PHRASES])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        bos_token=END,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
