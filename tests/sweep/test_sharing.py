"""Sweeps that run the model once: records equal live ones, and unshareable cells run alone."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.algorithms.policy import load_policy, policy_names
from lm_eval_moecache.cli.main import main
from lm_eval_moecache.emulate.models import emulated_names
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.preflight import check_arguments
from lm_eval_moecache.model.checkpoint import skeleton
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.sweep.identity import ResolvedCell, plan
from lm_eval_moecache.sweep.sharing import SharedRun, detail_of, share_name
from lm_eval_moecache.sweep.spec import Cell
from lm_eval_moecache.trace.use import UseProfile, write_use
from tests.conftest import Moecache
from tests.sweep.toy import both_ways, figures, loose, made_by, records, swept, write_sweep


def lossless_policies(with_predictor: bool) -> list[str]:
    policies = [load_policy(name) for name in policy_names()]
    return [
        policy.name
        for policy in policies
        if policy.is_lossless
        and not policy.prefetch.algorithm.needs_draft
        # Placed policies need `warm=`, and warmed cells have their own test.
        and not policy.placed
        and bool(policy.prefetch.algorithm.artifact_kind) is with_predictor
    ]


TOY, PAIR = {"tasks": ["speedy"], "limit": 3}, {"tasks": ["chosen", "generated"]}
LOSSLESS = [
    {"policy": lossless_policies(with_predictor=False), "capacity": ["25%"]},
    {
        "policy": ["specmd", "on_demand"],
        "capacity": ["4/layer", "9experts"],
        "bandwidth": ["1GB/s"],
    },
    {"policy": ["specmd"], "cache_reset": ["request"], "seed": [3]},
    {"policy": ["on_demand"], "hardware": ["h200"]},
    {"policy": ["on_demand"], "eviction": ["random", "score", "lfu"]},
]
LINKS = {"link": ["priority", "fifo"], "emulate": [None, emulated_names()[0]]}
ORDERS = {"execute": ["together", "as_they_arrive"], "reads_per_expert": [1, 3]}
BATCHED = {"policy": ["on_demand", "specmd", "moe_infinity"], "cache_reset": ["never", "request"]}
SCANNED = {"policy": ["on_demand"], "eviction": ["lru", "lfu", "score"]}
SCANNED |= {"capacity": ["3/layer", "5/layer"], "cache_reset": ["never", "request"]}
# For the shipped model, as its predictors ship with it.
PREDICTORS = {"policy": [*lossless_policies(with_predictor=True), "specmd", "on_demand"]}
SHIPPED = {"tasks": ["tiny_mmlu", "tiny_gsm8k"], "include_path": [], "limit": 1}
DRAFTED = {"model": "moecache-spec", **PAIR, "limit": 2}
SELF = {"capacity": "40%", "draft": "self:int8"}
DRAFTS = [
    {"policy": ["sp_moe"], "prefetch.cutoff": [0, 2, "auto"], "bandwidth": ["1GB/s", "9MB/s"]},
    {"policy": ["sp_moe"], "prefetch.critical": [1, 5], "link": ["priority", "fifo"]},
    {"policy": ["sp_moe_vanilla", "mixtral_offloading", "moe_infinity", "on_demand"]},
    {"policy": ["sp_moe"], "capacity": ["4/layer"], "cache_reset": ["request"], "seed": [2]},
    {"policy": ["on_demand"], "eviction": ["score", "random"], "hardware": ["h200"]},
]
OTHERS: dict[str, Any] = {"draft": ["self:int8", "self:int4", "prompt_lookup"]}
OTHERS |= {"policy": ["on_demand"], "draft_tokens": [1, 2], "eviction": ["lru", "lfu"]}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("given", "grid", "fields", "runs", "distinct"),
    [
        pytest.param({}, LOSSLESS, TOY, 1, 5, id="compositions"),
        pytest.param({"policy": "specmd"}, LINKS, {"limit": 1}, 1, 2, id="links and models"),
        pytest.param({"hardware": "oneplus-15r"}, ORDERS, PAIR, 1, 4, id="orders"),
        pytest.param({"streams": 3}, BATCHED, PAIR, 1, 3, id="streams"),
        pytest.param({"streams": 2, "logits_cache": False}, BATCHED, PAIR, 1, 3, id="no cache"),
        pytest.param({"batch_size": 3}, BATCHED, PAIR, 1, 3, id="batches"),
        pytest.param({"scoring": "scan"}, SCANNED, PAIR, 1, 3, id="scan", marks=slow),
        pytest.param({"pretrained": "tiny"}, PREDICTORS, SHIPPED, 1, 3, id="own", marks=slow),
        pytest.param({**SELF, "draft_tokens": 2}, DRAFTS, DRAFTED, 1, 3, id="drafted", marks=slow),
        # Each draft and each draft length needs its own run.
        pytest.param(SELF, OTHERS, {**DRAFTED, "limit": 1}, 6, 6, id="drafts"),
    ],
)
def test_cells_that_share_a_run_are_those_of_live_runs_to_the_byte(
    tmp_path: Path,
    base: dict[str, Any],
    given: dict[str, Any],
    grid: Any,
    fields: dict[str, Any],
    runs: int,
    distinct: int,
) -> None:
    shared, _ = both_ways(tmp_path, base={**base, **given}, grid=grid, **fields)
    assert made_by(shared) == ["replay_of"] * (len(shared) - runs) + ["run"] * runs
    totals = {str(record["config"]["moecache"]["totals"]) for record in shared.values()}
    assert len(totals) >= distinct


def test_bounds_of_drafted_cells_are_replayed(tmp_path: Path, base: dict[str, Any]) -> None:
    plain, grid = {**base, **SELF, "policy": "on_demand"}, {"eviction": ["lru", "lfu"]}
    fields = {**DRAFTED, "tasks": ["generated"], "bounds": ["belady", "oracle"]}
    runs = records(swept(tmp_path / "x", base=plain, grid=grid, **fields).parent)
    totals = {r["label"] or r["run_id"]: r["config"]["moecache"]["totals"] for r in runs.values()}
    fewest = totals.pop("knows the future: belady")["miss_rate"]
    assert len(totals) == 3 and all(metrics["draft_acceptance"] > 0 for metrics in totals.values())
    del totals["knows the future: oracle"]
    assert all(fewest <= metrics["miss_rate"] for metrics in totals.values())


def test_warmed_cells_share_the_run_of_the_cold_one(tmp_path: Path, base: dict[str, Any]) -> None:
    model = skeleton(base["pretrained"], {})
    sizes = describe(model, find_moe_layers(model), "olmoe")
    counts = tuple(tuple(range(sizes.num_experts)) for _ in range(sizes.num_layers))
    profile = tmp_path / "use.json"
    write_use(profile, UseProfile(model="", counts=counts))
    grid = {"warm": [None, str(profile)], "cache_reset": ["never", "request"]}
    shared, _ = both_ways(tmp_path, base={**base, "policy": "on_demand"}, grid=grid, limit=2)
    assert made_by(shared) == ["replay_of"] * 3 + ["run"]
    reports = [record["config"]["moecache"] for record in shared.values()]
    assert sorted("warm" in report for report in reports) == [False, False, True, True]
    moved = {("warm" in r, r["cache_reset"]): r["totals"]["bytes_moved"] for r in reports}
    assert moved[True, "never"] < moved[False, "never"]
    assert moved[True, "request"] < moved[False, "request"]
    with pytest.raises(ValueError, match=r"layers of .* experts, and the model 'tiny' has"):
        check_arguments("tiny", {"policy": "on_demand", "warm": str(profile)})


def cell(**arguments: Any) -> ResolvedCell:
    """Return a planned cell of the shipped model on demand."""
    settings = {"policy": "on_demand", "capacity": "30/layer", **arguments}
    made = Cell(model="moecache", model_args=settings, tasks=("tiny_mmlu",))
    return plan(made, read_config(settings), {})


EMULATED = {"emulate": emulated_names()[0]}


@pytest.mark.parametrize(
    "changed",
    [
        *({"policy": "specmd"}, {"eviction": "lfu"}, {"capacity": "40/layer"}, {"seed": 3}),
        *({"hardware": "h200"}, {"runtime": "llama.cpp"}, {"link": "fifo"}, {"warm": "tiny"}),
        *({"execute": "as_they_arrive"}, {"reads_per_expert": 3}, {"cache_reset": "request"}),
        *(EMULATED, {**EMULATED, "attention": "context"}),
    ],
    ids=str,
)
def test_what_changes_no_output_is_shared(changed: dict[str, Any]) -> None:
    assert share_name(cell(**changed)) == share_name(cell()) is not None


@pytest.mark.parametrize("changed", [{"scoring": "scan"}, {"precision": "int8"}], ids=str)
def test_what_the_model_computes_otherwise_is_not_shared(changed: dict[str, Any]) -> None:
    """A scan serves a text layer by layer: its trace is no trace of parallel scoring."""
    other = share_name(cell(**changed))
    assert other is not None and other != share_name(cell())


@pytest.mark.parametrize("changed", [{"miss": "drop"}, {"routing": "pruning"}, {"clock": "wall"}])
def test_what_changes_outputs_or_is_measured_runs_alone(changed: dict[str, Any]) -> None:
    assert share_name(cell(**changed)) is None


@pytest.mark.parametrize(
    ("arguments", "lacking"),
    [
        ({"eviction": "importance"}, {"logits": False}),
        ({"eviction": "score"}, {"weights": False, "logits": False}),
        ({"policy": "specmd"}, {"shadows": ()}),
        ({"policy": "sp_moe", "draft": "self:int8", "prefetch.critical": 5}, {"criticals": (1,)}),
    ],
)
def test_a_trace_that_lacks_what_a_cell_needs_does_not_serve_it(
    arguments: dict[str, Any], lacking: dict[str, Any], tmp_path: Path
) -> None:
    wanted, shared = detail_of([cell(**arguments)]), SharedRun(tmp_path, "x")
    for detail, expected in ((wanted, True), (dataclasses.replace(wanted, **lacking), False)):
        shared.partial.mkdir(parents=True)
        (shared.partial / "run.parquet").touch()
        shared.keep("run", detail, {"config": {"moecache": {"device": "cpu"}}})
        assert shared.serves(wanted) is expected
    shared.trace.unlink()
    assert not shared.serves(detail_of([]))


def test_a_trace_serves_later_cells_until_it_lacks_something_or_the_model_has_changed(
    tmp_path: Path, base: dict[str, Any], moecache: Moecache
) -> None:
    grid: dict[str, Any] = {"policy": ["on_demand"], "capacity": ["25%", "50%"]}
    path = swept(tmp_path / "x", base=base, grid=grid)
    before = set(records(path.parent))

    def by_model_and_replay(**changes: Any) -> tuple[int, int]:
        grid.update(changes)
        write_sweep(tmp_path / "x", base=base, grid=grid)
        report = moecache.json("sweep", path)
        return report["by_model"], report["by_replay"]

    assert by_model_and_replay(capacity=["25%", "50%", "75%"]) == (0, 1)
    # A prefetcher whose proposals were not recorded needs its own run.
    assert by_model_and_replay(policy=["on_demand", "specmd"]) == (1, 2)
    assert before < set(records(path.parent))
    weights = next(Path(base["pretrained"]).glob("*.safetensors"))
    kept = weights.read_bytes()
    try:
        # Half of the weights zeroed: every cell runs again, on a trace of its own.
        weights.write_bytes(kept[: len(kept) // 2] + bytes(len(kept) - len(kept) // 2))
        assert by_model_and_replay() == (1, 5)
        weights.write_bytes(kept)
        os.utime(weights, (0, 0))
        assert by_model_and_replay() == (0, 6)
    finally:
        weights.write_bytes(kept)


def test_a_dry_run_counts_runs_and_replays_and_writes_nothing(
    tmp_path: Path, base: dict[str, Any], moecache: Moecache
) -> None:
    grid = {"capacity": ["25%", "50%", "75%"], "miss": ["fetch", "drop"]}
    path = write_sweep(tmp_path / "x", base=base, grid=grid)
    estimate = moecache.json("sweep", path, "--dry-run")
    assert (estimate["model_runs"], estimate["replays"]) == (4, 2)
    assert moecache.json("sweep", path, "--dry-run", "--live")["model_runs"] == 6
    assert [each.name for each in path.parent.iterdir()] == ["sweep.yaml"]
    assert main(["sweep", str(path)]) == 0
    write_sweep(tmp_path / "x", base=base, grid={**grid, "capacity": ["25%", "60%", "70%"]})
    names = {each.name for each in path.parent.iterdir()}
    printed = moecache("sweep", path, "--dry-run")
    assert "2 runs of the model" in printed and "2 replays" in printed and "about" in printed
    assert {each.name for each in path.parent.iterdir()} == names


def test_bounds_are_listed_with_the_cells_of_a_sweep(tmp_path: Path, base: dict[str, Any]) -> None:
    grid = {"eviction": ["lru", "fifo"], "capacity": ["50%", "75%"], "miss": ["fetch", "drop"]}
    fields = {**base, "policy": "on_demand", "cache_reset": "never"}
    path = swept(tmp_path / "x", base=fields, grid=grid, bounds=["belady", "oracle"])
    runs = list(records(path.parent).values())
    bounds = {
        (r["label"], r["config"]["moecache"]["capacity"]): r["config"]["moecache"]["totals"]
        for r in runs
        if r["label"]
    }
    assert len(runs) == 12 and len(bounds) == 4
    for record in runs:
        report = record["config"]["moecache"]
        if record["label"] or report["policy"]["miss"]["name"] == "drop":
            continue
        belady = bounds["knows the future: belady", report["capacity"]]
        assert belady["miss_rate"] < report["totals"]["miss_rate"]
        oracle = bounds["knows the future: oracle", report["capacity"]]
        assert oracle["prefetch_precision"] == 1.0
    # Without traces, missing bounds still need a run, that of a finished cell.
    for trace in (path.parent / "traces").iterdir():
        trace.unlink()
    for run in loose(path.parent):
        if "belady" in run.name:
            run.unlink()
    assert main(["sweep", str(path)]) == 0
    assert len(records(path.parent)) == 12


@pytest.mark.parametrize("lost", ["common", "record", "half"])
def test_a_kill_at_any_step_leaves_a_trace_that_is_whole_or_made_again(
    tmp_path: Path, base: dict[str, Any], lost: str, moecache: Moecache
) -> None:
    """A kill may hit after the trace, after the results next to it, or while recording."""
    grid = {"capacity": ["25%", "50%", "75%"]}
    path = swept(tmp_path / "x", base=base, grid=grid)
    expected = figures(path.parent)
    traces = path.parent / "traces"
    [recording] = [
        r["run_id"] for r in records(path.parent).values() if "run" in r["environment"]["made_by"]
    ]
    for record in loose(path.parent):
        if lost != "common" or record.stem != recording:
            record.unlink()
    if lost != "record":
        next(traces.glob("*.common")).unlink()
    if lost == "half":
        next(traces.glob("*.parquet")).unlink()
        (traces / ".0123.part").mkdir()
        (traces / ".0123.part" / "run-000.partial").write_bytes(b"half a trace")
    report = moecache.json("sweep", path)
    assert report["by_model"] == (0 if lost == "record" else 1)
    assert json.dumps(figures(path.parent), sort_keys=True) == json.dumps(expected, sort_keys=True)
    assert not list(traces.glob(".*"))


def test_a_received_folder_is_never_left(
    tmp_path: Path, base: dict[str, Any], moecache: Moecache
) -> None:
    """An id that is a path, or another run's, writes and deletes nothing elsewhere."""
    path = swept(tmp_path / "x", base=base, grid={"policy": ["on_demand"], "capacity": ["25%"]})
    assert not (path.parent / "traces").exists(), "a cell alone shares no trace"
    outside = tmp_path / "outside"
    outside.mkdir()
    owned = [outside / "owned.json", outside / "owned.txt"]
    for file in owned:
        file.write_text("mine")
    for run_id in ("../../outside/owned", "..", "another"):
        [file] = loose(path.parent)
        record = json.loads(file.read_text())
        file.write_text(json.dumps({**record, "run_id": run_id, "label": "other"}))
        assert len(moecache.json("sweep", path)["done"]) == 1, "no finished run"
        assert sorted(tmp_path.rglob("owned*")) == owned
        assert {file.read_text() for file in owned} == {"mine"}


def test_a_run_of_a_former_id_is_replaced_by_the_one_made_again(
    tmp_path: Path, base: dict[str, Any], moecache: Moecache
) -> None:
    path = swept(tmp_path / "x", base=base, grid={"policy": ["on_demand"], "capacity": ["25%"]})
    [file] = loose(path.parent)
    record, run_id = json.loads(file.read_text()), file.stem
    former = run_id[:-4]
    file.unlink()
    (path.parent / "runs" / f"{former}.json").write_text(json.dumps({**record, "run_id": former}))
    assert moecache.json("sweep", path)["skipped"] == [run_id]
    assert [r["run_id"] for r in records(path.parent).values()] == [former]
    moecache("sweep", path, "--rerun")
    assert [r["run_id"] for r in records(path.parent).values()] == [run_id]
