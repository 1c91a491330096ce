"""Caches warmed before the first request: which experts they hold, at what cost, saving what."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.engine.engine import Engine as VirtualEngine
from lm_eval_moecache.engine.kernel.ranking import find_victim
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.sweep.identity import resolve
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace
from lm_eval_moecache.trace.use import UseProfile, load_use, use_of
from tests.conftest import Moecache
from tests.engine import traces
from tests.engine.scripted import fill

# Experts take 1500 bytes in layer 1 and 1000 in the others.
COUNTS = ((0, 9, 2, 0, 0, 0, 0, 0), (0, 0, 0, 9, 0, 0, 0, 1), (7, 0, 0, 0, 0, 0, 0, 0))
PROFILE = UseProfile(model="", counts=COUNTS)


def warmed(capacity: str, profile: UseProfile | None = PROFILE, **axes: Any) -> Setting:
    return traces.setting_for(traces.GEOMETRY, capacity, axes, warm=profile)


@pytest.mark.parametrize(
    ("capacity", "held"),
    [
        # By use: 1 and 11 (9 each, ties by key), 16 (7), 2 (2), 15 (1); the others are unused.
        ("1500B", {1}),
        ("2000B", {1, 16}),  # 11 is passed over: its 1500 bytes do not fit next to 1
        ("2500B", {1, 11}),
        ("4500B", {1, 11, 16, 2}),
        ("100%", {1, 11, 16, 2, 15}),
        ("1/layer", {1, 11, 16}),
    ],
)
def test_the_most_used_that_fit_are_there_at_no_cost(capacity: str, held: set[int]) -> None:
    engine = VirtualEngine(traces.GEOMETRY, warmed(capacity))
    assert {key for pool in engine.pools for key in pool.resident} == held
    engine.check_integrity()
    if capacity == "4500B":
        # The least used is the first to leave under LRU.
        assert find_victim(engine.memory.run, 0, -1) == 2
    assert engine.now == engine.memory.run.moved == engine.memory.run.busy_s == 0
    assert sum(pool["loads"] + pool["evictions"] for pool in engine.pools) == 0


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_every_fresh_engine_starts_warm(name: str) -> None:
    first = VirtualEngine(traces.GEOMETRY, warmed("4500B", eviction=name))
    placed = dict(first.pools[0].resident)
    for _ in range(3):
        engine = first.fresh()
        assert engine.pools[0].resident == placed
        # One with a state of its own has heard of them.
        assert name == "lru" or engine.eviction.victim((), 0) in placed
        engine.check_integrity()
        # What one does with its tables is no other's.
        fill(engine, [])
        assert not engine.pools[0].resident


@pytest.mark.parametrize("name", ["static", "pinned_lru"])
@pytest.mark.parametrize("profile", [None, PROFILE])
def test_after_a_reset_what_fills_the_cache_again_is_kept(
    name: str, profile: UseProfile | None
) -> None:
    """Of requests that need the same, the second is served as the first one is."""
    chosen = [([0, 1], [2, 3], [6, 7]), ([2, 3], [4, 5], [0, 1]), ([0, 1], [6, 7], [4, 5])] * 2
    rows = [
        (request, 6 * request + place, int(place > 0), place, layer)
        for request in range(2)
        for place in range(6)
        for layer in range(3)
    ]
    experts = [layer for each in chosen * 2 for layer in each]
    trace = traces.from_rows(traces.GEOMETRY, rows, experts)
    engine = replay(trace, warmed("30%", profile, eviction=name), cache_reset="request")
    misses = [p.misses for p in engine.ledger.passes]
    assert misses[:6] == misses[6:]


def test_the_host_computes_what_the_profile_left_out(trace: Trace) -> None:
    """KTransformers places experts by profile: without one its cache stays empty."""
    setting = traces.setting_for(trace, "50%", policy="ktransformers", warm=use_of(trace))
    unplaced = dataclasses.replace(setting, warm=None)
    cold, warm = (replay(trace, each, cache_reset="never") for each in (unplaced, setting))
    placed = dict(VirtualEngine(traces.GEOMETRY, setting).pools[0].resident)
    assert warm.pools[0].resident == placed and not cold.pools[0].resident
    assert warm.now < cold.now


def test_a_profile_is_the_same_from_its_trace_and_from_its_file(
    tmp_path: Path, path: Path, moecache: Moecache
) -> None:
    out = tmp_path / "use.json"
    moecache("profile", "use", path, "--out", out)
    assert load_use(str(out)) == load_use(str(path))
    rows = load_trace(str(path)).columns
    for layer, counts in enumerate(load_use(str(out)).counts):
        slow = [int((rows.experts[rows.layer == layer] == expert).sum()) for expert in range(8)]
        assert list(counts) == slow


def test_a_models_name_is_the_profile_that_ships_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = load_use("tiny")
    assert profile.model == "tiny" and len(profile.counts) == 8 and len(profile.counts[0]) == 64
    for wrong_name in ("tinny", "elsewhere/tiny"):
        with pytest.raises(ValueError, match=f"^warm='{wrong_name}'"):
            load_use(wrong_name)
    # A file of that name takes precedence, and its suffix is not a trace's.
    shutil.copy(traces.record(tmp_path), "tiny")
    with pytest.raises(ValueError, match=r"^warm='tiny'"):
        load_use("tiny")


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    other_profile = UseProfile(model="Other-7B", counts=COUNTS, name="use.json")
    with pytest.raises(ValueError, match="is of the model 'Other-7B', and this is 'generated'"):
        VirtualEngine(traces.GEOMETRY, warmed("50%", other_profile))
    own_profile = dataclasses.replace(other_profile, model="Generated")
    VirtualEngine(traces.GEOMETRY, warmed("50%", own_profile))
    small = UseProfile(model="generated", counts=((1, 2),), name="use.json")
    with pytest.raises(ValueError, match=r"counts 1 layers of 2 experts, .* has 3 of 8"):
        VirtualEngine(traces.GEOMETRY, warmed("50%", small))


def test_a_cell_is_named_by_what_warms_it(tmp_path: Path, path: Path) -> None:
    copy = tmp_path / "copy.parquet"
    copy.write_bytes(path.read_bytes())
    assert "warm" not in resolve(read_config({}))
    names = [resolve(read_config({"warm": str(file)}))["warm"] for file in (path, copy)]
    assert names[0] == names[1]
