"""The engine against the oracle on random settings of every kind, figure by figure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lm_eval_moecache.algorithms.registry import AXES, algorithm_names
from tests.engine.costs import Costs
from tests.engine.drawn import KINDS, check
from tests.engine.oracle import Oracle


def seeds_of(kind: str) -> range:
    return range(KINDS.index(kind), 300, len(KINDS))


@pytest.mark.parametrize("kind", KINDS)
def test_settings_of_each_kind(kind: str) -> None:
    for seed in seeds_of(kind):
        check(seed)


@pytest.mark.slow
def test_three_thousand_settings() -> None:
    counts = Counter(kind for seed in range(300, 3600) for kind in check(seed).kinds)
    for kind, count in sorted(counts.items()):
        print(f"{count:6} {kind}")
    assert all(counts[kind] > 200 for kind in KINDS)
    for axis in AXES:
        unseen = [name for name in algorithm_names(axis) if not counts[f"{axis} {name}"]]
        assert not unseen, f"{axis}: {unseen}"


def nothing(*args: Any) -> None:
    return


FAULTS = [
    ("prefetch", Oracle, "drain", nothing),
    ("lanes", Oracle, "pay", nothing),
    ("demand", Oracle, "warm", nothing),
    ("lossy", Oracle, "judge", nothing),
    ("draft", Oracle, "draft", lambda *args: 0.0),
    ("host", Oracle, "end_host", nothing),
    ("lossy", Oracle, "changed", lambda self, event, selection: event),
    ("prefetch", Costs, "gates_s", lambda *args: 0.0),
    ("whole_pass", Costs, "network_s", lambda *args: 0.0),
    ("host", Costs, "attention_s", lambda *args: 0.0),
    ("lanes", Costs, "lanes", lambda self, reads: [1e-3] * len(reads)),
    ("host", Costs, "host_share", lambda self, rule, event, tokens, *at: ({*tokens}, 1e-3)),
]


@pytest.mark.parametrize(
    ("kind", "of", "name", "fault"), FAULTS, ids=[name for _, _, name, _ in FAULTS]
)
def test_a_rule_left_out_is_seen(
    kind: str, of: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong rule in the oracle shows as the same one in the engine would."""
    monkeypatch.setattr(of, name, fault)
    with pytest.raises(AssertionError, match="seed="):
        for seed in seeds_of(kind):
            check(seed)
