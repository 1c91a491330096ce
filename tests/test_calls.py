"""The model and its methods called directly, in every way that transformers and HFLM allow.

The first half asks of `MoECacheLM("tiny")` what lm-evaluation-harness' own tests ask of HFLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import DynamicCache

from lm_eval_moecache import MoECacheLM
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.tiny import MODEL_DIR
from tests.harness import choices, generations, texts

TEXT = "Tom has 3 apples. How many apples does he have?"


@pytest.fixture(scope="module")
def lm() -> MoECacheLM:
    return MoECacheLM("tiny", device="cpu", policy="specmd", max_length=64)


@pytest.fixture(scope="module")
def plain() -> HFLM:
    return HFLM(str(MODEL_DIR), device="cpu", dtype="float32", max_length=64)


def test_scores_and_answers_are_those_of_hflm(lm: MoECacheLM, plain: HFLM) -> None:
    for kind, requests in (
        ("loglikelihood", choices()),
        ("loglikelihood_rolling", texts()),
        ("generate_until", generations(3)),
    ):
        assert getattr(lm, kind)(requests, True) == getattr(plain, kind)(requests, True), kind


def test_tokens_are_encoded_and_decoded_as_in_hflm(lm: MoECacheLM, plain: HFLM) -> None:
    tokens = plain.tok_encode(TEXT)
    assert lm.tok_encode(TEXT) == tokens and lm.tok_decode(tokens) == plain.tok_decode(tokens)
    both = [lm.tok_batch_encode([TEXT, "Tom"]), plain.tok_batch_encode([TEXT, "Tom"])]
    for ours, theirs in zip(*both, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("texts", [[TEXT], [TEXT, "Tom"]])
def test_a_direct_generation_is_hflms_and_belongs_to_no_request(
    lm: MoECacheLM, plain: HFLM, texts: list[str]
) -> None:
    # What a task has left behind must not be taken for the requests of this call.
    lm.generate_until(generations(3), disable_tqdm=True)
    before = [len(record.passes) for record in lm.engine.ledger.requests]
    context, mask = lm.tok_batch_encode(texts)
    options = {"max_length": context.shape[1] + 6, "stop": ["\n\n"], "attention_mask": mask}
    assert torch.equal(
        lm._model_generate(context, **options), plain._model_generate(context, **options)
    )
    assert torch.equal(
        lm._model_generate(context[:1], context.shape[1] + 3, ["\n\n"]),
        plain._model_generate(context[:1], context.shape[1] + 3, ["\n\n"]),
    )
    assert [len(record.passes) for record in lm.engine.ledger.requests] == before


def test_a_direct_forward_is_hflms(lm: MoECacheLM, plain: HFLM) -> None:
    tokens = torch.tensor([lm.tok_encode(TEXT)])
    assert torch.equal(lm._model_call(tokens), plain._model_call(tokens))


# --- every way to call the wrapped model ---


def by_steps(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    first = model(tokens[:, :-1], past_key_values=cache, use_cache=True, **options)
    return model(tokens[:, -1:], past_key_values=first.past_key_values).logits


def embedded(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model.get_input_embeddings()(tokens)


WAYS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "tokens": lambda m, t: m(t).logits,
    "by name": lambda m, t: m(input_ids=t).logits,
    "a mask by its place": lambda m, t: m(t, torch.ones_like(t)).logits,
    "embeddings": lambda m, t: m(inputs_embeds=embedded(m, t)).logits,
    "embeddings and a mask": lambda m, t: (
        m(inputs_embeds=embedded(m, t), attention_mask=torch.ones_like(t)).logits
    ),
    "left padding": lambda m, t: m(
        torch.cat([torch.zeros_like(t[:, :3]), t], 1),
        attention_mask=torch.cat([torch.zeros_like(t[:, :3]), torch.ones_like(t)], 1),
    ).logits[:, 3:],
    "positions": lambda m, t: m(t, position_ids=torch.arange(t.shape[1])[None]).logits,
    "a cache": by_steps,
    "no cache": lambda m, t: m(t, use_cache=False).logits,
    "a tuple": lambda m, t: m(t, return_dict=False)[0],
    "the last logits": lambda m, t: m(t, logits_to_keep=1).logits,
    "hidden states": lambda m, t: m(t, output_hidden_states=True).hidden_states[-1],
    "a loss": lambda m, t: m(t, labels=t).loss,
    "the inner model": lambda m, t: m.model(t).last_hidden_state,
    "generate": lambda m, t: m.generate(t, max_new_tokens=4, do_sample=False),
    "generate of embeddings": lambda m, t: m.generate(
        inputs_embeds=embedded(m, t), max_new_tokens=4, do_sample=False
    ),
}


@pytest.mark.parametrize("policy", ["on_demand", "specmd"])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_every_call_of_the_model_is_the_plain_models(
    lm: MoECacheLM, plain: HFLM, way: str, policy: str
) -> None:
    lm.install(read_config({"policy": policy, "capacity": "25%"}))
    tokens = torch.tensor([lm.tok_encode(TEXT)] * (1 + (way == "a cache")))
    assert torch.equal(WAYS[way](lm.model, tokens), WAYS[way](plain.model, tokens))
    lm.engine.check_integrity()


def test_a_call_of_nothing_is_refused_by_name(lm: MoECacheLM) -> None:
    with pytest.raises(ValueError, match="without input_ids or inputs_embeds"):
        lm.model(use_cache=False)
