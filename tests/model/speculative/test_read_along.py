"""`prefetch=draft` without speculation: a draft reads along, and the answers do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.preflight import check_arguments
from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.trace.importers import load_trace
from tests.model.speculative.drafts import requests

GIVEN: dict[str, Any] = {"policy": "on_demand", "prefetch": "draft", "capacity": "25%"}


@pytest.fixture(scope="module")
def lm() -> MoECacheLM:
    return MoECacheLM(pretrained="tiny", device="cpu", policy="on_demand", capacity="25%")


def install(lm: MoECacheLM, **given: Any) -> None:
    config, _ = check_arguments("tiny", given)
    lm.install(config)


def test_the_answers_are_those_without_a_draft_and_each_decode_pass_has_read_ahead(
    lm: MoECacheLM,
) -> None:
    install(lm, policy="on_demand", capacity="25%")
    plain = lm.generate_until(requests(2), disable_tqdm=True)
    misses = sum(record.misses for record in lm.engine.ledger.passes)
    install(lm, **GIVEN, **{"prefetch.cutoff": 8})
    assert lm.generate_until(requests(2), disable_tqdm=True) == plain
    passes = lm.engine.ledger.passes
    assert {record.phase for record in passes} == {PREFILL, DECODE}
    for record in passes:
        assert (record.draft_s > 0) == (record.phase == DECODE)
        assert record.drafted == 0 and 0 <= record.draft_s < record.duration_s
    assert sum(record.misses for record in passes) < misses
    figures = task_metrics(lm.engine.ledger.requests, 0)
    assert 0 < figures["draft_time_share"] < 1 and "draft_acceptance" not in figures
    # A prompt in chunks is read by the draft as a whole, with the first token.
    install(lm, **GIVEN, **{"prefetch.cutoff": 8})
    chunked = requests(2)
    for request in chunked:
        request.args[1]["prefill_chunk_size"] = 16
    assert lm.generate_until(chunked, disable_tqdm=True) == plain
    for record in lm.engine.ledger.passes:
        assert (record.draft_s > 0) == (record.phase == DECODE)


def test_its_own_weights_at_full_precision_predict_every_expert_of_the_first_layer(
    lm: MoECacheLM,
) -> None:
    """The draft's first layer sees what the model's will: the same token, the same weights."""
    install(lm, **GIVEN, **{"draft": "self:bf16", "prefetch.cutoff": 1})
    lm.generate_until(requests(1), disable_tqdm=True)
    decoded = [record for record in lm.engine.ledger.passes if record.phase == DECODE]
    assert all(record.predicted == record.predictable == 8 for record in decoded)
    # The draft reads the prompt and the first token in one pass, which bf16 shows now and then.
    right = sum(record.predicted_right for record in decoded)
    assert right >= 0.97 * 8 * len(decoded)


def test_a_live_run_equals_the_replay_of_its_trace(lm: MoECacheLM, tmp_path: Path) -> None:
    setting = {**GIVEN, "draft": "self:int4"}
    install(lm, **setting, trace=str(tmp_path))
    lm.generate_until(requests(1), disable_tqdm=True)
    live, path = task_metrics(lm.engine.ledger.requests, 0), lm.finish_trace()
    trace = load_trace(str(path))
    engine = replay(trace, read_config(setting).setting(trace.geometry))
    assert task_metrics(engine.ledger.requests, 0) == live


def test_beams_are_refused(lm: MoECacheLM) -> None:
    install(lm, **GIVEN)
    [request] = requests(1)
    request.args[1].update(num_beams=2)
    with pytest.raises(ValueError, match="num_beams: prefetch='draft' reads one text at a time"):
        lm.generate_until([request], disable_tqdm=True)
    install(lm, policy="on_demand", capacity="25%")
