"""The features that evictions rank by, where no rule's figures would show a wrong one."""

from __future__ import annotations

from lm_eval_moecache.algorithms.features import (
    Chosen,
    Features,
    Now,
    make_features,
    note_event,
    note_eviction,
    note_hint,
    note_load,
    note_pass,
)


def two_layers(caches: int) -> Features:
    return make_features(Now(2, 4), [3] * caches)


def load(tables: Features, *keys: int, prefetched: bool = False) -> None:
    for key in keys:
        note_load(tables, key, key // 4, prefetched)


def test_a_cache_that_is_emptied_leaves_the_founders_of_another() -> None:
    tables = two_layers(caches=2)
    load(tables, 0, 4, 5)
    note_eviction(tables, 0, 0)
    load(tables, 1, 6)
    assert [tables.experts[key].cold_fill_rank for key in (1, 4, 5, 6)] == [1, 1, 2, 3]


def test_an_expert_that_returns_brings_nothing_of_its_last_stay() -> None:
    tables = two_layers(caches=1)
    note_pass(tables, 0)
    load(tables, 0, prefetched=True)
    load(tables, 1)
    note_event(tables, 0, 1, Chosen([0, 0], (), (), ()), 0, 2, 0, 0)
    note_hint(tables, 0, 0)  # for the next pass, as the layer was served
    expert = tables.experts[0]
    assert (expert.hits, expert.predicted, expert.hint_place, expert.resident) == (2, 1, 1, 1)
    note_eviction(tables, 0, 0)
    assert (expert.predicted, expert.hint_place, expert.resident) == (0, 0, 0)
    load(tables, 0)
    assert (expert.hits, expert.turn, expert.accessed, expert.resident) == (0, 1, 2, 1)
    assert (expert.uses, expert.predicted) == (2, 0)
