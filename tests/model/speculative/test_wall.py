"""A draft at work on the wall clock; `wall/test_races.py` checks its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from lm_eval_moecache.harness.lm import MoECacheSpecLM
from lm_eval_moecache.records.event import PREFILL
from tests.model.speculative import drafts
from tests.model.speculative.drafts import generated, requests

asked = partial(requests, max_gen_toks=8)


@pytest.fixture(scope="module")
def lm() -> Iterator[MoECacheSpecLM]:
    options = {"device": "cpu", "dtype": "float32", "clock": "wall"}
    spec_lm = MoECacheSpecLM(pretrained="tiny", draft="tiny", policy="sp_moe", **options)
    yield spec_lm
    spec_lm.wrapped.unwrap()


install = partial(drafts.install, clock="wall")


def test_prefetches_move_while_the_draft_drafts(lm: MoECacheSpecLM) -> None:
    """Where a whole pass is predicted and nothing else loads, its experts arrive before it."""
    install(lm, draft="tiny", draft_tokens=1, capacity="100%", **{"prefetch.cutoff": 8})
    lm.generate_until(asked(1), disable_tqdm=True)
    later = [p for p in lm.engine.ledger.passes if p.phase != PREFILL]
    assert sum(p.prefetch_hits for p in later) > 0
    # The draft is the model itself: its predictions err only by one layer's change of input.
    right = sum(p.predicted_right for p in later) / sum(p.predicted for p in later)
    assert right > 0.5


def test_vanilla_waits_for_each_layers_loads(lm: MoECacheSpecLM) -> None:
    stalls = {}
    for policy in ("sp_moe", "sp_moe_vanilla"):
        install(lm, policy=policy, draft="tiny", bandwidth="20MB/s", **{"prefetch.cutoff": 8})
        lm.generate_until(asked(1), disable_tqdm=True)
        later = [p for p in lm.engine.ledger.passes if p.drafted]
        stalls[policy] = sum(p.draft_s for p in later) / len(later)
    assert stalls["sp_moe_vanilla"] > 1.5 * stalls["sp_moe"]


def test_the_cutoff_is_solved_by_measured_times(lm: MoECacheSpecLM) -> None:
    install(lm, draft="tiny", bandwidth="1MB/s")
    cutoff = lm.report()["draft"]["cutoff"]
    size = lm.engine.geometry.expert_bytes[0][0]
    assert cutoff["load_layer_ms"][0] >= 8 * size / 1e6 * 1000 * 0.99
    assert cutoff["draft_layer_ms"] > 0 and cutoff["memory_bytes"] > 2**30
    assert cutoff["asked"] == "auto" and cutoff["used"] == cutoff["answer"] == 0
    assert not lm.engine.pools[0]["loads"] and not lm.engine.ledger.passes
    install(lm, draft="tiny", bandwidth="100GB/s", capacity="100%")
    assert lm.engine.link.bytes_moved == 0
    lm.generate_until(asked(1), disable_tqdm=True)
    lm.engine.check_integrity()


@pytest.mark.slow
def test_a_draft_of_the_targets_weights_is_the_virtual_clocks(lm: MoECacheSpecLM) -> None:
    """Its experts are read from the store, not from the model, and rounded the same."""
    install(lm, draft="self:int2", draft_tokens=2, policy="on_demand")
    generated(lm, asked(2))
    expected = [(p.drafted, p.accepted) for p in lm.engine.ledger.passes]
    options = {"draft": "self:int2", "draft_tokens": 2, "policy": "on_demand"}
    virtual = MoECacheSpecLM(pretrained="tiny", device="cpu", dtype="float32", **options)
    generated(virtual, asked(2))
    assert [(p.drafted, p.accepted) for p in virtual.engine.ledger.passes] == expected
