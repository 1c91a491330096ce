"""`moecache choose`: its figures are those of a replay, and its advice follows from them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.harness.arguments import Config, read_config
from lm_eval_moecache.records.hardware import load_hardware
from lm_eval_moecache.records.ledger import PassRecord
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.use import use_of
from moecache_plan.choose import notes_of
from moecache_plan.machines import as_machine
from moecache_plan.nearest import nearest_trace
from moecache_plan.ranking import BLOCKS, CONTENDERS, LRU, configs_of, find
from tests.conftest import Moecache

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "traces/olmoe-1b-7b.parquet"
PAGE = (ROOT / "docs/choose.md").read_text().replace("\\\n  ", "")
SHOWN = re.findall(r"```\nmoecache (choose [^\n]*)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


def config(policy: str, **more: object) -> Config:
    args = {"capacity": "25%", "hardware": "rtx-4090-24gb", **CONTENDERS[policy].args, **more}
    return read_config(args, replayed=True).with_changes(seed=None)


@pytest.mark.parametrize("policy", [LRU, "hazard", "host"])
def test_a_row_has_the_figures_of_its_replay(policy: str, moecache: Moecache) -> None:
    found = find(str(TRACE), None, {name: config(name) for name in {LRU, policy}})
    (row,) = (row for row in found["rows"] if row["policy"] == policy)
    options = ["--capacity", "25%", "--hardware", "rtx-4090-24gb", "--bound", "false"]
    options += [f"--{key}={value}" for key, value in row["model_args"].items()]
    (run,) = moecache.json("replay", TRACE, *options)["runs"]
    metrics = run["metrics"]
    # The trace is all decode steps, so the task's figures are the decode steps' as well.
    assert row["tpot_ms"] == pytest.approx(metrics["tpot_ms"]["mean"])
    assert row["decode_tok_per_s"] == pytest.approx(metrics["tok_per_s"])
    assert row["decode_miss_rate"] == metrics["decode_miss_rate"]
    assert found["capacity_cycles"] == run["regime"]["capacity_cycles"]


def test_it_is_sorted_and_says_what_the_fastest_is_that_needs_less(
    tmp_path: Path, moecache: Moecache
) -> None:
    steps = _first_steps(tmp_path, 5 * BLOCKS, moecache)
    command = ("choose", steps, "--hardware", "rtx-4090-24gb")
    found = moecache.json(*command)
    rows = found["rows"]
    times = [row["tpot_ms"] for row in rows]
    assert times == sorted(times) and {row["policy"] for row in rows} == set(CONTENDERS)
    best = next(row for row in rows if "the future" not in row["needs"])
    assert found["fastest"] == best["policy"] and best["verdict"] == "fastest"
    lru_ms = next(row["tpot_ms"] for row in rows if row["policy"] == LRU)
    for row in rows:
        assert row["speedup_over_lru"] == pytest.approx(lru_ms / row["tpot_ms"])
        if row["slower_by"] is not None:
            low, high = row["slower_by"]
            # Blocks of equal length: the middle of the interval is the difference of the means.
            assert (low + high) / 2 == pytest.approx(row["tpot_ms"] / best["tpot_ms"] - 1)
            assert row["verdict"] == ("slower" if low > 0 else "tied")
    page = moecache(*command)
    assert "rtx-4090 is the server of two papers" in " ".join(page.split())
    intro = page.partition("\n\n")[0].replace("\n", " ")
    free = next(row for row in rows if not row["needs"])
    args = ",".join(f"{key}={value}" for key, value in free["model_args"].items())
    assert f"fastest is {best['policy']} (" in intro and f": {free['policy']} ({args})" in intro


def test_every_composition_is_lossless_and_one_is_lm_evals_default() -> None:
    policies = {name: config(name).policy for name in CONTENDERS}
    assert len(policies) == 11 and all(policy.is_lossless for policy in policies.values())
    assert read_config({}).policy == policies["specmd"]
    for name, policy in policies.items():
        is_predicting = policy.prefetch.name != "none"
        assert is_predicting == ("predictor" in CONTENDERS[name].needs), name
        assert (policy.miss.name == "host") == ("host" in CONTENDERS[name].needs), name
        assert policy.placed == ("profile" in CONTENDERS[name].needs), name


def test_placed_experts_are_those_that_the_other_half_uses_most() -> None:
    """By hand: a request misses unless its expert is among the most used of the other half."""
    found = find(str(TRACE), None, {LRU: config(LRU), "ktransformers": config("ktransformers")})
    trace = load_trace(str(TRACE))
    layers, experts, half = 16, 64, trace.num_passes // 2
    expected = 0
    for first, last in ((0, half), (half, trace.num_passes)):
        other = use_of(trace, half) if first == 0 else use_of(trace, 0, half)
        order = np.argsort(-np.array(other.counts).ravel(), kind="stable")
        resident = order[: layers * experts // 4]
        begin, end = trace.key_bounds[[first * layers, last * layers]]
        expected += int((~np.isin(trace.keys[begin:end], resident)).sum())
    (row,) = (row for row in found["rows"] if row["policy"] == "ktransformers")
    # Equally used experts at the edge of the cache may be placed either way.
    assert row["decode_miss_rate"] == pytest.approx(expected / len(trace.keys), abs=0.01)


def test_a_model_of_twice_the_layers_takes_twice_as_long_where_nothing_waits() -> None:
    """All but reading the output layer, which either model has once."""
    fast = replace(config(LRU).hardware, link_bytes_per_s=1e15)
    own = load_real_model("OLMoE-1B-7B")
    long = replace(own, num_layers=2 * own.num_layers)
    figures = []
    for model in (None, own, long):
        changed = {"emulate": model, "hardware": fast, "capacity": "100%"}
        single = config(LRU).with_changes(**changed)
        figures.append(find(str(TRACE), model, {LRU: single})["rows"][0]["tpot_ms"])
    # The trace's own sizes are those of the same configuration.
    assert figures[0] == pytest.approx(figures[1])
    once_ms = 1000 * own.read_once * 2 / fast.memory_bytes_per_s
    assert figures[2] == pytest.approx(2 * figures[1] - once_ms)


def test_a_token_takes_its_part_of_a_step_with_all_of_the_models_layers_and_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of 3 s waits 0.6 s for the link and 0.4 s for the host, and gives two tokens.

    Twice the layers take twice as long; of twice the experts, too,
    all but what a layer takes without them.
    """
    step = PassRecord(index=0, phase="verify", num_tokens=2, start_s=1.0, end_s=4.0)
    step.stall_s, step.host_wait_s, step.accepted, step.requests = 0.6, 0.4, 1, 16
    monkeypatch.setattr("moecache_plan.ranking._decode_steps", lambda *_: [step])
    own = load_real_model("OLMoE-1B-7B")
    for model, seconds in (
        (own, 1.5),
        (replace(own, num_layers=2 * own.num_layers), 3.0),
        (replace(own, num_layers=2 * own.num_layers, top_k=2 * own.top_k), 6.0),
    ):
        (row,) = find(str(TRACE), model, {LRU: config(LRU, emulate="OLMoE-1B-7B")})["rows"]
        assert row["tpot_ms"] == pytest.approx(1000 * seconds, rel=1e-3)


