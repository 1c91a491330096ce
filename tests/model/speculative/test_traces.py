"""Traces of drafted runs: a replay drafts again, and gives the run's own figures to the digit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_eval_moecache.algorithms.prefetch.gates import DraftPrefetch
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheSpecLM
from lm_eval_moecache.records.arrays import FloatArray
from lm_eval_moecache.records.geometry import Draft
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.tiny import DRAFT_DIR
from lm_eval_moecache.trace.file import read_trace
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.recorder import Detail
from lm_eval_moecache.trace.trace import DRAFT_COLUMNS, Trace
from tests.conftest import Moecache
from tests.harness import make_instance
from tests.model.speculative.drafts import requests, untrained_draft

SETTINGS: list[dict[str, Any]] = [
    {"policy": "sp_moe"},
    {"policy": "sp_moe", "capacity": "4/layer", "draft_tokens": 3, "bandwidth": "100MB/s"},
    {"policy": "sp_moe", "prefetch.cutoff": 0},
    {"policy": "sp_moe", "prefetch.io": "per_expert", "link": "fifo"},
    {"policy": "sp_moe_vanilla", "cache_reset": "request"},
    {"policy": "mixtral_offloading", "draft_tokens": 2},
    {"policy": "moe_infinity"},
    {"policy": "on_demand", "eviction": "lfu"},
    {"policy": "on_demand", "draft": "prompt_lookup", "draft_tokens": 3},
]


class ByValue(DraftPrefetch):
    """Reads more of a prediction than its order."""

    by_order: ClassVar[bool] = False

    def propose_draft(self, layer: int, logits: FloatArray) -> Sequence[int]:
        return [key for key in super().propose_draft(layer, logits) if logits.max() > 0]


@pytest.fixture(scope="module")
def lm(checkpoint: Callable[[str], Path]) -> MoECacheSpecLM:
    return MoECacheSpecLM(pretrained=str(checkpoint("olmoe")), device="cpu", policy="sp_moe")


def run(lm: MoECacheSpecLM, **ours: Any) -> None:
    """Generate with drafts, and score texts in between, which uses none."""
    setting = {"draft": "self:int8", "capacity": "40%", **ours}
    lm.install(read_config(setting, speculative=True))
    gen_kwargs = {"until": ["@@"], "max_gen_toks": 9, "do_sample": False}
    texts = ["One, two, one, two,", "Count the apples: 3"]
    for number, text in enumerate(texts):
        lm.generate_until([make_instance("generate_until", "gen", number, text, gen_kwargs)], True)
        lm.loglikelihood([make_instance("loglikelihood", "score", number, text, " a")], True)


def recorded(lm: MoECacheSpecLM) -> Trace:
    return load_trace(str(lm.finish_trace()), logits=True, predicted=True)


def assert_same(again: Engine, live: Engine) -> None:
    assert again.ledger.passes == live.ledger.passes
    assert again.peak_cache_bytes == live.peak_cache_bytes
    totals = [task_metrics(e.ledger.requests, e.peak_cache_bytes) for e in (again, live)]
    assert repr(totals[0]) == repr(totals[1])
    again.check_integrity()


@pytest.mark.parametrize("chosen", SETTINGS, ids=lambda c: "-".join(map(str, c.values())))
def test_a_drafted_run_equals_the_replay_of_its_trace(
    lm: MoECacheSpecLM, tmp_path: Path, chosen: dict[str, Any]
) -> None:
    run(lm, **chosen, trace=str(tmp_path))
    trace, live = recorded(lm), lm.engine
    assert sum(p.drafted for p in live.ledger.passes) > 0
    replayed = replay(
        trace,
        replace(live.setting, draft=None),
        cache_reset=chosen.get("cache_reset", "request"),
    )
    assert_same(replayed, live)
    stages = [engine.draft_stage for engine in (replayed, live)]
    assert [s and s.solution for s in stages] == [stages[1] and stages[1].solution] * 2


def test_a_trace_holds_the_runs_draft_and_the_command_replays_it(
    lm: MoECacheSpecLM, tmp_path: Path, moecache: Moecache
) -> None:
    run(lm, policy="sp_moe")
    unrecorded = lm.engine.ledger.passes
    run(lm, policy="sp_moe", trace=str(tmp_path))
    # Recording also predicts layers that the policy does not use, which takes no time.
    assert lm.engine.ledger.passes == unrecorded
    path = lm.finish_trace()
    recording, draft = load_trace(str(path), predicted=True).drafted, lm.engine.setting.draft
    assert recording.draft == draft and isinstance(draft, Draft)
    # As many as the model's top-k: what SP-MoE's prefetcher looks at by default.
    assert (draft.targets, recording.ranked) == ((0, 1, 2), 3)
    # The draft reads the prompt once, then one token at a time.
    assert recording.tokens is not None and int(np.max(recording.tokens.values)) > 1
    words = ["--policy=sp_moe,on_demand", "--capacity=40%", "--json"]
    drafted, plain = moecache.json("replay", str(path), *words)["runs"]
    assert drafted["metrics"] == json.loads(json.dumps(lm.report()["totals"]))
    assert drafted["metrics"]["draft_acceptance"] == plain["metrics"]["draft_acceptance"]
    assert drafted["metrics"]["prefetch_precision"] is not None


FORESEEING = [
    {},
    {"prefetch.cutoff": 3, "prefetch.critical": 20},
    {"policy": "sp_moe_vanilla", "prefetch.cutoff": 5},
]


@pytest.mark.parametrize(
    ("draft", "policies"),
    [
        pytest.param("self:int4", FORESEEING, marks=pytest.mark.slow),
        pytest.param("tiny", FORESEEING[1:], marks=pytest.mark.slow),
        ("tiny-draft", FORESEEING),
        ("narrow", [{"policy": "mixtral_offloading"}]),
    ],
)
def test_any_drafting_policy_replays_from_anothers_trace(
    spec: MoECacheSpecLM, tmp_path: Path, draft: str, policies: list[dict[str, Any]]
) -> None:
    """On the shipped model, whose gates cannot read the hidden states of a narrower draft."""
    if is_narrow := draft == "narrow":
        draft = str(untrained_draft(tmp_path / draft, DRAFT_DIR, hidden_size=64, head_dim=16))
    drafting = {"draft": draft, "draft_tokens": 2, "bandwidth": "200MB/s"}
    keep = {"trace": str(tmp_path / "traces"), "trace_keep": "all"}
    recording = {**drafting, "policy": "on_demand", **keep}
    spec.install(read_config(recording, speculative=True))
    spec.generate_until(requests(1), disable_tqdm=True)
    trace = recorded(spec)
    assert bool(trace.drafted.predicted_layers) == (not is_narrow)
    for changes in policies:
        spec.install(read_config({**drafting, "policy": "sp_moe", **changes}, speculative=True))
        spec.generate_until(requests(1), disable_tqdm=True)
        assert sum(p.predicted for p in spec.engine.ledger.passes) > 0 or not changes
        assert_same(replay(trace, spec.engine.setting), spec.engine)


def test_what_a_trace_does_not_keep_is_refused_by_name(lm: MoECacheSpecLM, tmp_path: Path) -> None:
    few = Detail(weights=False, logits=False, predictions=False, criticals=(2,))
    config = read_config({"policy": "on_demand", "trace": str(tmp_path)}, speculative=True)
    lm.install(config.with_changes(detail=few))
    gen_kwargs = {"until": ["@@"], "max_gen_toks": 4, "do_sample": False}
    lm.generate_until([make_instance("generate_until", "gen", 0, "One,", gen_kwargs)], True)
    trace = recorded(lm)
    assert trace.drafted.ranked == 2
    draft = lm.engine.setting.draft
    assert draft is not None
    unseen = replace(trace.drafted, draft=replace(draft, targets=()))
    path = f"{ByValue.__module__}.{ByValue.__qualname__}"
    for changes, drafted, message in (
        ({"prefetch.critical": 3}, trace.drafted, "has 2 experts and not the critical=3"),
        ({"prefetch": path}, trace.drafted, "more of a prediction than its order"),
        ({"prefetch.critical": 2}, unseen, "the drafts' predictions were not recorded"),
    ):
        policy = read_config({"policy": "sp_moe", **changes}, speculative=True).policy
        with pytest.raises(ValueError, match=message):
            replay(replace(trace, drafted=drafted), replace(lm.engine.setting, policy=policy))


def test_a_killed_recording_keeps_its_drafts(lm: MoECacheSpecLM, tmp_path: Path) -> None:
    run(lm, policy="sp_moe", trace=str(tmp_path))
    live = lm.engine
    (partial,) = tmp_path.glob("*.partial")
    trace = read_trace(partial)
    assert trace.drafted.settled == {
        p.index: (p.drafted, p.accepted) for p in live.ledger.passes if p.drafted
    }
    assert replay(trace, live.setting).ledger.passes == live.ledger.passes
    trace_tokens = [r.output_tokens for r in trace.requests if r.kind == "generate_until"]
    live_tokens = [r.output_tokens or 0 for r in live.ledger.requests if r.kind == "generate_until"]
    # A last pass may accept more than the answer has room for.
    assert all(
        0 <= in_trace - in_run <= 1
        for in_trace, in_run in zip(trace_tokens, live_tokens, strict=True)
        if in_trace
    )


def damaged(path: Path, column: str, change: Callable[[list[Any]], list[Any]]) -> Path:
    """Write a trace again with one column changed."""
    table = pq.read_table(path)
    index = table.column_names.index(column)
    kind = table.schema.field(column).type
    values = pa.array(change(table[column].to_pylist()), kind)
    pq.write_table(
        table.set_column(index, pa.field(column, kind), values), path.with_suffix(".bad")
    )
    return path.with_suffix(".bad")


def _grown(rows: list[Any]) -> list[Any]:
    first = next(i for i, row in enumerate(rows) if row)
    return [[*row, 1] if i == first else row for i, row in enumerate(rows)]


def _all(value: int) -> Callable[[list[Any]], list[Any]]:
    return lambda rows: [[value] * len(row) for row in rows]


@pytest.mark.parametrize(
    ("column", "change", "told"),
    [
        ("draft_tokens", _grown, r"row \d+: draft_experts has 3 values, must have 6"),
        (
            "draft_tokens",
            lambda rows: [*rows[:-1], [1]],
            "draft_tokens is not in a pass' first row",
        ),
        ("draft_experts", _all(99), r"row \d+: draft_experts holds 99, must lie in 1..8"),
        ("draft_ranked", _grown, r"row \d+: draft_ranked has 25 values, must have 24"),
        ("draft_ranked", _all(99), r"row \d+: draft_ranked holds 99, must lie in 0..7"),
        ("draft_ranked", _all(0), r"row \d+: draft_ranked names an expert twice"),
    ],
)
def test_damage_to_what_was_drafted_is_named(
    lm: MoECacheSpecLM,
    tmp_path: Path,
    column: str,
    change: Callable[[list[Any]], list[Any]],
    told: str,
) -> None:
    run(lm, policy="sp_moe", trace=str(tmp_path), trace_keep="all")
    path = lm.finish_trace()
    assert path is not None and column in DRAFT_COLUMNS
    with pytest.raises(ValueError, match=told):
        read_trace(damaged(path, column, change))
