"""Every sensible pairing of algorithms runs; every other one is refused with the reason."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations, product

import pytest

from lm_eval_moecache.algorithms.policy import check_cache_form, load_policy
from lm_eval_moecache.algorithms.registry import AXES, algorithm_names, find_algorithm
from lm_eval_moecache.testing.streams import make_geometry, policy_of, run

GEOMETRY = make_geometry(num_layers=2, num_experts=6, top_k=3)
SMALL = {"num_requests": 2, "num_decodes": 1}
Pairing = tuple[str, ...]


def is_sensible(pairing: Pairing) -> bool:
    """Whether a pairing should run: the rules restated independently."""
    routing, prefetch, eviction, miss = pairing
    if routing == "pre_gated" and prefetch not in ("none", "next_gate"):
        return False
    if eviction == "lhu" and not find_algorithm("miss", miss).uses_ladder:
        return False
    if routing == "commit" and prefetch != "predictor":
        return False
    lossless = find_algorithm("routing", routing).is_lossless
    lossless = lossless and find_algorithm("miss", miss).is_lossless
    return lossless or not (prefetch == "oracle" or eviction == "belady")


ALL = list(product(*(algorithm_names(axis) for axis in AXES)))


@cache
def covering(sensible: bool) -> list[Pairing]:
    """Choose pairings that cover every possible pair of two algorithms at least once.

    There are some fifty thousand in all, and faults nearly always involve two axes only.
    """
    covered: set[tuple[tuple[int, str], ...]] = set()
    cover = []
    pairings = [pairing for pairing in ALL if is_sensible(pairing) == sensible]
    for pairing in random.Random(0).sample(pairings, len(pairings)):
        meetings = set(combinations(enumerate(pairing), 2))
        if meetings - covered:
            covered |= meetings
            cover.append(pairing)
    return cover


@pytest.mark.parametrize("routing", algorithm_names("routing"))
def test_every_sensible_pairing_runs_and_keeps_the_books(routing: str) -> None:
    """`run` checks bytes, loads, evictions and transfers after every event."""
    assert len(covering(True)) > 384
    for pairing in (p for p in covering(True) if p[0] == routing):
        policy = policy_of(dict(zip(AXES, pairing, strict=True)))
        served = run(policy, GEOMETRY, "40%", **SMALL)
        for record in served.engine.ledger.passes:
            assert record.end_s >= record.start_s, pairing


def test_every_other_pairing_is_refused_with_the_reason() -> None:
    for pairing in covering(False):
        with pytest.raises(ValueError, match="cannot be combined with") as caught:
            policy_of(dict(zip(AXES, pairing, strict=True)))
        assert "Allowed: " in str(caught.value)


BETWEEN_LAYERS = {"fld", "shallow_first", "frequency_layer", "layered_lru"}


@pytest.mark.parametrize("name", algorithm_names("eviction"))
def test_an_eviction_runs_with_a_cache_per_layer_unless_it_chooses_between_layers(
    name: str,
) -> None:
    algorithm = find_algorithm("eviction", name)
    partners = {axis: names[-1] for axis, names in algorithm.pairs_with.items()}
    policy = policy_of({"eviction": name, **partners})
    check_cache_form(policy, per_layer=False)
    assert algorithm.compares_layers == (name in BETWEEN_LAYERS)
    if not algorithm.compares_layers:
        check_cache_form(policy, per_layer=True)
        run(policy, GEOMETRY, "3/layer", **SMALL)
        return
    with pytest.raises(ValueError, match=f"eviction='{name}' chooses between layers"):
        check_cache_form(policy, per_layer=True)


def test_awaiting_late_experts_where_nothing_is_prefetched_is_refused() -> None:
    with pytest.raises(ValueError, match=r"miss.late='await' has no effect with prefetch='none'"):
        load_policy("buddymoe", {"prefetch": "none", "miss.late": "await"})
    load_policy("buddymoe", {"miss.late": "await"})
