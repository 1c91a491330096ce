"""The pages that scripts of benchmarks/ write into results/ follow from their cells."""

from __future__ import annotations

import json
from functools import partial
from statistics import mean

import collisions_by_layer
import evictions
import layer_sizes
import leads
import lossy_accuracy
import lost_points
import policy_space
import pytest
import real_routing
import sensitivity
from grid import RESULTS, TRACES, load, shipped_trace

from lm_eval_moecache import replay
from lm_eval_moecache.report.runs.files import load_runs

ROWS = json.loads((RESULTS / "layer_sizes/layer_sizes.json").read_text())
ROUTING = load(RESULTS / "real_routing/cells.json.gz")
EVICTIONS = load(RESULTS / "evictions/cells.json.gz")
EVICTION_COSTS = load(RESULTS / "evictions/costs.json.gz")
LOSSY = load(RESULTS / "lossy_answers/accuracy/cells.json.gz")
SPACE = load(RESULTS / "policy_space/cells.json.gz")
ANSWERS = load(RESULTS / "miss_answers/cells.json.gz")
LOST_POINTS = json.loads((RESULTS / "lost_points/pairs.json").read_text())
CHANGED = json.loads((RESULTS / "sensitivity/models.json").read_text())
TABLES = {
    "layer_sizes/table.md": (layer_sizes.render, ROWS),
    "real_routing/table.md": (real_routing.render, ROUTING),
    "evictions/table.md": (partial(evictions.render, costs=EVICTION_COSTS), EVICTIONS),
    "lossy_answers/accuracy/table.md": (lossy_accuracy.render, LOSSY),
    "policy_space/table.md": (policy_space.render_space, SPACE),
    "sensitivity/table.md": (sensitivity.render, CHANGED),
    "lost_points/table.md": (
        lambda kept: lost_points.render(kept["answers"], kept["texts"]),
        LOST_POINTS,
    ),
    "miss_answers/table.md": (policy_space.render_answers, ANSWERS),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_table_comes_from_its_cells_to_the_byte(name: str) -> None:
    render, cells = TABLES[name]
    assert (RESULTS / name).read_text() == render(cells)


def test_every_lossy_run_on_the_shipped_model_is_paired() -> None:
    runs = load_runs(RESULTS)
    assert json.loads(json.dumps(list(lost_points.pairs(runs)))) == LOST_POINTS["answers"]
    assert list(lost_points.of_texts(runs)) == LOST_POINTS["texts"]


def test_collisions_by_layer_add_up_to_those_of_the_replay() -> None:
    trace = TRACES / "olmoe-1b-7b.parquet"
    shares = collisions_by_layer.shares(trace, "none", "lru")
    keys = {"hardware": "specmd-a100", "emulate": "OLMoE-1B-7B", "capacity": "17.5%"}
    report = replay(trace, policy="specmd", prefetch="none", eviction="lru", **keys)
    # Every layer of this trace has as many requests.
    assert mean(shares) == pytest.approx(report.metrics["collision_miss_rate"], abs=1e-6)
    assert max(shares) > 0


def test_the_rows_of_a_real_trace_are_what_the_script_finds() -> None:
    trace = shipped_trace("olmoe-1b-7b")
    committed = [row for row in ROWS if row["trace"] == "olmoe-1b-7b"]
    assert list(layer_sizes.rows_of("olmoe-1b-7b", trace)) == committed


@pytest.mark.parametrize("name", leads.FOUND)
def test_leads_and_slopes_follow_from_their_runs(name: str) -> None:
    file = RESULTS / f"{name}.json"
    rows = json.loads(file.read_text())["rows"]
    assert rows == leads.rows_of(load_runs(file.parent), leads.FOUND[name])
