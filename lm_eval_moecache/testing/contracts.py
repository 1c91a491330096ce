"""Contracts of algorithms: one shared by all axes, and one for each axis.

Subclass the contract of an axis and name the algorithm; pytest does the rest. `parameters` are
optional. `tests/algorithms/test_contracts.py` does so for every file in the package's four folders.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm, StatefulEviction
from lm_eval_moecache.algorithms.policy import Choice, Policy
from lm_eval_moecache.algorithms.prefetch.base import DraftStagePrefetch
from lm_eval_moecache.algorithms.registry import base_of, parameters_of
from lm_eval_moecache.engine.rules import check_selection
from lm_eval_moecache.records.event import (
    DROPPED,
    PASS_START,
    UNSEEN_SCORES,
    Event,
)
from lm_eval_moecache.testing.ranked import as_stateful
from lm_eval_moecache.testing.streams import (
    StreamFuture,
    all_events,
    fresh,
    laddered,
    make_event,
    make_geometry,
    make_stream,
    pass_predictions,
    policy_of,
    profile_parameter,
    run,
)

GEOMETRY = make_geometry()
PASSES = make_stream(GEOMETRY)


def declared(event: Event, algorithm: Any) -> Event:
    """Return the event with only the fields that the algorithm declares.

    A run may fill more fields because another axis needs them: a rule that reads an undeclared
    field would work with one partner and fail with the next.
    """
    logits = algorithm.uses_logits
    weights = logits or algorithm.uses_weights
    return event._replace(
        weights=event.weights if weights else UNSEEN_SCORES,
        logits=event.logits if logits else UNSEEN_SCORES,
    )


def placed(event: Event, rule: Any, resident: Any) -> Event:
    """Return the event as a rule that chooses sees it, with these [experts] resident."""
    flags = np.asarray(resident, dtype=bool)[None]
    return declared(event, rule)._replace(resident=flags, absent=~flags, own=[rule])


class Contract:
    """The tests shared by all axes."""

    algorithm: ClassVar[type[Any]]
    """Class under test."""
    parameters: ClassVar[dict[str, Any]] = {}
    """Parameters that replace the class' defaults."""

    def make(self, seed: int = 0) -> Any:
        """Return a new instance, with a profile and the future where it needs them.

        What it returns is checked as a run checks rules of other packages.
        """
        parameters = profile_parameter(self.algorithm, GEOMETRY) | self.parameters
        geometry = laddered(GEOMETRY) if getattr(self.algorithm, "uses_ladder", 0) else GEOMETRY
        instance = self.algorithm(geometry, seed=seed, **parameters)
        instance = as_stateful(instance)
        if instance.is_offline:
            instance.prepare(StreamFuture(GEOMETRY, PASSES))
        return instance

    def policy(self) -> Policy:
        """Return the on-demand policy with this algorithm and its mandatory partners."""
        defaults = {n: p.default for n, p in parameters_of(self.algorithm).items()}
        choice = Choice(
            axis=self.algorithm.axis,
            name=f"{self.algorithm.__module__}.{self.algorithm.__name__}",
            algorithm=self.algorithm,
            parameters=defaults | self.parameters,
        )
        partners = {axis: names[-1] for axis, names in self.algorithm.pairs_with.items()}
        change: dict[str, Any] = {self.algorithm.axis: choice}
        return dataclasses.replace(policy_of(partners), **change)

    def test_it_is_a_subclass_of_the_axis_base_and_names_its_source(self) -> None:
        assert issubclass(self.algorithm, base_of(self.algorithm.axis))
        assert len(self.algorithm.source) > 3, "say in `source` where the rule is from"
        assert self.algorithm.__doc__, "a docstring says what the rule does"

    def test_every_parameter_has_a_type_and_a_default(self) -> None:
        for name, parameter in parameters_of(self.algorithm).items():
            assert parameter.kind is parameter.KEYWORD_ONLY, name
            assert parameter.default is not parameter.empty, name
            assert parameter.annotation is not parameter.empty, name

    def test_a_run_keeps_the_conservation_laws_and_repeats_itself(self) -> None:
        for capacity in ("30%", "1experts", "100%"):
            first, again = (run(self.policy(), GEOMETRY, capacity) for _ in range(2))
            assert first.figures == again.figures
            for record in first.engine.ledger.passes:
                assert record.hits + record.late + record.misses == record.requests
                assert 0 <= record.unfaithful <= record.executed <= record.token_requests

    def test_the_seed_matters_only_where_it_says_so(self) -> None:
        """`draws` decides whether a run warns of a seed without effect."""
        figures = [run(self.policy(), GEOMETRY, "60%", seed=seed).figures for seed in range(4)]
        assert any(other != figures[0] for other in figures[1:]) == self.algorithm.draws

    def test_a_run_leaves_the_events_it_was_given_alone(self) -> None:
        before = copy.deepcopy(PASSES)
        run(self.policy(), GEOMETRY)
        for old, new in zip(all_events(before), all_events(PASSES), strict=True):
            np.testing.assert_array_equal(old.experts, new.experts)
            np.testing.assert_array_equal(old.logits, new.logits)


