"""Speculative decoding: the tokens of plain greedy decoding, and the time of each pass."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM, MoECacheSpecLM
from lm_eval_moecache.harness.run_report import speed_table
from lm_eval_moecache.records.event import DECODE, PREFILL, VERIFY
from lm_eval_moecache.records.ledger import PassRecord, RequestRecord
from lm_eval_moecache.report.metrics import inter_token_ms, request_metrics, task_metrics
from tests.harness import choices, make_instance, texts
from tests.model.speculative.drafts import STOP, generated, install, prompts, requests

COUNT = 2
"""A word problem and a question of logic."""


@pytest.fixture(scope="module")
def expected(plain: MoECacheLM) -> list[list[int]]:
    return generated(plain, requests(COUNT))


SETTINGS: list[dict[str, Any]] = [
    *({"draft": draft, "draft_tokens": n} for draft in ("tiny", "useless") for n in (1, 4)),
    *({"draft": "prompt_lookup", "draft_tokens": n, "policy": "on_demand"} for n in (1, 4)),
    *({"draft": "tiny", "draft_tokens": 3, "policy": p} for p in ("specmd", "sp_moe_vanilla")),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda given: "-".join(map(str, given.values())))
def test_the_tokens_are_those_of_greedy_decoding(
    spec: MoECacheSpecLM, expected: list[list[int]], useless: Path, setting: dict[str, Any]
) -> None:
    draft, tokens = setting["draft"], setting["draft_tokens"]
    install(spec, **{**setting, "draft": str(useless) if draft == "useless" else draft})
    assert generated(spec, requests(COUNT)) == expected
    totals = spec.report()["totals"]
    if draft == "tiny":
        # Its logits are the model's own in the same arithmetic, up to the shape of a pass.
        assert totals["draft_acceptance"] == 1.0
        assert totals["accepted_per_verify"] > 0.5 * tokens
    if draft == "useless":
        assert totals["draft_acceptance"] < 0.1
    spec.engine.check_integrity()


def test_a_stop_string_inside_accepted_drafts_ends_the_answer_there(
    spec: MoECacheSpecLM, plain: MoECacheLM, expected: list[list[int]]
) -> None:
    # Any piece of an answer can be the stop string, wherever a verify pass begins and ends.
    row = expected[0]
    for position in (1, 4, 7):
        stop = plain.tok_decode([row[position]])
        gen_kwargs = {"until": [stop], "max_gen_toks": 32}
        instance = [make_instance("generate_until", "gen", 0, prompts(1)[0], gen_kwargs)]
        plain.install(plain.moecache)
        install(spec, draft="tiny", draft_tokens=8)
        assert generated(spec, instance) == generated(plain, instance)
        drafted, greedy = spec.engine.ledger.requests[0], plain.engine.ledger.requests[0]
        assert drafted.output_tokens == greedy.output_tokens


def test_scoring_runs_without_the_draft(spec: MoECacheSpecLM, plain: MoECacheLM) -> None:
    plain.install(read_config({"policy": "on_demand"}))
    install(spec, policy="on_demand", draft="tiny", draft_tokens=4)
    for kind, instances in (("loglikelihood", choices()), ("loglikelihood_rolling", texts())):
        assert getattr(spec, kind)(instances, True) == getattr(plain, kind)(instances, True)
    assert spec.engine.ledger.passes == plain.engine.ledger.passes
    assert "draft_acceptance" not in spec.report()["totals"]


def test_each_pass_is_the_models_own_and_their_times_add_up(spec: MoECacheSpecLM) -> None:
    """The first is a prefill; each later one yields its accepted drafts and one more token."""
    install(spec, draft="tiny", draft_tokens=4, cache_reset="never")
    spec.generate_until(requests(3), disable_tqdm=True)
    ledger = spec.engine.ledger
    # The draft's forwards are no passes of the model.
    passes = [record for request in ledger.requests for record in request.passes]
    assert sorted(passes, key=lambda record: record.index) == ledger.passes
    assert len(ledger.requests[0].passes) < (ledger.requests[0].output_tokens or 0) / 2
    assert all(a.end_s == b.start_s for a, b in pairwise(ledger.passes))
    assert ledger.passes[-1].end_s == spec.engine.now
    for record in ledger.requests:
        first, *rest = record.passes
        assert (first.phase, first.num_tokens) == (PREFILL, record.prompt_tokens)
        assert (first.drafted, first.draft_s) == (0, 0.0)
        assert all(p.num_tokens == p.drafted + 1 for p in rest)
        assert all(p.phase == (VERIFY if p.drafted else DECODE) for p in rest)
        assert all(0 < p.draft_s < p.duration_s for p in rest if p.drafted)
        assert all(p.drafted == 4 for p in rest[:-2])  # fewer at the end of the answer
        num_tokens = sum(p.output_tokens for p in record.passes)
        assert record.output_tokens is not None
        assert record.output_tokens <= num_tokens < record.output_tokens + 5


def _pass(index: int, phase: str, start: float, end: float, **more: Any) -> PassRecord:
    return PassRecord(index, phase, 1 + more.get("drafted", 0), start, end, **more)


def test_tpot_itl_and_acceptance_by_hand() -> None:
    passes = [
        _pass(0, PREFILL, 0.0, 0.010),
        _pass(1, VERIFY, 0.010, 0.018, drafted=3, accepted=3, draft_s=0.004),  # tokens 2 to 5
        _pass(2, VERIFY, 0.018, 0.024, drafted=3, accepted=0, draft_s=0.003),  # token 6
        _pass(3, VERIFY, 0.024, 0.034, drafted=2, accepted=2, draft_s=0.003),  # token 7
    ]
    # The last pass accepts two drafts more than the answer has room for.
    request = RequestRecord(0, "t", "generate_until", 4, 7, passes)
    figures = request_metrics(request)
    assert figures["ttft_ms"] == pytest.approx(10)
    assert figures["tpot_ms"] == pytest.approx(24 / 6)
    assert inter_token_ms(request) == pytest.approx([8, 0, 0, 0, 6, 10])
    assert sum(inter_token_ms(request)) == pytest.approx(figures["e2el_ms"] - figures["ttft_ms"])
    totals = task_metrics([request], 0)
    assert totals["draft_acceptance"] == 5 / 8
    assert totals["accepted_per_verify"] == 5 / 3
    assert totals["draft_time_share"] == pytest.approx(10 / 24)
    assert totals["tok_per_s"] == pytest.approx(7 / 0.034)
    assert totals["itl_ms"]["mean"] == pytest.approx(4)
    passes = [_pass(0, PREFILL, 0.0, 0.01), _pass(1, DECODE, 0.01, 0.02)]
    totals = task_metrics([RequestRecord(0, "t", "generate_until", 4, 2, passes)], 0)
    assert not [key for key in totals if "draft" in key or "verify" in key]


def test_the_report_tells_the_draft_its_memory_and_the_solvers_answer(
    spec: MoECacheSpecLM, useless: Path
) -> None:
    install(spec, draft=str(useless), draft_tokens=2)
    spec.generate_until(requests(1), disable_tqdm=True)
    report = json.loads(json.dumps(spec.report(), allow_nan=False))
    draft = report["draft"]
    assert (draft["name"], draft["tokens"], draft["precision"]) == (str(useless), 2, "fp32")
    assert draft["bytes"] == sum(p.numel() * 4 for p in spec.model.parameters())
    assert draft["cutoff"]["used"] == draft["cutoff"]["answer"] <= 8
    assert draft["cutoff"]["other_bytes"] > draft["bytes"]
    assert "2 tokens" in speed_table(report)
    install(spec, draft="prompt_lookup", policy="on_demand")
    assert spec.report()["draft"] == {"name": "prompt_lookup", "tokens": 1, "bytes": 0}


def test_drafting_from_the_prompt_takes_no_time(spec: MoECacheSpecLM) -> None:
    install(spec, draft="prompt_lookup", policy="on_demand", draft_tokens=3)
    # Prompt lookup drafts only from text that repeats itself.
    text = prompts(1)[0]
    instances = [make_instance("generate_until", "gen", 0, f"{text} {text}", STOP)]
    spec.generate_until(instances, disable_tqdm=True)
    passes = spec.engine.ledger.passes
    assert sum(p.drafted for p in passes) > 0
    assert sum(p.draft_s for p in passes) == 0
    assert {p.phase for p in passes if p.drafted} == {VERIFY}


def test_nothing_is_left_on_the_models_after_a_run(spec: MoECacheSpecLM) -> None:
    install(spec, draft="tiny")
    assert spec._draft is not None
    draft_model = spec._draft.model
    install(spec, draft="tiny", draft_tokens=2)
    assert spec._draft.model is draft_model, "the same draft was loaded again"
    hooks = [h for m in draft_model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]
    assert len(hooks) == 2 * len(spec._draft.blocks)
    assert "_get_candidate_generator" not in vars(spec.model)


def test_a_draft_of_the_models_own_weights_shares_all_but_its_experts(spec: MoECacheSpecLM) -> None:
    install(spec, draft="self:int4", draft_tokens=3)
    assert spec._draft is not None
    draft_weights, target_weights = (
        dict(m.named_parameters()) for m in (spec._draft.model, spec.model)
    )
    for name, parameter in draft_weights.items():
        is_shared = parameter.data_ptr() == target_weights[name].data_ptr()
        assert is_shared == ("experts" not in name), name
    draft = spec.report()["draft"]
    # 4 bits a weight and a float32 for every 64: 4.5 bits; 512 experts of 3 x 128 x 48 weights.
    assert draft["bytes"] == 512 * 3 * 128 * 48 * 4.5 / 8
    assert (draft["name"], draft["precision"]) == ("self:int4", "int4")
    spec.generate_until(requests(2), disable_tqdm=True)
    assert 0.5 < spec.report()["totals"]["draft_acceptance"] <= 1


def test_less_precision_is_less_memory_and_further_from_the_model(spec: MoECacheSpecLM) -> None:
    tokens = torch.tensor([spec.tok_encode(prompts(1)[0])])
    sizes_and_errors = []
    for precision in ("int8", "int4", "int2"):
        install(spec, draft=f"self:{precision}")
        assert spec._draft is not None
        with torch.no_grad():
            difference = spec._draft.model(tokens).logits - spec.model(tokens).logits
        sizes_and_errors.append((spec._draft.cost.nbytes, -float(difference.norm())))
    assert sizes_and_errors == sorted(sizes_and_errors, reverse=True)
    assert sizes_and_errors[0][1] < 0, "the draft computes with the model's own weights"
