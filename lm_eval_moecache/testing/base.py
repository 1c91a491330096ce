"""What holds on every axis."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar

import numpy as np

from lm_eval_moecache.algorithms.policy import Choice, Policy
from lm_eval_moecache.algorithms.registry import base_of, parameters_of
from lm_eval_moecache.records.event import UNSEEN_SCORES, Event
from lm_eval_moecache.testing.artifacts import profile_parameter
from lm_eval_moecache.testing.streams import (
    StreamFuture,
    all_events,
    laddered,
    make_geometry,
    make_stream,
    policy_of,
    run,
)


def declared(event: Event, algorithm: Any) -> Event:
    """Return the event with the scores that the algorithm declared, and no others.

    A run may show more, because another axis asked: a rule that reads what it has not declared
    would work beside one partner and fail beside the next.
    """
    logits = getattr(algorithm, "uses_logits", False)
    weights = logits or getattr(algorithm, "uses_weights", False)
    return event._replace(
        weights=event.weights if weights else UNSEEN_SCORES,
        logits=event.logits if logits else UNSEEN_SCORES,
    )


GEOMETRY = make_geometry()
PASSES = make_stream(GEOMETRY)


class Contract:
    """What holds on every axis."""

    axis: ClassVar[str]
    algorithm: ClassVar[type[Any]]
    parameters: ClassVar[dict[str, Any]] = {}

    def make(self, seed: int = 0) -> Any:
        given = profile_parameter(self.algorithm, GEOMETRY) | self.parameters
        geometry = laddered(GEOMETRY) if getattr(self.algorithm, "uses_ladder", 0) else GEOMETRY
        made = self.algorithm(geometry, seed=seed, **given)
        if getattr(made, "is_offline", False):
            made.prepare(StreamFuture(GEOMETRY, PASSES))
        return made

    def policy(self) -> Policy:
        """The on-demand policy with this algorithm, and what it insists to be paired with."""
        defaults = {n: p.default for n, p in parameters_of(self.algorithm).items()}
        choice = Choice(
            axis=self.axis,
            name=f"{self.algorithm.__module__}.{self.algorithm.__name__}",
            algorithm=self.algorithm,
            parameters=defaults | self.parameters,
        )
        partners = {axis: names[-1] for axis, names in self.algorithm.pairs_with.items()}
        change: dict[str, Any] = {self.axis: choice}
        return dataclasses.replace(policy_of(partners), **change)

    def test_it_is_a_subclass_of_the_axis_base_and_names_its_source(self) -> None:
        assert issubclass(self.algorithm, base_of(self.axis))
        assert len(self.algorithm.source) > 3
        assert self.algorithm.__doc__

    def test_every_parameter_has_a_type_and_a_default(self) -> None:
        for name, parameter in parameters_of(self.algorithm).items():
            assert parameter.kind is parameter.KEYWORD_ONLY, name
            assert parameter.default is not parameter.empty, name
            assert parameter.annotation is not parameter.empty, name

    def test_a_run_keeps_the_conservation_laws_and_repeats_itself(self) -> None:
        for capacity in ("30%", "1", "100%"):
            first, again = (run(self.policy(), GEOMETRY, capacity) for _ in range(2))
            assert first.figures == again.figures
            for record in first.engine.ledger.passes:
                assert record.hits + record.late + record.misses == record.requests
                assert 0 <= record.unfaithful <= record.executed <= record.token_requests

    def test_the_seed_matters_only_where_it_says_so(self) -> None:
        """`draws` decides whether a seed without effect is warned of."""
        figures = [run(self.policy(), GEOMETRY, "60%", seed=seed).figures for seed in range(4)]
        assert any(other != figures[0] for other in figures[1:]) == self.algorithm.draws

    def test_a_run_leaves_the_events_it_was_given_alone(self) -> None:
        before = copy.deepcopy(PASSES)
        run(self.policy(), GEOMETRY)
        for old, new in zip(all_events(before), all_events(PASSES), strict=True):
            assert old.keys == new.keys
            np.testing.assert_array_equal(old.experts, new.experts)
            np.testing.assert_array_equal(old.logits, new.logits)