def test_a_device_that_says_nothing_of_its_host_leaves_those_policies_out(
    tmp_path: Path, moecache: Moecache
) -> None:
    short = _first_steps(tmp_path, 12, moecache)
    found = moecache.json("choose", short, "--hardware", "phone-12gb")
    assert found["left_out"] == ["ktransformers", "host", "host+hazard"]
    # Twelve steps: nothing is said about differences.
    assert BLOCKS * 4 > 12 and {row["slower_by"] for row in found["rows"]} == {None}


def test_of_a_batch_the_rate_is_that_of_all_streams_and_a_token_waits_for_one_step(
    tmp_path: Path, moecache: Moecache
) -> None:
    """Two streams of equal routing need the experts of one: each waits as long, twice the rate."""
    alone = pq.read_table(TRACE).filter(pc.field("pass") < 40)
    twin = alone.set_column(0, "request", pa.array([1] * len(alone), pa.int32()))
    both = pa.concat_tables([alone, twin])
    both = both.sort_by([("pass", "ascending"), ("layer", "ascending"), ("request", "ascending")])
    rows, pages = [], []
    for name, table in (("alone", alone), ("both", both)):
        header = json.loads(table.schema.metadata[b"moecache"])
        del header["digest"]
        path = tmp_path / f"{name}.parquet"
        pq.write_table(
            table.replace_schema_metadata({b"moecache": json.dumps(header).encode()}), path
        )
        found = moecache.json("choose", "OLMoE-1B-7B", "--trace", path, "--context", "1")
        rows.append(next(row for row in found["rows"] if row["policy"] == LRU))
        pages.append(moecache("choose", "OLMoE-1B-7B", "--trace", path, "--context", "1"))
    assert rows[0]["decode_miss_rate"] == rows[1]["decode_miss_rate"]
    assert rows[0]["tpot_ms"] == pytest.approx(rows[1]["tpot_ms"], rel=0.01)
    speeds = [row["decode_tok_per_s"] for row in rows]
    assert speeds[1] == pytest.approx(2 * speeds[0], rel=0.01)
    assert speeds == pytest.approx([1000 / rows[0]["tpot_ms"], 2000 / rows[1]["tpot_ms"]])
    assert "for one stream;" in pages[0]
    assert "2 streams at once: tok/s is their sum" in " ".join(pages[1].split())