class RoutingContract(Contract):
    """The tests of every routing algorithm."""

    def selections(self, resident: Any) -> list[Any]:
        """Return (event, selection) for every event of the stream, with these experts resident."""
        routing, pairs = self.make(), []
        for events in PASSES:
            routing.on_pass(events[0].pass_index)
            for event in events:
                pairs.append((event, routing.choose(placed(fresh(event), routing, resident))))
        return pairs

    def test_its_selections_fit_whatever_is_resident(self) -> None:
        for every in (0, 3, 1):
            for event, selection in self.selections(_each(every)):
                if selection is not None:
                    check_selection(selection, event)

    def test_a_lossless_routing_never_changes_a_selection(self) -> None:
        changed = [s for _, s in self.selections(_each(3)) if s is not None]
        if self.algorithm.is_lossless:
            assert not changed, "is_lossless, but it changed a selection"
        else:
            assert changed, "it is not is_lossless, but it changed no selection of the stream"


def _each(every: int) -> Any:
    """Return flags of each so manieth expert of a layer; 0: of none."""
    return (np.arange(GEOMETRY.num_experts) % max(every, 1) == 0) & (every > 0)


class PrefetchContract(Contract):
    """The tests of every prefetch algorithm."""

    def proposals(self) -> list[tuple[Event, Sequence[int]]]:
        """Return (event, proposed keys) for every event of the stream."""
        prefetch, pairs = self.make(), []
        if isinstance(prefetch, DraftStagePrefetch):
            return [(e, prefetch.propose_draft(e.layer, e.logits[-1:])) for e in all_events(PASSES)]
        for events in PASSES:
            prefetch.on_pass(events[0].pass_index)
            if prefetch.predicts_pass:
                nothing = np.zeros((len(events[0].experts), 0), np.int64)
                before = events[0]._replace(
                    layer=PASS_START, experts=nothing, predicted=pass_predictions(events)
                )
                pairs.append((before, prefetch.propose(before)))
            for event in events:
                event_copy = fresh(event, prefetch.depth, prefetch.uses_predictor)
                pairs.append((event, prefetch.propose(declared(event_copy, prefetch))))
        return pairs

    def test_proposals_are_keys_of_the_model_without_duplicates(self) -> None:
        for _, keys in self.proposals():
            assert len(set(keys)) == len(keys)
            assert all(0 <= k < GEOMETRY.num_layers * GEOMETRY.num_experts for k in keys)

    def test_it_proposes_something_unless_it_says_that_it_does_not(self) -> None:
        assert any(len(keys) for _, keys in self.proposals()) == self.algorithm.is_active

    def test_what_predicts_a_pass_says_nothing_once_it_runs(self) -> None:
        if self.algorithm.predicts_pass:
            assert not any(
                len(keys) for event, keys in self.proposals() if event.layer != PASS_START
            )


class MissContract(Contract):
    """The tests of every miss algorithm."""

    def selections(self, share: float, dropped: bool = False) -> list[Any]:
        """Return (event, selection) of each event with a miss.

        About `share` of the experts are resident; with `dropped`, each token's last is dropped.
        """
        miss, cases = self.make(), []
        rng = np.random.default_rng(1)
        for event in all_events(PASSES):
            if dropped:
                experts = event.experts.copy()
                experts[:, -1] = DROPPED
                event = event._replace(experts=experts)
            seen = placed(event, miss, rng.random(GEOMETRY.num_experts) < share)
            if seen.is_missing.any():
                cases.append((seen, miss.choose(seen)))
        return cases

    def test_its_selections_fit_whatever_is_resident(self) -> None:
        for share, dropped in ((0.0, False), (0.3, False), (0.7, False), (0.4, True)):
            for event, selection in self.selections(share, dropped):
                if selection is not None:
                    check_selection(selection, event)

    def test_a_lossless_handler_loads_all(self) -> None:
        changed = [s for _, s in self.selections(0.4) if s is not None]
        assert not (changed and self.algorithm.is_lossless), "is_lossless, but it did not load all"

    def test_levels_are_of_the_store_and_the_best_one_alone_where_it_needs_no_ladder(self) -> None:
        miss, most = self.make(), 4 if self.algorithm.uses_ladder else 1
        for event in all_events(PASSES):
            levels = miss.levels(event.experts, event.weights)
            assert levels.shape == event.experts.shape
            assert levels.min() >= 0 and levels.max() < most
            for layer in range(GEOMETRY.num_layers):
                levels = miss.prefetch_levels(event, layer, np.array([5, 0, 7, 2]))
                assert levels.shape == (4,) and levels.min() >= 0
                assert levels.max() < (3 if self.algorithm.uses_ladder else 1)


