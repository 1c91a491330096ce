"""The engine against the oracle on random settings of every kind, figure by figure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lm_eval_moecache.algorithms.registry import AXES, algorithm_names
from tests.engine.costs import Costs
from tests.engine.drawn import KINDS, check
from tests.engine.oracle import Oracle


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS.__getitem__)
def test_settings_of_each_kind(kind: int) -> None:
    for seed in range(kind, 300, len(KINDS)):
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
    (Oracle, "drain", nothing),
    (Oracle, "pay", nothing),
    (Oracle, "warm", nothing),
    (Oracle, "empty", nothing),
    (Oracle, "judge", nothing),
    (Oracle, "draft", lambda *args: 0.0),
    (Oracle, "end_host", nothing),
    (Oracle, "changed", lambda self, event, selection: event),
    (Costs, "gates_s", lambda *args: 0.0),
    (Costs, "network_s", lambda *args: 0.0),
    (Costs, "attention_s", lambda *args: 0.0),
    (Costs, "lanes", lambda self, reads: [1e-3] * len(reads)),
    (Costs, "host_share", lambda self, rule, event, tokens, *times: (set(tokens), 1e-3)),
]


@pytest.mark.parametrize(("of", "name", "fault"), FAULTS, ids=[name for _, name, _ in FAULTS])
def test_a_rule_left_out_is_seen(
    of: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong rule in the oracle shows as the same one in the engine would."""
    monkeypatch.setattr(of, name, fault)
    with pytest.raises(AssertionError, match="seed="):
        for seed in range(300):
            check(seed)