def test_a_processor_alone_reads_what_its_ram_does_not_hold_off_the_drive(
    tmp_path: Path, moecache: Moecache
) -> None:
    steps = _first_steps(tmp_path, 12, moecache)
    words = ("choose", "OLMoE-1B-7B", "--trace", steps, "--hardware", "none", "--capacity")
    slow = moecache.json(*words, "25%", "--ram", "9GB", "--host_memory", "1x1600")
    fast = moecache.json(*words, "25%", "--ram", "9GB", "--host_memory", "8x4800")
    assert slow["hardware"] == "none" and "host" in slow["left_out"]
    miss = [next(r for r in each["rows"] if r["policy"] == LRU) for each in (slow, fast)]
    assert miss[0]["decode_miss_rate"] == miss[1]["decode_miss_rate"]
    model = load_real_model("OLMoE-1B-7B")
    reads = model.num_layers * (model.layer_dense_bytes + model.top_k * model.expert_bytes)
    reads += model.kv_bytes(4096)
    saved_ms = 1000 * reads * (1 / 12.8e9 - 1 / 307.2e9)
    assert miss[0]["tpot_ms"] - miss[1]["tpot_ms"] == pytest.approx(saved_ms, rel=0.02)
    # 7.4 GB, and 4 of the system's.
    assert "ram=8GB is too small" in moecache(*words, "50%", "--ram", "8GB", code=2)
    card = ("choose", "OLMoE-1B-7B", "--trace", steps, "--hardware", "rtx-3090", "--ram", "8GB")
    assert "ram=8GB is too small for the 12.9 GB" in moecache(*card, code=2)


def _first_steps(folder: Path, count: int, moecache: Moecache) -> Path:
    moecache("trace", "convert", ROOT / "traces/gemma-4-26b-a4b.parquet", folder / "all.csv")
    lines = (folder / "all.csv").read_text().splitlines(keepends=True)
    # turn, phase, step, layer, ...: decode steps begin at 29.
    kept = [row for row in lines if not row[0].isdigit() or int(row.split(",")[2]) < 29 + count]
    path = folder / "short.csv"
    path.write_text("".join(kept))
    return path