def play(rule: EvictionAlgorithm, script: str) -> list[int]:
    """Play a script and return the victims in order, with nothing pinned.

    A script is a comma-separated list of steps: `pass` (a new pass begins), `load 1 9` (in this
    order), `prefetch 3`, `want 3` (predicted while resident), `use 9 11` (one event: keys of one
    layer, heaviest first; `use 9 11 | 10 9` has two tokens), `use_low 9` (executed below the best
    precision), `at 2` (this layer is being served from here on; 0 at first), and `leave 1 3 9`, the
    expected victims: that many keys are evicted, or all of them where it is the last step. The
    first use after a load is the demand that loaded the key, unless a new pass has begun; an
    evicted key may be loaded again (ghost lists). Keys are those of `GEOMETRY`: layer x 8 + expert.
    """
    pool, passes, layer, steps = Pool(rule, 8), 0, 0, _steps(script)
    eviction: Any = pool.eviction
    eviction.on_pass(0)
    for place, (word, tokens) in enumerate(steps):
        (keys, *_) = tokens
        if word == "pass":
            passes += 1
            eviction.on_pass(passes)
        elif word == "at":
            (layer,) = keys
        elif word in ("load", "prefetch"):
            for key in keys:
                pool.insert(key, word == "prefetch")
        elif word == "want":
            for key in keys:
                eviction.on_predicted(key)
        elif word == "use":
            eviction.on_event(_use(tokens, passes))
        elif word == "use_low":
            eviction.on_levels(_use(tokens, passes), dict.fromkeys(keys, 1))
        else:
            assert word == "leave", f"{word!r} is no step of a script"
            for _ in pool.keys.copy() if place == len(steps) - 1 else keys:
                pool.evict(set(), layer)
    return pool.victims


def expected(script: str) -> list[int]:
    """Return the victims that a script expects, in order."""
    steps = _steps(script)
    assert steps[-1][0] == "leave", f"a script ends in `leave`, and not in {steps[-1][0]!r}"
    return [key for word, tokens in steps if word == "leave" for key in tokens[0]]


def without_use(script: str) -> str:
    """Return a script without its `use` steps."""
    return ", ".join(step for step in script.split(", ") if not step.startswith("use"))


def _steps(script: str) -> list[tuple[str, list[list[int]]]]:
    words = [step.strip().partition(" ") for step in script.split(",")]
    return [(word, [[*map(int, t.split())] for t in keys.split("|")]) for word, _, keys in words]


def _use(tokens: Sequence[Sequence[int]], pass_index: int) -> Event:
    layer, row = tokens[0][0] // GEOMETRY.num_experts, slice(0, len(tokens[0]))
    logits = np.full((len(tokens), GEOMETRY.num_experts), -1e3)
    for token, keys in enumerate(tokens):
        for rank, key in enumerate(keys):
            logits[token, key % GEOMETRY.num_experts] = 2.0 - rank
    event = make_event(GEOMETRY, pass_index, layer, logits)
    return event._replace(experts=event.experts[:, row], weights=event.weights[:, row])


