"""Sweep files, the cells they describe, and changes that make a finished run unfinished."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_eval_moecache.algorithms.registry import (
    AXES,
    algorithm_names,
    find_algorithm,
    source_digest,
)
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.sweep import identity
from lm_eval_moecache.sweep.files import finished, unedited, write_record
from lm_eval_moecache.sweep.identity import (
    ResolvedCell,
    content_digest,
    plan,
    resolve,
    slug,
)
from lm_eval_moecache.sweep.run import check_cell, check_cells, check_report
from lm_eval_moecache.sweep.spec import Cell, SweepFile, read_sweep
from lm_eval_moecache.sweep.worker import head
from tests.report.runs import record


def sweep(folder: Path, **fields: Any) -> SweepFile:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"tasks": "toy", **fields}, sort_keys=False))
    return read_sweep(path)


def hash_of(cell: Cell) -> str:
    arguments = {k: v for k, v in cell.arguments.items() if k != "device"}
    return plan(cell, read_config(arguments), {}).configuration_hash


def test_cells_are_every_combination_of_runs_and_grids_in_the_order_written(tmp_path: Path) -> None:
    """The last key varies fastest; tasks and limits can be axes; a label is no argument."""
    runs = [{"label": "plain"}, {"label": "dropping", "miss": "drop", "limit": 3}]
    grid = [
        {"policy": ["a", "b"], "capacity": ["5%", "10%"]},
        {"policy": "c", "tasks": ["toy", ["toy", "other"]]},
    ]
    cells = sweep(tmp_path, base={"seed": 1}, runs=runs, grid=grid, limit=9).cells()
    pairs = [{"policy": p, "capacity": c} for p in ("a", "b") for c in ("5%", "10%")]
    of_grid = [(pair, ("toy",)) for pair in pairs]
    of_grid += [({"policy": "c"}, tasks) for tasks in (("toy",), ("toy", "other"))]
    assert [(c.label, c.options["limit"], c.model_args, c.tasks) for c in cells] == [
        (label, limit, {"seed": 1, **more, **arguments}, tasks)
        for label, limit, more in (("plain", 9, {}), ("dropping", 3, {"miss": "drop"}))
        for arguments, tasks in of_grid
    ]


def cell(**model_args: Any) -> Cell:
    return Cell(model="moecache", model_args=model_args, tasks=("toy",))


def test_a_run_has_a_readable_name_that_is_safe_in_a_file_system() -> None:
    assert slug(cell(policy="specmd", capacity="5%")) == "specmd_5pct_toy"
    assert "/" not in slug(cell(policy="../mine.yaml", capacity="3/layer"))


def test_a_run_is_the_same_with_a_written_default_and_another_with_a_change(tmp_path: Path) -> None:
    arguments = {"policy": "specmd", "capacity": "5%"}
    plain = hash_of(cell(**arguments))
    defaults: list[dict[str, Any]] = [{"clock": "virtual", "seed": 0}]
    defaults += [{"hardware": name} for name in ("a100-5GBps", "a100-5gbps")]
    assert {hash_of(cell(**arguments, **change)) for change in defaults} == {plain}
    changes: list[dict[str, Any]] = [{"capacity": "6%"}, {"seed": 1}, {"eviction": "lru"}]
    changes += [{"emulate": name} for name in ("OLMoE-1B-7B", "Mixtral-8x7B")]
    changes += [{"link": "fifo"}]
    hashes = {plain, *(hash_of(cell(**arguments | change)) for change in changes)}
    for count in (5, 6):
        options = {"gen_kwargs": {"max_gen_toks": count}}
        hashes.add(hash_of(dataclasses.replace(cell(**arguments), options=options)))
    assert len(hashes) == 9
    path, hashes = tmp_path / "mine.yaml", set()
    for eviction in ("lru", "random"):
        path.write_text(f"routing: standard\nprefetch: none\neviction: {eviction}\nmiss: fetch\n")
        hashes.add(hash_of(cell(policy=str(path), capacity="5%")))
    assert len(hashes) == 2, "editing a policy file makes another run"


def test_a_cells_sizes_are_those_it_emulates_wherever_they_are_from() -> None:
    assert not {"emulate", "link"} & resolve(read_config({})).keys()
    emulated = resolve(read_config({"emulate": "OLMoE-1B-7B"}))["emulate"]
    assert emulated["expert_weights"] == 3 * 2048 * 1024 and "source" not in emulated


def test_settings_metrics_and_tasks_of_a_view_are_known(tmp_path: Path) -> None:
    view = {"rows": ["policy", "streams", "eviction.protect"], "columns": "capacity"}
    view |= {"values": ["tok_per_s", "ttft_ms.*", "decode_miss_rate@tiny_arc", "tiny_arc:acc_norm"]}
    grid = {"policy": ["on_demand"], "eviction.protect": [1]}
    spec = sweep(tmp_path, tasks="tiny_arc", grid=grid, views=[view])
    check_report(spec, spec.cells())


CODE = '''"""A module."""
from lm_eval_moecache.algorithms.eviction.rankings import LRU


class Mine(LRU):
    """An eviction."""

    seen = 1  # a comment
'''


def planned(eviction: str) -> ResolvedCell:
    arguments = {"policy": "on_demand", "eviction": eviction}
    return check_cell(Cell(model="moecache", model_args=arguments, tasks=("tiny_arc",)))


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)
    importlib.invalidate_caches()


def test_an_edited_class_of_a_user_makes_its_run_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "edited_eviction.py"
    rewrite(module, CODE)
    before = planned("edited_eviction.Mine")
    write_record(tmp_path, {**record("a"), **head(before, "e")})

    def is_finished() -> bool:
        current = planned("edited_eviction.Mine")
        assert current.run_id == before.run_id  # the new run replaces the old
        return current.configuration_hash in unedited(finished(tmp_path), [current])

    assert is_finished()
    rewrite(module, CODE.replace("a comment", "other words").replace("An evic", "My evic"))
    assert is_finished()
    rewrite(module, CODE.replace("seen = 1", "seen = 2"))
    assert not is_finished()


def test_another_shipped_model_makes_its_runs_unfinished_and_a_record_without_sources_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = planned("lru")
    header = head(before, "e")
    write_record(tmp_path, {**record("a"), **header})
    assert unedited(finished(tmp_path), [before])
    monkeypatch.setattr(identity, "_shipped_weights", lambda: "others")
    assert unedited(finished(tmp_path), [planned("lru")]) == {}
    write_record(tmp_path, {**record("a"), **{k: v for k, v in header.items() if k != "sources"}})
    assert unedited(finished(tmp_path), [planned("lru")])


FILES = {
    "model.safetensors": "model",
    "buddies.safetensors": "",
    "draft.safetensors": "models--org--moe/snapshots/abc",  # in the cache of the hub
    "t.yaml": "tasks",
}


@pytest.mark.parametrize("changed", FILES)
def test_a_run_whose_weights_artefact_draft_or_task_changed_is_unfinished(
    tmp_path: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, folder in FILES.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_bytes(b"1")
    (tmp_path / FILES["draft.safetensors"] / "config.json").write_text("{}")
    (tmp_path / "models--org--moe/refs").mkdir()
    (tmp_path / "models--org--moe/refs/main").write_text("abc")
    config = read_config(
        {"policy": "buddymoe", "miss.profile": str(tmp_path / "buddies.safetensors")}
    ).with_changes(draft="org/moe")
    arguments = {"pretrained": str(tmp_path / "model")}
    cell = Cell(model="moecache", model_args=arguments, include_path=(str(tmp_path / "tasks"),))
    write_record(tmp_path, {**record("a"), **head(plan(cell, config, {}), "e")})
    for content, is_finished in ((b"1", True), (b"2", False), (b"1", True)):
        (tmp_path / FILES[changed] / changed).write_bytes(content)
        assert bool(unedited(finished(tmp_path), [plan(cell, config, {})])) is is_finished


def test_of_a_large_file_its_size_and_blocks_over_all_of_it_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_BLOCK", 4)
    monkeypatch.setattr(identity, "_SAMPLED_BYTES", 64)
    monkeypatch.setattr(identity, "_SAMPLES", 8)
    path = tmp_path / "weights.bin"

    def digest(content: bytes) -> str | None:
        path.write_bytes(content)
        identity._digest_of_file.cache_clear()
        return content_digest(str(path))

    small = bytes(64)
    assert len({digest(small[:i] + b"x" + small[i + 1 :]) for i in range(64)}) == 64
    large = bytes(128)  # eight blocks, 16 bytes apart
    seen = {i for i in range(128) if digest(large[:i] + b"x" + large[i + 1 :]) != digest(large)}
    assert seen == {start + i for start in range(0, 128, 16) for i in range(4)}
    assert digest(large) != digest(large + b"\0")


def test_run_ids_have_twelve_digits_and_equal_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolved = [planned(eviction) for eviction in ("lru", "lfu")]
    assert all(len(cell.run_id.rpartition("-")[2]) == 12 for cell in resolved)
    same = iter(dataclasses.replace(cell, run_id="x-0123456789ab") for cell in resolved)
    monkeypatch.setattr("lm_eval_moecache.sweep.run.check_cell", lambda *_: next(same))
    with pytest.raises(ValueError, match="two configurations have the run id x-0123456789ab"):
        check_cells([cell.cell for cell in resolved])


def test_every_algorithm_has_a_digest_of_its_own() -> None:
    digests = {source_digest(find_algorithm(a, n)) for a in AXES for n in algorithm_names(a)}
    assert len(digests) == sum(len(algorithm_names(axis)) for axis in AXES)
