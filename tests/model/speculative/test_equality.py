"""Speculative decoding gives the tokens of plain greedy decoding, whatever drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.spec_lm import MoECacheSpecLM
from lm_eval_moecache.tiny import MODEL_DIR
from tests.harness import choices, make_instance, texts
from tests.model.speculative.drafts import generated, prompts, requests

COUNT = 4


def install(lm: MoECacheSpecLM, **ours: Any) -> MoECacheSpecLM:
    lm.install(read_config({"policy": "sp_moe", "capacity": "25%", **ours}, speculative=True))
    return lm


@pytest.fixture(scope="module")
def expected(plain: MoECacheLM) -> list[list[int]]:
    return generated(plain, requests(COUNT))


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("draft", ["tiny", "useless", "prompt_lookup"])
def test_the_tokens_are_those_of_greedy_decoding(
    spec: MoECacheSpecLM, expected: list[list[int]], useless: Path, draft: str, tokens: int
) -> None:
    name = str(useless) if draft == "useless" else draft
    policy = {"policy": "on_demand"} if draft == "prompt_lookup" else {}
    install(spec, draft=name, draft_tokens=tokens, **policy)
    assert generated(spec, requests(COUNT)) == expected
    totals = spec.report()["totals"]
    if draft == "tiny":
        # Its logits are the model's own in the same arithmetic, up to the shape of a pass.
        assert totals["draft_acceptance"] == 1.0
        assert totals["accepted_per_verify"] > 0.5 * tokens
    if draft == "useless":
        assert totals["draft_acceptance"] < 0.1
    spec.engine.check_integrity()


@pytest.mark.parametrize(
    "policy", ["mixtral_offloading", "moe_infinity", "specmd", "sp_moe_vanilla", "on_demand"]
)
def test_lossless_policies_leave_the_tokens_alone(
    spec: MoECacheSpecLM, expected: list[list[int]], policy: str
) -> None:
    install(spec, policy=policy, draft="tiny", draft_tokens=3)
    assert generated(spec, requests(3)) == expected[:3]


def test_a_stop_string_inside_accepted_drafts_ends_the_answer_there(
    spec: MoECacheSpecLM, plain: MoECacheLM, expected: list[list[int]]
) -> None:
    # Any piece of an answer can be the stop string, wherever a verify pass begins and ends.
    row = expected[0]
    for place in range(1, min(9, len(row) - 1)):
        stop = plain.tok_decode([row[place]])
        asked = {"until": [stop], "max_gen_toks": 32}
        instance = [make_instance("generate_until", "gen", 0, prompts(1)[0], asked)]
        plain.install(plain.moecache)
        install(spec, draft="tiny", draft_tokens=8)
        assert generated(spec, instance) == generated(plain, instance)
        found, told = spec.engine.ledger.requests[0], plain.engine.ledger.requests[0]
        assert found.output_tokens == told.output_tokens


def test_scoring_runs_without_the_draft(spec: MoECacheSpecLM, plain: MoECacheLM) -> None:
    plain.install(read_config({"policy": "on_demand"}))
    install(spec, policy="on_demand", draft="tiny", draft_tokens=4)
    for kind, asked in (("loglikelihood", choices()), ("loglikelihood_rolling", texts())):
        assert getattr(spec, kind)(asked, True) == getattr(plain, kind)(asked, True)
    assert spec.engine.ledger.passes == plain.engine.ledger.passes
    assert "draft_acceptance" not in spec.report()["totals"]


def test_in_bfloat16_every_divergence_is_a_tie_of_two_logits() -> None:
    """The first token that differs has, in both runs' arithmetic, a rival within rounding."""
    asked = requests(COUNT)
    plain = MoECacheLM(pretrained="tiny", device="cpu", policy="on_demand")
    expected = generated(plain, asked)
    spec = MoECacheSpecLM(
        pretrained="tiny", device="cpu", policy="on_demand", draft="tiny", draft_tokens=4
    )
    found = generated(spec, asked)
    model = AutoModelForCausalLM.from_pretrained(str(MODEL_DIR), dtype=torch.bfloat16).eval()
    for text, row, told in zip(prompts(COUNT), found, expected, strict=True):
        if row == told:
            continue
        same = next(i for i, (a, b) in enumerate(zip(row, told, strict=False)) if a != b)
        context = plain.tok_encode(text) + told[:same]
        with torch.no_grad():
            logits = model(torch.tensor([context])).logits[0, -1].float()
        rivals = logits[[row[same], told[same]]]
        # Two of bfloat16's steps at this magnitude: one for each of the two roundings.
        step = 2 * 2.0 ** (torch.floor(torch.log2(rivals.abs().max())) - 7)
        assert rivals.max() >= logits.max() - step
        assert (rivals[0] - rivals[1]).abs() <= step
