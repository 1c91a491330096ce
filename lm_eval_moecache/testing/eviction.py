"""What every eviction algorithm promises, and a language for what one of them does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.testing.base import GEOMETRY, PASSES, Contract, declared
from lm_eval_moecache.testing.streams import fresh, make_event, run

USE = re.compile(r"\b(recent|use[ds]?|unused|frequen)", re.IGNORECASE)


def play(eviction: EvictionAlgorithm, script: str) -> list[int]:
    """Play a script and return who leaves, in order, with nothing pinned.

    A script is a list of steps with commas between: `pass` (a new one begins), `load 1 9` (in this
    order), `prefetch 3`, `want 3` (predicted, and resident already), `use 9 11` (one event, of keys
    of one layer, the heaviest first), and at the end `leave 1 3 9`, which says what is expected.
    Keys are those of `GEOMETRY`: layer x 8 + expert.
    """
    eviction.capacity_bytes, eviction.num_slots = 800, 8
    eviction.on_pass(0)
    passes, loaded = 0, 0
    for word, keys in _steps(script):
        if word == "pass":
            passes += 1
            eviction.on_pass(passes)
        elif word in ("load", "prefetch"):
            loaded += len(keys)
            for key in keys:
                eviction.on_insert(key, word == "prefetch")
        elif word == "want":
            for key in keys:
                eviction.on_predicted(key)
        elif word == "use":
            eviction.on_event(_use(keys, passes))
        else:
            assert word == "leave", f"{word!r} is no step of a script"
    left = []
    for _ in range(loaded):
        victim = eviction.victim(frozenset(), 0)
        assert victim is not None, "nobody leaves though nothing is pinned"
        eviction.on_evict(victim)
        left.append(victim)
    return left


def expected(script: str) -> list[int]:
    """Return what a script says of who leaves."""
    word, keys = list(_steps(script))[-1]
    assert word == "leave", f"a script ends in `leave`, and not in {word!r}"
    return keys


def without_use(script: str) -> str:
    """Return a script less its uses."""
    return ", ".join(step for step in script.split(", ") if not step.startswith("use"))


def _steps(script: str) -> list[tuple[str, list[int]]]:
    words = [step.split() for step in script.split(",")]
    return [(word, [int(key) for key in keys]) for word, *keys in words]


def _use(keys: Sequence[int], pass_index: int) -> Event:
    layer, experts = keys[0] // GEOMETRY.num_experts, [key % GEOMETRY.num_experts for key in keys]
    logits = [-1e3] * GEOMETRY.num_experts
    for rank, expert in enumerate(experts):
        logits[expert] = 2.0 - rank
    event = make_event(GEOMETRY, pass_index, layer, [logits])
    row = slice(0, len(keys))
    return event._replace(
        keys=list(keys), experts=event.experts[:, row], weights=event.weights[:, row]
    )


class Pool:
    """The least that an eviction algorithm can live in: a set of keys of a fixed size."""

    def __init__(self, eviction: EvictionAlgorithm, size: int, curious: bool = False) -> None:
        eviction.capacity_bytes, eviction.num_slots = size * 100, size
        self.eviction = eviction
        self.size = size
        self.curious = curious
        """Whether it asks more often than it evicts."""
        self.keys: set[int] = set()
        self.victims: list[int] = []

    def serve(self, event: Event) -> None:
        """Load an event's keys as the layer step does, then tell of their use."""
        pinned = set(event.keys)
        for key in event.keys:
            if key in self.keys:
                continue
            if len(self.keys) == self.size:
                self.eviction.on_miss(key)
                self.evict(pinned, event.layer)
            if len(self.keys) < self.size:
                self.insert(key)
        self.eviction.on_event(event)

    def insert(self, key: int, prefetched: bool = False) -> None:
        self.keys.add(key)
        self.eviction.on_insert(key, prefetched)

    def evict(self, pinned: set[int], layer: int) -> None:
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
        for events in PASSES:
            self.eviction.on_pass(events[0].pass_index)
            for event in events:
                self.serve(declared(fresh(event), self.eviction))
        return self


class EvictionContract(Contract):
    """What every eviction algorithm promises.

    `scripts` say who leaves after what, in the words of `play`: scripts of your own are the only
    way to test that the rule is the one its docstring tells.
    """

    axis = "eviction"
    scripts: ClassVar[Sequence[str]] = ()
    looks_at_use: ClassVar[bool | None] = None
    """Whether use decides who leaves; None for what the docstring says."""

    def make(self, seed: int = 0) -> EvictionAlgorithm:
        made: EvictionAlgorithm = super().make(seed)
        return made

    def test_it_evicts_only_free_residents(self) -> None:
        for size in (1, 4, 9):
            assert Pool(self.make(), size).serve_all().victims

    def test_the_same_seed_makes_the_same_choices(self) -> None:
        first, again = (Pool(self.make(3), 7).serve_all().victims for _ in range(2))
        assert first == again

    def test_asking_changes_nothing_before_somebody_leaves(self) -> None:
        """The cache may ask with other pins, and may find that it need not evict at all."""
        for size in (1, 4, 9):
            asked, left_alone = Pool(self.make(3), size, curious=True), Pool(self.make(3), size)
            assert asked.serve_all().victims == left_alone.serve_all().victims

    def test_it_knows_its_capacity_before_its_first_call(self) -> None:
        engine = run(self.policy(), GEOMETRY, "6").engine
        eviction = engine.pools[0].eviction
        size = GEOMETRY.expert_bytes[0][0] if len(eviction.geometry.precision) == 1 else None
        assert eviction.capacity_bytes == engine.pools[0].capacity_bytes
        assert eviction.num_slots == (6 if size else eviction.num_slots)

    def test_who_leaves_is_as_scripted(self) -> None:
        for script in self.scripts:
            assert play(self.make(), script) == expected(script), script

    def test_what_its_docstring_says_of_use_is_seen(self) -> None:
        """A rule that speaks of use has a script in which a use decides who leaves."""
        looks = self.looks_at_use
        if looks is None:
            looks = USE.search(self.algorithm.__doc__ or "") is not None
        if not looks:
            return
        decided = [s for s in self.scripts if play(self.make(), without_use(s)) != expected(s)]
        assert decided, "its docstring speaks of use: give `scripts` one where a use decides"

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
