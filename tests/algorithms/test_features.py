"""The features that evictions rank by, where no rule's figures would show a wrong one."""

from __future__ import annotations

import numpy as np

from lm_eval_moecache.engine.kernel import ranking, state
from lm_eval_moecache.engine.memory import Memory, make_tables
from lm_eval_moecache.records.memory import address_of, make_record


def two_layers(caches: int) -> Memory:
    run = make_record(state.Run, num_layers=2, num_experts=4, num_levels=1, top_k=2)
    tables = make_tables(run, caches)
    for number, cache in enumerate(tables["caches"]):
        cache["first_layer"], cache["end_layer"] = number, number + 1 if caches > 1 else 2
    tables["layers"]["cache"][:2] = range(2) if caches > 1 else 0
    return Memory(run, tables)


def load(memory: Memory, *keys: int, prefetched: bool = False) -> None:
    for key in keys:
        ranking.note_load(memory.run, key, prefetched)


def ranks(memory: Memory, *keys: int) -> list[int]:
    found: list[int] = memory.experts["cold_fill_rank"][[*keys]].tolist()
    return found


def test_a_cache_that_is_emptied_leaves_the_founders_of_another() -> None:
    memory = two_layers(caches=2)
    load(memory, 0, 4, 5)
    ranking.note_eviction(memory.run, 0)
    load(memory, 1, 6)
    assert ranks(memory, 1, 4, 5, 6) == [1, 1, 2, 3]


def test_an_expert_that_returns_brings_nothing_of_its_last_stay() -> None:
    memory = two_layers(caches=1)
    run, expert = memory.run, memory.experts[0]
    ranking.note_pass(run, 0)
    load(memory, 0, prefetched=True)
    load(memory, 1)
    memory.scratch["keys"][:2] = 0
    run.num_keys, run.layer = 2, 0
    experts = np.zeros(2, np.int64)
    ranking.note_event(run, make_record(state.Call, executed=address_of(experts)))
    ranking.note_hint(run, 0)  # for the next pass, as the layer was served
    told = [int(expert[name]) for name in ("hits", "predicted", "hint_place", "resident")]
    assert told == [2, 1, 1, 1]
    ranking.note_eviction(run, 0)
    assert [int(expert[name]) for name in ("predicted", "hint_place", "resident")] == [0, 0, 0]
    load(memory, 0)
    told = [int(expert[name]) for name in ("hits", "turn", "accessed", "resident")]
    assert told == [0, 1, 2, 1]
    assert [int(expert[name]) for name in ("uses", "predicted")] == [2, 0]
