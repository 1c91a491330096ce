"""The algorithms of a run, how they are asked, and a check of what they answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from lm_eval_moecache.algorithms.eviction.base import EvictionAlgorithm
from lm_eval_moecache.algorithms.miss.base import MissAlgorithm, SubstitutingMiss
from lm_eval_moecache.algorithms.parameters import OverRows
from lm_eval_moecache.algorithms.policy import Choice, Policy
from lm_eval_moecache.algorithms.prefetch.base import PrefetchAlgorithm, ScorePrefetch
from lm_eval_moecache.algorithms.registry import reason_of, source_of
from lm_eval_moecache.algorithms.routing.base import RoutingAlgorithm, RoutingByCost
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.errors import AlgorithmError
from lm_eval_moecache.records.event import DROPPED, PREFILL, Event
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.selection import Selection


class Rules:
    """The algorithms of one run, and facts about them that all events share.

    The eviction algorithms are the caches'.
    """

    def __init__(
        self, geometry: Geometry, policy: Policy, seed: int, like: Rules | None = None
    ) -> None:
        """`like` are rules of the same setting: what they have read and worked out is shared."""

        def made(axis: str) -> Any:
            rule = getattr(like, axis, None)
            if isinstance(rule, OverRows):
                return rule.reset_copy()
            return getattr(policy, axis).build(geometry, seed)

        self.routing: RoutingAlgorithm = made("routing")
        self.prefetch: PrefetchAlgorithm = made("prefetch")
        self.miss: MissAlgorithm = made("miss")
        self.geometry, self.policy = geometry, policy
        self._decode_only = policy.phases == "decode"
        self.is_lossy = not (self.routing.is_lossless and self.miss.is_lossless)
        """Whether any algorithm may change a selection."""
        self.prefetches = self.prefetch.is_active
        self.ladder = len(geometry.precision) > 1
        """Whether the store has several precision levels."""

    def routes(self, phase: str) -> bool:
        """Whether routing may change results in a phase (`phases=decode`)."""
        return not (self.routing.is_lossless or (self._decode_only and phase == PREFILL))

    def resolves(self, phase: str) -> bool:
        """Whether the miss rule may."""
        return not (self.miss.is_lossless or (self._decode_only and phase == PREFILL))

    def begin_pass(self, number: int) -> None:
        """Tell the rules that a pass begins."""
        self.routing.on_pass(number)
        self.prefetch.on_pass(number)

    @property
    def proposes_by_loop(self) -> bool:
        """Whether proposals follow from predictions alone, and go to the link as they are."""
        return is_loop(self.prefetch) and not self.ladder

    def choose_by_loop(self, eviction: EvictionAlgorithm) -> bool:
        """Whether all that the rules decide is known, or decided by loops that the kernel calls."""
        if self.ladder or not self.is_lossy:
            return not self.ladder
        rule: Any = self.routing if self.miss.is_lossless else self.miss
        is_one = self.routing.is_lossless or self.miss.is_lossless
        looks = eviction.uses_weights or eviction.uses_logits or eviction.is_offline
        can_propose = self.proposes_by_loop or not self.prefetches
        return is_one and is_loop(rule) and not looks and can_propose

    @contextmanager
    def naming(self, axis: str, method: str, layer: int | None) -> Iterator[None]:
        """Have errors of a rule's method name the rule and the layer."""
        try:
            yield
        except AlgorithmError:
            raise
        except Exception as error:
            what = f"raised {reason_of(error)}"
            if isinstance(error, Misfit):
                what = f"returned {error}"
            choice: Choice = getattr(self.policy, axis)
            where = "" if layer is None else f" at layer {layer}"
            raise AlgorithmError(
                f"{axis}={choice.name} ({source_of(choice.algorithm)}): "
                f"{choice.algorithm.__name__}.{method}{where} {what}"
            ) from error

    def choose(self, axis: str, rule: Any, event: Event) -> Selection | None:
        """Return what a routing or miss rule chooses."""
        with self.naming(axis, "choose", event.layer):
            selection: Selection | None = rule.choose(event)
            if selection is not None:
                check_selection(selection, event)
            return selection

    def propose(self, rule: PrefetchAlgorithm, event: Event) -> IntArray:
        """Return the keys that a row's prefetcher proposes."""
        with self.naming("prefetch", "propose", event.layer):
            return self.keys_of(rule.propose(event))

    def propose_draft(self, layer: int, logits: Any) -> IntArray:
        """Return the keys that a prefetcher proposes while a draft model drafts."""
        with self.naming("prefetch", "propose_draft", layer):
            assert self.prefetch.draft_stage is not None, "drafting without a draft stage"
            return self.keys_of(self.prefetch.draft_stage.propose_draft(layer, logits))

    def keys_of(self, proposed: Sequence[int]) -> IntArray:
        """Return proposed keys as an array; Misfit unless they are keys, each once."""
        most = self.geometry.num_layers * self.geometry.num_experts
        expected = f"Expected: keys in 0..{most - 1}, none twice; empty for none."
        if not isinstance(proposed, Sequence | np.ndarray) or isinstance(proposed, str):
            raise Misfit(f"{shown(proposed)}. {expected}")
        keys = np.asarray(proposed) if len(proposed) else np.zeros(0, np.int64)
        if keys.ndim != 1 or keys.dtype.kind not in "iu":
            raise Misfit(f"{shown(proposed)}. {expected}")
        if len(keys):
            wrong = keys[(keys < 0) | (keys >= most)]
            if len(wrong):
                raise Misfit(f"the key {wrong[0]}. {expected}")
            if len(keys) > 1 and len(set(keys.tolist())) < len(keys):
                raise Misfit(f"{shown(proposed)} with a key twice. {expected}")
        return keys.astype(np.int64, copy=False)

    def levels_of(self, event: Event, keys: IntArray) -> IntArray:
        """Return the level at which the miss rule has each key prefetched, for one row."""
        levels, num_experts = np.zeros(len(keys), np.int64), self.geometry.num_experts
        layers, most = keys // num_experts, len(self.geometry.precision)
        for layer in dict.fromkeys(layers.tolist()):
            own = np.flatnonzero(layers == layer)
            with self.naming("miss", "prefetch_levels", event.layer):
                found = np.asarray(self.miss.prefetch_levels(event, layer, keys[own] % num_experts))
                fits = found.shape == own.shape and found.dtype.kind in "iu"
                if not (fits and ((found >= 0) & (found < most)).all()):
                    expected = f"Expected: {len(own)} levels, each in 0..{most - 1}."
                    raise Misfit(f"{shown(found)}. {expected}")
            levels[own] = found
        return levels

    def required_levels(self, event: Event, executed: Event) -> IntArray:
        """Return the level that the miss rule requires of each entry.

        The store must have those of entries that are loaded.
        """
        most = len(self.geometry.precision)
        with self.naming("miss", "levels", event.layer):
            levels = np.asarray(self.miss.levels(event.experts, event.weights))
            if not (levels.shape == event.experts.shape and levels.dtype.kind in "iu"):
                raise Misfit(f"{shown(levels)}. Expected: integers [tokens, top_k].")
            wrong = levels[executed.is_missing & ((levels < 0) | (levels >= most))]
            if len(wrong):
                raise Misfit(f"the level {wrong[0]}. Expected: each in 0..{most - 1}.")
            # An array of its own, as the kernel writes to it.
            return np.array(levels.clip(0, most - 1), np.int64, order="C")


