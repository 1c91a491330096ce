"""An already loaded model and tokenizer, as `--model hf` takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.spec_lm import MoECacheSpecLM
from tests.conftest import Checkpoint
from tests.harness import answers

Loaded = tuple[Any, Any]


@pytest.fixture
def loaded(checkpoint: Checkpoint) -> Loaded:
    folder = checkpoint("olmoe")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def test_a_loaded_model_runs_as_the_same_model_by_name(
    loaded: Loaded, checkpoint: Checkpoint
) -> None:
    model, tokenizer = loaded
    settings: dict[str, Any] = {"policy": "specmd", "max_length": 48}
    ours = MoECacheLM(pretrained=model, tokenizer=tokenizer, **settings)
    named = MoECacheLM(pretrained=str(checkpoint("olmoe")), device="cpu", **settings)
    assert answers(ours) == answers(named)
    assert ours.report() == named.report()


def test_the_model_is_given_back_as_it_was(loaded: Loaded) -> None:
    model, tokenizer = loaded
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        before = model(tokens).logits
        lm = MoECacheLM(pretrained=model, tokenizer=tokenizer, policy="on_demand")
        lm.wrapped.unwrap()
        assert torch.equal(model(tokens).logits, before)
    assert model.get_experts_implementation() != "moecache"


def test_a_loaded_model_may_draft_for_itself(loaded: Loaded) -> None:
    model, tokenizer = loaded
    lm = MoECacheSpecLM(
        pretrained=model, tokenizer=tokenizer, draft="self:int8", policy="on_demand"
    )
    assert lm.report()["draft"]["name"] == "self:int8"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"clock": "wall"}, "clock='wall' does not go with a model that is already loaded"),
        ({"precision": "int8"}, "precision='int8' does not go with a model that is already"),
        ({"dtype": "float16"}, "dtype='float16' has no effect on a model that is already loaded"),
        ({"subfolder": "x"}, "subfolder='x' has no effect"),
    ],
    ids=str,
)
def test_what_only_loading_can_do_is_refused(
    loaded: Loaded, given: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        MoECacheLM(pretrained=loaded[0], tokenizer=loaded[1], **given)


def test_a_model_is_in_one_cache_at_a_time(loaded: Loaded) -> None:
    MoECacheLM(pretrained=loaded[0], tokenizer=loaded[1])
    with pytest.raises(ValueError, match="is inside an expert cache already"):
        MoECacheLM(pretrained=loaded[0], tokenizer=loaded[1])
