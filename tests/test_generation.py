"""Generation options, asked for or a checkpoint's own: what HFLM answers, or a refusal by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lm_eval_moecache import MoECacheLM, MoECacheSpecLM
from lm_eval_moecache.harness import generation
from lm_eval_moecache.harness.generation import check_generation, fields, options
from lm_eval_moecache.records.errors import ArgumentsError
from tests.conftest import Checkpoint
from tests.harness import make_instance

# In float64 a batch rounds no near tie otherwise; torch's grouped kernel does not know it.
HOST: dict[str, Any] = {
    **{"device": "cpu", "max_length": 96},
    **{"dtype": "float64", "experts_implementation": "batched_mm"},
}
WORDS = ("Say", "Say it again, and once more after that", "Say yes", "Say it twice, please")


def requests(options: Mapping[str, Any]) -> list[Instance]:
    asked = {"until": ["zz"], "max_gen_toks": 8, **options}
    return [make_instance("generate_until", "g", i, text, asked) for i, text in enumerate(WORDS)]


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = tmp_path_factory.mktemp("own") / "model"
    shutil.copytree(checkpoint("olmoe"), own)
    return own


def with_defaults(folder: Path, defaults: Mapping[str, Any]) -> str:
    """Give a checkpoint these generation defaults."""
    path = folder / "generation_config.json"
    stored = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 1}
    path.write_text(json.dumps({**stored, **defaults}))
    return str(folder)


@pytest.mark.parametrize(
    ("own", "asked"),
    [
        ({"num_beams": 3}, {}),
        ({"num_beams": 3}, {"num_beams": 1}),
        ({"max_new_tokens": 3}, {}),
        ({"max_new_tokens": 12}, {}),
        ({"max_length": 4}, {}),
        ({}, {"max_length": 42}),
        ({"repetition_penalty": 1.8}, {}),
        ({"min_new_tokens": 1, "suppress_tokens": [100, 101, 102]}, {}),
        ({"do_sample": True, "temperature": 2.0, "top_k": 3}, {}),
        ({"cache_implementation": "static"}, {}),
        ({}, {"cache_implementation": "static"}),
        ({"cache_implementation": "hybrid"}, {"prefill_chunk_size": 4}),
        ({"num_assistant_tokens": 3, "eos_token_id": [1, 60, 70, 80, 90]}, {}),
    ],
    ids=str,
)
def test_answers_are_those_of_hflm(
    folder: Path, own: dict[str, Any], asked: dict[str, Any]
) -> None:
    path = with_defaults(folder, own)
    expected = HFLM(path, **HOST).generate_until(requests(asked), disable_tqdm=True)
    lm = MoECacheLM(path, policy="on_demand", capacity="40%", **HOST)
    for batch in (1, 3):
        lm.batch_size_per_gpu = batch
        assert lm.generate_until(requests(asked), disable_tqdm=True) == expected


REFUSED = [
    ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6 is a search that transformers loads"),
    ({"dola_layers": "low"}, "dola_layers='low' is a search that transformers loads"),
    ({"max_time": 2.0}, "max_time=2.0 makes answers depend on how fast this machine is"),
    ({"stop_strings": ["x"]}, r"stop_strings=\['x'\] needs the tokenizer.*until"),
    ({"guidance_scale": 1.5}, "guidance_scale=1.5 takes a second pass"),
    ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2 must be 1"),
    ({"cache_implementation": "quantized"}, "cache_implementation='quantized'.*dynamic, static"),
]
OF_A_CHECKPOINT = [
    *REFUSED,
    ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens=2 would change what drafts"),
    ({"return_dict_in_generate": True}, "return_dict_in_generate=True is not what lm-eval reads"),
]


@pytest.mark.parametrize(("asked", "said"), REFUSED, ids=str)
def test_what_cannot_be_followed_is_refused_by_name(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentsError, match=f"gen_kwargs: {said}"):
        check_generation(asked, speculative=False)


def test_stops_by_the_name_that_others_give_them_are_refused_with_ours() -> None:
    with pytest.raises(ArgumentsError, match=r"stop=\['x'\] is not known\. Did you mean 'until'"):
        check_generation({"stop": ["x"]}, speculative=False)


@pytest.mark.parametrize(("own", "said"), OF_A_CHECKPOINT, ids=str)
def test_so_it_is_in_a_checkpoint_unless_a_request_turns_it_off(
    own: dict[str, Any], said: str
) -> None:
    with pytest.raises(ArgumentsError, match=f"generation_config.json: {said}"):
        check_generation({"until": ["x"]}, False, own)
    # What a request asks for counts before a checkpoint's default.
    if (own, said) in REFUSED:
        check_generation({key: (*options()[key].off, None)[0] for key in own}, False, own)


def test_all_options_are_checked_before_the_first_request(folder: Path) -> None:
    lm = MoECacheLM(with_defaults(folder, {"max_time": 2.0}), policy="on_demand", **HOST)
    drafted = requests({"prompt_lookup_num_tokens": 2})[-1]
    for asked, said in (
        (requests({}), "generation_config.json: max_time=2.0"),
        ([*requests({"max_time": None}), drafted], "gen_kwargs: prompt_lookup_num_tokens=2"),
    ):
        with pytest.raises(ArgumentsError, match=said):
            lm.generate_until(asked, disable_tqdm=True)
    assert lm.engine.ledger.passes == []


def test_a_draft_does_not_follow_a_checkpoints_beams(folder: Path) -> None:
    path = with_defaults(folder, {"num_beams": 3, "do_sample": True, "temperature": 0.7})
    lm = MoECacheSpecLM(path, draft="prompt_lookup", policy="on_demand", device="cpu")
    with pytest.raises(ArgumentsError, match=r"generation_config\.json: num_beams=3 with"):
        lm.generate_until(requests({}), disable_tqdm=True)


def test_the_list_has_every_option_of_this_transformers() -> None:
    assert fields() - set(options()) == set()


def test_an_option_that_is_new_in_transformers_is_left_to_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "fields", lambda: frozenset({"newest_search"}))
    assert generation.stands_alone({}, {"newest_search": 4})
    assert not generation.stands_alone({}, {"newest_search": None, "not_an_option": 4})