class Pool:
    """The smallest cache that an eviction algorithm can run in: a key set of fixed size."""

    def __init__(self, eviction: EvictionAlgorithm, size: int, curious: bool = False) -> None:
        eviction.capacity_bytes, eviction.num_slots = size * 100, size
        self.eviction: StatefulEviction = as_stateful(eviction)
        self.size = size
        self.curious = curious
        """Whether the pool also asks for victims that it does not evict."""
        self.keys: set[int] = set()
        self.victims: list[int] = []

    def serve(self, event: Event) -> None:
        """Load an event's keys as the engine does, then report the event."""
        self.load(event)
        self.eviction.on_event(event)

    def load(self, event: Event) -> None:
        """Load an event's keys that are absent, as far as there is room."""
        pinned = set(event.keys)
        for key in event.keys:
            if key in self.keys:
                continue
            if len(self.keys) == self.size:
                self.eviction.on_miss(key)
                self.evict(pinned, event.layer)
            if len(self.keys) < self.size:
                self.insert(key)

    def insert(self, key: int, prefetched: bool = False) -> None:
        """Make a key resident and report its load."""
        self.keys.add(key)
        self.eviction.on_insert(key, prefetched)

    def evict(self, pinned: set[int], layer: int) -> None:
        """Evict one victim, if any key is free; assert that asking twice gives the same one."""
        if self.curious:
            for others in (self.keys, set(sorted(self.keys)[::2]), set[int]()):
                self.eviction.victim(pinned | others, layer)
        victim = self.eviction.victim(pinned, layer)
        again = self.eviction.victim(pinned, layer)
        assert victim == again, "asking twice changed the answer"
        if victim is None:
            assert self.keys <= pinned, f"no victim though {self.keys - pinned} are free"
            return
        assert victim in self.keys and victim not in pinned
        self.keys.remove(victim)
        self.victims.append(victim)
        self.eviction.on_evict(victim)

    def serve_all(self) -> Pool:
        """Serve the whole stream and return this pool."""
        for events in PASSES:
            self.eviction.on_pass(events[0].pass_index)
            for event in events:
                self.serve(declared(fresh(event), self.eviction))
        return self


class EvictionContract(Contract):
    """The tests of every eviction algorithm.

    `scripts` list expected victims in the language of `play`: only scripts of your own can test
    that the rule evicts what it should.
    """

    scripts: ClassVar[Sequence[str]] = ()
    """Scripts of `play`, each ending in `leave`."""
    looks_at_use: ClassVar[bool] = False
    """Whether use decides the victim; where it does, one of `scripts` has to show it."""

    def test_it_evicts_only_free_residents(self) -> None:
        for size in (1, 4, 9):
            assert Pool(self.make(), size).serve_all().victims

    def test_asking_changes_nothing_before_somebody_leaves(self) -> None:
        """The cache may ask with other pins, and may then evict nothing."""
        for size in (1, 4, 9):
            curious, incurious = Pool(self.make(3), size, curious=True), Pool(self.make(3), size)
            assert curious.serve_all().victims == incurious.serve_all().victims

    def test_it_knows_its_capacity_before_its_first_call(self) -> None:
        engine = run(self.policy(), GEOMETRY, "6experts").engine
        eviction = engine.eviction
        assert eviction.capacity_bytes == engine.pools[0].capacity_bytes
        assert eviction.num_slots == 6 or len(eviction.geometry.precision) > 1

    def test_who_leaves_is_as_scripted(self) -> None:
        for script in self.scripts:
            victims = play(self.make(), script)
            assert victims == expected(script), f"{script!r}, but who leaves is {victims}"

    def test_a_use_decides_where_the_rule_looks_at_use(self) -> None:
        if self.looks_at_use:
            decided = [s for s in self.scripts if play(self.make(), without_use(s)) != expected(s)]
            assert decided, "looks_at_use: give `scripts` one where a use decides"

    def test_a_pinned_key_never_goes(self) -> None:
        pool = Pool(self.make(), 8).serve_all()
        for free in sorted(pool.keys):
            assert pool.eviction.victim(pool.keys - {free}, 0) == free
        assert pool.eviction.victim(pool.keys, 0) is None

    def test_every_key_goes_in_the_end_and_it_can_start_anew(self) -> None:
        pool = Pool(self.make(), 8).serve_all()
        before, served = set(pool.keys), len(pool.victims)
        while pool.keys:
            pool.evict(set(), 1)
        assert sorted(pool.victims[served:]) == sorted(before)
        assert pool.eviction.victim(set(), 1) is None
        pool.insert(5)
        assert pool.eviction.victim(set(), 0) == 5

    def test_prefetched_keys_can_be_wanted_again_used_and_evicted(self) -> None:
        pool = Pool(self.make(), 4)
        pool.eviction.on_pass(0)
        for key in (9, 2, 17):
            pool.insert(key, prefetched=True)
            pool.eviction.on_predicted(key)
        pool.serve(fresh(PASSES[0][0]))
        while pool.keys:
            pool.evict(set(), 2)
        assert {9, 2, 17} <= set(pool.victims)


CONTRACTS: dict[str, type[Contract]] = {
    "routing": RoutingContract,
    "prefetch": PrefetchContract,
    "eviction": EvictionContract,
    "miss": MissContract,
}


def run_contract(case: type[Contract]) -> int:
    """Run every test of a contract class outside pytest; return their number."""
    names = [name for name in dir(case) if name.startswith("test_")]
    for name in names:
        getattr(case(), name)()
    return len(names)
