"""Prefetching for a whole pass before it begins, against a timeline worked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.records.artifact import DATA_AWARE, Artifact
from lm_eval_moecache.records.event import PASS_START, Event
from lm_eval_moecache.records.geometry import Geometry
from tests.engine.scripted import Always, FixedPrefetch, Script, ScriptedPolicy, decode, make_engine


class Foreseeing(FixedPrefetch):
    """Proposes what a script says for (pass, PASS_START); its network is 100 bytes, read in 1 s."""

    foresees: ClassVar[bool] = True

    def __init__(self, geometry: Geometry, script: Script) -> None:
        super().__init__(geometry, script)
        self.seen: list[tuple[int, int, int]] = []
        self.artifact = Artifact(
            kind=DATA_AWARE,
            model=geometry.model,
            num_layers=geometry.num_layers,
            num_experts=geometry.num_experts,
            top_k=geometry.top_k,
            router_digest="",
            made_from={},
            arrays={"all": np.zeros(100, dtype=np.uint8)},
        )

    def propose(self, event: Event) -> Sequence[int]:
        self.seen.append((event.pass_index, event.layer, event.num_tokens))
        return super().propose(event)


def machine(script: Script) -> Engine:
    return make_engine(
        ScriptedPolicy(prefetch=Always(lambda geometry: Foreseeing(geometry, script))), capacity=6
    )


def test_a_pass_is_foreseen_before_its_first_layer() -> None:
    engine = machine({(0, PASS_START): (1, 5)})
    record = decode(engine, [1], [5], [8])
    # The tokens are read 0-1. Expert 1 moves 1-6, the first dense part runs 1-3 and waits 3 s;
    # it runs 6-7, expert 5 moves 6-11, dense 7-9 waits 2 s, runs 11-12. Nobody foresaw expert 8:
    # dense 12-14, transfer 14-19, run 19-20.
    assert (record.start_s, record.end_s) == (0.0, 20.0)
    assert (record.stall_s, record.late, record.misses) == (10.0, 2, 1)
    assert (record.predicted, record.predicted_right, record.predictable) == (2, 2, 2)


def test_without_foresight_all_three_are_loaded_on_demand() -> None:
    record = decode(make_engine(capacity=6), [1], [5], [8])
    assert record.end_s == 24.0


def test_it_is_asked_once_a_pass_and_again_at_each_event_for_nothing() -> None:
    engine = machine({})
    decode(engine, [1], [5], [8])
    decode(engine, [1], [5], [8])
    prefetch = engine.rules.prefetch
    assert isinstance(prefetch, Foreseeing)
    assert [seen for seen in prefetch.seen if seen[1] == PASS_START] == [
        (0, PASS_START, 1),
        (1, PASS_START, 1),
    ]


def test_a_key_foreseen_for_a_resident_expert_moves_nothing() -> None:
    engine = machine({(1, PASS_START): (1,)})
    decode(engine, [1], [5], [8])
    record = decode(engine, [1], [5], [8])
    # 1 s to read the tokens, three times dense and an expert.
    assert (record.end_s - record.start_s, record.bytes_moved) == (10.0, 0)
