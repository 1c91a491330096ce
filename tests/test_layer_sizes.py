"""Cache sizes that differ by layer: the text, the file, the solver against exhaustive search."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.profiling.layer_sizes import best_sizes, equal_sizes, miss_curves
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.sizes import (
    LAYER_SIZES,
    capacity_text,
    is_per_layer,
    parse_capacity,
    spell,
)
from lm_eval_moecache.trace.trace import Columns, build_trace
from tests.conftest import Moecache
from tests.engine import traces

SIZES = {"expert_bytes": ((10,), (10,), (20,)), "dense_bytes": (0, 0, 0)}
GEOMETRY = Geometry(model="m", num_layers=3, num_experts=8, top_k=2, **SIZES)


def test_sizes_by_layer_are_bytes_by_layer_and_may_lie_in_a_file(tmp_path: Path) -> None:
    capacity = parse_capacity("[5,1,8]/layer", GEOMETRY)
    assert capacity.bytes_by_partition == (50, 10, 160)
    assert capacity.text == "[5,1,8]/layer"
    assert is_per_layer("[5, 1, 8]/layer")
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps({LAYER_SIZES: [5, 1, 8], "model": "m"}))
    assert capacity_text(str(file)) == "[5,1,8]/layer"
    assert parse_capacity(str(file), GEOMETRY) == capacity


@given(
    st.lists(st.lists(st.integers(0, 20), min_size=5, max_size=5), min_size=1, max_size=4),
    st.integers(1, 16),
)
@settings(max_examples=60)
def test_the_solver_finds_the_best_of_all_divisions(rows: list[list[int]], slots: int) -> None:
    assert equal_sizes(3, 8) == [3, 3, 2], "every slot is used"
    curves = -np.sort(-np.array(rows), axis=1)
    if slots < len(curves):
        with pytest.raises(ValueError, match="at least one"):
            best_sizes(curves, slots)
        return
    divisions = itertools.product(range(1, 5), repeat=len(curves))
    possible = [sizes for sizes in divisions if sum(sizes) <= slots]
    sizes = best_sizes(curves, slots)
    assert sum(sizes) <= slots and min(sizes) >= 1
    costs = [
        sum(curves[layer, n] for layer, n in enumerate(division)) for division in [sizes, *possible]
    ]
    assert costs[0] == min(costs[1:])


@pytest.mark.parametrize("sizes", [(8, 8, 8), (2, 6, 5), (3, 2, 4), (7, 8, 2)])
def test_the_curves_are_what_a_replay_with_lru_misses(sizes: tuple[int, ...]) -> None:
    """Exact where every event fits its layer's cache: here a pass is one token of two experts."""
    rng, num_passes = np.random.default_rng(5), 60
    layer = np.tile(np.arange(3, dtype=np.int32), num_passes)
    passes = np.repeat(np.arange(num_passes, dtype=np.int32), 3)
    experts = np.array([rng.permutation(8)[:2] for _ in layer], dtype=np.int32)
    constants = {"request": np.zeros_like(layer), "phase": np.ones_like(layer)}
    columns = Columns(**constants, pass_index=passes, token=passes, layer=layer, experts=experts)
    trace = build_trace("drawn", traces.GEOMETRY, columns)
    engine = replay(trace, traces.setting("on_demand", spell(list(sizes))))
    misses = sum(record.misses for record in engine.ledger.passes)
    curves = miss_curves(trace)
    assert sum(int(curves[index, size]) for index, size in enumerate(sizes)) == misses


def test_profile_layer_sizes_writes_what_capacity_takes(
    tmp_path: Path, trace: Path, moecache: Moecache
) -> None:
    out = tmp_path / "sizes.json"
    report = moecache.json("profile", "layer_sizes", trace, "--capacity", "12experts", "--out", out)
    assert parse_capacity(str(out), traces.GEOMETRY).text == spell(report[LAYER_SIZES])
    assert report["miss_rate"] <= report["miss_rate_of_equal_sizes"]