def test_a_trace_without_sizes_needs_a_model(tmp_path: Path, moecache: Moecache) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"tok": 0, "layers": [[0, 1], [1, 2]]}) + "\n")
    assert f"`moecache choose MODEL --trace {path}`" in moecache("choose", path, code=2)


def test_a_default_policy_that_a_trace_cannot_feed_names_one_that_it_can(
    moecache: Moecache,
) -> None:
    error = moecache("replay", TRACE, "--policy", "specmd", code=2)
    advised = re.search(r"policy=(\w+),eviction=(\w+), or this one with prefetch=(\w+),", error)
    assert advised is not None
    policy, eviction, oracle = advised.groups()
    for words in (["--policy", policy, "--eviction", eviction], ["--policy", "specmd"]):
        more = [] if "--eviction" in words else ["--prefetch", oracle, "--prefetch.recall", "0.85"]
        moecache("replay", TRACE, "--bound", "false", *words, *more)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[c.split()[1] for c, _ in SHOWN])
def test_what_the_page_shows_is_what_it_prints(
    command: str, output: str, moecache: Moecache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    assert moecache(*command.split()) == output


@pytest.mark.parametrize(
    ("name", "trace"),
    [
        ("OLMoE-1B-7B", "olmoe-1b-7b"),
        ("Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("DeepSeek-V3", "qwen3-30b-a3b"),  # 32 cycles a layer, of the traces' 8, 21 and 21
    ],
)
def test_the_routing_is_the_models_own_or_that_of_as_many_cycles(name: str, trace: str) -> None:
    assert nearest_trace(load_real_model(name)).stem == trace


def test_a_stand_in_has_a_cache_of_as_many_cycles_and_is_named(moecache: Moecache) -> None:
    """5% of DeepSeek-V3 are 1.6 cycles of its 32 a layer, and 7.5% of the trace's 21.3."""
    model, box = load_real_model("DeepSeek-V3"), as_machine(load_hardware("rtx-5090"))
    file = str(nearest_trace(model))
    found = find(file, model, {LRU: configs_of("5%", box, model)[LRU]}, 4096)
    assert found["capacity_cycles"] == pytest.approx(1.6, rel=1e-3) and found["in_regime"]
    options = ["--capacity", "7.5%", "--eviction", "lru", "--bound", "false"]
    (run,) = moecache.json("replay", file, *options)["runs"]
    missed = run["metrics"]["decode_miss_rate"]
    assert found["rows"][0]["decode_miss_rate"] == pytest.approx(missed, abs=0.005)
    notes = " ".join(notes_of({**found, "hardware": box.name, "recall": 0.85}, box))
    sizes = "48 layers x 128 experts, 6 a token, for 58 x 256, 8 a token"
    assert f"a stand-in of as many cycles: {sizes}" in notes


def test_it_looks_at_its_own_machine_and_marks_a_regime_that_the_trace_lacks(
    moecache: Moecache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """26 cycles of Qwen3-Next are more than the trace's 21.3."""
    box = as_machine(load_hardware("rtx-5090"), about="this machine (a box)")
    monkeypatch.setattr("moecache_plan.detect.detect_machine", lambda: box)
    monkeypatch.setattr("moecache_plan.detect.memory_rate", lambda cores: 72e9)
    steps = _first_steps(tmp_path, 12, moecache)
    page = moecache("choose", "Qwen3-Next-80B-A3B", "--trace", steps, "--capacity", "50%")
    page = " ".join(page.split())
    machine = "this machine (a box, memory measured: copies at 72 GB/s)"
    assert page.startswith(f"Qwen3-Next-80B-A3B (bf16) on {machine} with a cache of 50%")
    assert "which cannot show how many of them miss: --trace takes another" in page
