"""Drafts of every quality for `tiny`, and runs that return their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM, MoECacheSpecLM
from lm_eval_moecache.tiny import MODEL_DIR
from lm_eval_moecache.tiny.documents import bbh, gsm8k
from tests.harness import make_instance

STOP = {"until": ["Q:", "\n\n"], "max_gen_toks": 32}


def prompts(count: int) -> list[str]:
    """Questions of the offline set, word problems and logic in turn."""
    word, logic = (rows(num_documents=count)["test"] for rows in (gsm8k, bbh))
    texts = [f"Question: {row['question']}\nAnswer:" for row in word]
    texts += [f"{row['description']}\n\nQ: {row['input']}\nA:" for row in logic]
    return [texts[i // 2 + (i % 2) * count] for i in range(count)]


def requests(count: int, **changes: Any) -> list[Instance]:
    texts, gen_kwargs = enumerate(prompts(count)), {**STOP, **changes}
    return [make_instance("generate_until", "gen", i, text, dict(gen_kwargs)) for i, text in texts]


def install(lm: MoECacheSpecLM, **ours: Any) -> None:
    """Put a loaded model behind another cache, with another draft."""
    lm.install(read_config({"policy": "sp_moe", "capacity": "25%", **ours}, speculative=True))


def untrained_draft(folder: Path, source: Path = MODEL_DIR, **sizes: int) -> Path:
    """The tokenizer of `tiny`, and random weights in the architecture of a shipped model."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(str(source), **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(MODEL_DIR)).save_pretrained(folder)
    return folder


def generated(lm: MoECacheLM, asked: list[Instance]) -> list[list[int]]:
    """Return the tokens of each answer, the closing one included."""
    rows: dict[int, list[int]] = {}
    inner = lm._model_generate

    def keep(context: Any, *args: Any, **kwargs: Any) -> Any:
        output = inner(context, *args, **kwargs)
        for asked_for, row in zip(lm._batch, output.tolist(), strict=True):
            own = row[context.shape[1] :]
            rows[asked_for.record.index] = own[: lm._count_output(own, kwargs["stop"])]
        return output

    lm._model_generate = keep  # type: ignore[method-assign]
    try:
        lm.generate_until(asked, disable_tqdm=True)
    finally:
        del lm._model_generate
    return [rows[index] for index in sorted(rows)]
