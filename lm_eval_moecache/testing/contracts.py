"""What routing, prefetch and miss algorithms promise, and the contract of each axis.

Subclass the contract of an axis and name the algorithm; pytest does the rest. `parameters` are
optional. `tests/algorithms/test_contracts.py` does so for every file in the package's four folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.miss.base import MissAlgorithm
from lm_eval_moecache.algorithms.prefetch.base import DraftStagePrefetch, PrefetchAlgorithm
from lm_eval_moecache.algorithms.routing.base import RoutingAlgorithm
from lm_eval_moecache.records.event import DECODE, DROPPED, PASS_START, Event, resident_mask
from lm_eval_moecache.testing.base import GEOMETRY, PASSES, Contract, declared
from lm_eval_moecache.testing.eviction import EvictionContract
from lm_eval_moecache.testing.streams import all_events, foreseen, fresh


class RoutingContract(Contract):
    axis = "routing"

    def make(self, seed: int = 0) -> RoutingAlgorithm:
        made: RoutingAlgorithm = super().make(seed)
        return made

    def selections(self, resident: set[int], seed: int = 0) -> list[Any]:
        routing, found = self.make(seed), []
        for events in PASSES:
            routing.on_pass(events[0].pass_index)
            for event in events:
                found.append((event, routing.select(declared(fresh(event), routing), resident)))
        return found

    def test_a_selection_has_the_routers_shape_and_no_expert_twice(self) -> None:
        every = set(range(GEOMETRY.num_layers * GEOMETRY.num_experts))
        for resident in (set[int](), {k for k in every if k % 3 == 0}, every):
            for event, selection in self.selections(resident):
                if selection is None:
                    continue
                assert selection.experts.shape == event.experts.shape
                assert selection.experts.min() >= 0
                assert selection.experts.max() < GEOMETRY.num_experts
                for row in selection.experts.tolist():
                    assert len(set(row)) == len(row)

    def test_a_lossless_routing_never_changes_a_selection(self) -> None:
        changed = [s for _, s in self.selections({1, 9, 17}) if s is not None]
        assert bool(changed) != self.algorithm.is_lossless

    def test_the_same_seed_makes_the_same_selections(self) -> None:
        pairs = zip(self.selections({1, 2}, 5), self.selections({1, 2}, 5), strict=True)
        for (_, first), (_, again) in pairs:
            assert (first is None) == (again is None)
            if first is not None:
                np.testing.assert_array_equal(first.experts, again.experts)


class PrefetchContract(Contract):
    axis = "prefetch"

    def make(self, seed: int = 0) -> PrefetchAlgorithm:
        made: PrefetchAlgorithm = super().make(seed)
        return made

    def proposals(self) -> list[tuple[Event, Sequence[int]]]:
        prefetch, found = self.make(), []
        if isinstance(prefetch, DraftStagePrefetch):
            return [(e, prefetch.propose_draft(e.layer, e.logits[-1:])) for e in all_events(PASSES)]
        for events in PASSES:
            prefetch.on_pass(events[0].pass_index)
            if prefetch.foresees:
                before = events[0]._replace(layer=PASS_START, keys=(), predicted=foreseen(events))
                found.append((before, prefetch.propose(before)))
            for event in events:
                shown = fresh(event, prefetch.depth, prefetch.uses_predictor)
                found.append((event, prefetch.propose(declared(shown, prefetch))))
        return found

    def test_proposals_are_keys_of_the_model_without_duplicates(self) -> None:
        for _, keys in self.proposals():
            assert len(set(keys)) == len(keys)
            assert all(0 <= k < GEOMETRY.num_layers * GEOMETRY.num_experts for k in keys)
            assert all(isinstance(key, int) for key in keys), "numpy integers slow the core down"

    def test_it_proposes_something_unless_it_says_that_it_does_not(self) -> None:
        assert any(keys for _, keys in self.proposals()) == self.algorithm.is_active

    def test_what_foresees_a_pass_says_nothing_once_it_runs(self) -> None:
        if self.algorithm.foresees:
            assert not any(keys for event, keys in self.proposals() if event.layer != PASS_START)

    def test_proposals_repeat_themselves(self) -> None:
        first, again = ([list(keys) for _, keys in self.proposals()] for _ in range(2))
        assert first == again

    def test_many_steps_at_once_are_what_single_ones_would_propose(self) -> None:
        """Replays and live runs that nothing waits for ask `propose_arrays` where there is one."""
        # One decimal place, so that there are ties.
        logits = np.random.default_rng(0).normal(0, 2, (40, GEOMETRY.num_experts)).round(1)
        logits = logits.astype(np.float32)
        base = GEOMETRY.num_experts
        # Steps of one layer, as a replay asks, and of one layer after the other, as a live run.
        for layers in ([1] * 40, [0, 1] * 20):
            at_once, alone = self.make(), self.make()
            found: list[list[int]] = []
            for chunk in (slice(24), slice(24, None)):
                asked = at_once.propose_arrays(layers[chunk], logits[chunk])
                if asked is None:
                    return
                found += [own.tolist() for own in np.split(asked[0], asked[1].cumsum()[:-1])]
            for step, (layer, row, keys) in enumerate(zip(layers, logits, found, strict=True)):
                event = Event(step, 0, DECODE, 1, [base], predicted={layer: row[None]})
                assert list(alone.propose(event)) == keys


class MissContract(Contract):
    axis = "miss"

    def make(self, seed: int = 0) -> MissAlgorithm:
        made: MissAlgorithm = super().make(seed)
        return made

    def resolutions(self, share: float, dropped: bool = False) -> list[Any]:
        """Resolve every event of the stream with about this share of experts resident."""
        miss, found = self.make(), []
        rng = np.random.default_rng(1)
        for event in all_events(PASSES):
            if dropped:
                experts = event.experts.copy()
                experts[:, -1] = DROPPED
                live = experts[experts != DROPPED] + event.layer * GEOMETRY.num_experts
                event = event._replace(experts=experts, keys=list(dict.fromkeys(live.tolist())))
            levels = range(3 if self.algorithm.uses_ladder else 1)
            resident = {
                event.layer * GEOMETRY.num_experts + e: int(rng.choice(levels))
                for e in range(GEOMETRY.num_experts)
                if rng.random() < share
            }
            absent = [key for key in event.keys if key not in resident]
            if absent:
                shown = declared(event, miss)
                found.append((event, resident, absent, miss.resolve(shown, absent, resident)))
        return found

    def test_what_is_executed_is_near_or_loaded(self) -> None:
        for share in (0.0, 0.3, 0.7):
            for event, resident, absent, resolution in self.resolutions(share):
                if resolution is None:
                    continue
                loaded = {fetch.key: fetch.level for fetch in resolution.fetch}
                assert set(loaded) <= set(event.keys) and len(loaded) == len(resolution.fetch)
                # A resident comes again at a better level only, and only where that is asked for.
                better = {k for k, level in loaded.items() if k in resident and level < resident[k]}
                assert set(loaded) <= set(absent) | better
                assert self.make().upgrade or not better
                executed = _executed(event, resolution)
                is_resident = resident_mask(event.layer, GEOMETRY.num_experts, resident | loaded)
                assert is_resident[executed].all()

    def test_a_lossless_handler_loads_all(self) -> None:
        changed = [r for *_, r in self.resolutions(0.4) if r is not None]
        assert not (changed and self.algorithm.is_lossless)

    def test_levels_are_of_the_store_and_the_best_one_alone_where_it_needs_no_ladder(self) -> None:
        fetched = [f for *_, r in self.resolutions(0.3) if r is not None for f in r.fetch]
        assert all(isinstance(f.level, int) and 0 <= f.level < 3 for f in fetched)
        assert any(f.level for f in fetched) == self.algorithm.uses_ladder
        for event in all_events(PASSES):
            for layer in range(GEOMETRY.num_layers):
                keys = [GEOMETRY.key(layer, e) for e in (5, 0, 7, 2)]
                levels = self.make().prefetch_levels(event, layer, keys)
                assert len(levels) == len(keys) and all(0 <= level < 3 for level in levels)
                assert self.algorithm.uses_ladder or not any(levels)

    def test_no_token_gets_an_expert_twice(self) -> None:
        for event, _, _, resolution in self.resolutions(0.5):
            if resolution is None or resolution.selection is None:
                continue
            assert resolution.selection.experts.shape == event.experts.shape
            for row in resolution.selection.experts.tolist():
                assert len(set(row)) == len(row)

    def test_what_routing_dropped_stays_dropped(self) -> None:
        for _, _, _, resolution in self.resolutions(0.4, dropped=True):
            if resolution is not None and resolution.selection is not None:
                assert (resolution.selection.experts[:, -1] == DROPPED).all()


def _executed(event: Event, resolution: Any) -> Any:
    if resolution.selection is None:
        return event.experts
    experts, keep = resolution.selection.experts, resolution.selection.keep
    return experts if keep is None else experts[keep]


CONTRACTS: dict[str, type[Contract]] = {
    "routing": RoutingContract,
    "prefetch": PrefetchContract,
    "eviction": EvictionContract,
    "miss": MissContract,
}


def run_contract(case: type[Contract]) -> int:
    """Run every test of a contract class outside pytest; return how many there are."""
    names = [name for name in dir(case) if name.startswith("test_")]
    for name in names:
        getattr(case(), name)()
    return len(names)