def make_evictions(geometry: Geometry, setting: Setting) -> list[EvictionAlgorithm]:
    """Return the eviction algorithm of each cache."""
    evictions = []
    for size in setting.capacity.bytes_by_partition:
        eviction = setting.policy.eviction.build(geometry, setting.seed)
        total_bytes = sum(levels[0] for levels in geometry.expert_bytes)
        eviction.capacity_bytes = size
        eviction.num_slots = max(1, size * geometry.num_layers // total_bytes)
        evictions.append(eviction)
    return evictions


_LOOPS = ((RoutingByCost, "choose"), (SubstitutingMiss, "choose"), (ScorePrefetch, "propose"))
"""Bases of rules with a loop, and the method that says no more than the loop does."""


def is_loop(rule: Any) -> bool:
    """Whether a loop says all that a rule decides."""
    return any(
        isinstance(rule, base) and getattr(type(rule), method) is getattr(base, method)
        for base, method in _LOOPS
    )


class Misfit(Exception):
    """What a rule returned, and what is expected instead."""


def check_selection(selection: Any, event: Event) -> None:
    """Raise Misfit unless a selection is one of experts [tokens, top_k], none twice for a token."""
    if not isinstance(selection, Selection):
        raise Misfit(f"{shown(selection)}. Expected: a Selection, or None for the event's own.")
    kinds = {"experts": "iu", "keep": "b", "weigh_as": "iu", "weights": "f"}
    words = {"iu": "integers", "b": "booleans", "f": "floats"}
    was_dropped = event.experts == DROPPED
    for name, kind in kinds.items():
        field = getattr(selection, name)
        if field is None and name != "experts":
            continue
        is_array = isinstance(field, np.ndarray) and field.shape == event.experts.shape
        if not is_array or field.dtype.kind not in kind:
            raise Misfit(
                f"a Selection with {name}={shown(field)}. Expected: an array of {words[kind]} "
                f"[tokens, top_k], here {[*event.experts.shape]}."
            )
        if kind == "iu":
            allowed = (field >= 0) & (field < event.num_experts) | (field == DROPPED) & was_dropped
            if not allowed.all():
                raise Misfit(
                    f"a Selection with {name}={int(field[~allowed][0])}. Expected: experts in "
                    f"0..{event.num_experts - 1}, not keys; keep=False where one is dropped."
                )
    experts = selection.experts
    if (experts[was_dropped] != DROPPED).any():
        raise Misfit(
            f"a Selection that revives an expert. Expected: {DROPPED} where the event has it."
        )
    if selection.keep is not None:
        # What is dropped may be named twice.
        experts = np.where(selection.keep, experts, DROPPED)
    ordered = np.sort(experts, axis=-1)
    is_twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != DROPPED)).any(axis=-1)
    if is_twice.any() and selection.weigh_as is None:
        token = int(is_twice.argmax())
        raise Misfit(
            f"a Selection with experts={selection.experts[token].tolist()} for token {token}. "
            "Expected: no expert twice."
        )


def shown(value: Any) -> str:
    """Describe a value in few words: its class, and its shape or beginning."""
    if isinstance(value, np.ndarray):
        return f"a numpy.ndarray {[*value.shape]} of {value.dtype}"
    if isinstance(value, Selection):
        return "a Selection"
    text = " ".join(repr(value).split())
    text = text if len(text) <= 60 else text[:57] + "..."
    return "None" if value is None else f"the {type(value).__name__} {text}"
