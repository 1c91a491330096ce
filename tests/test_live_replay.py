"""A live run of a real model and the replay of its own trace give the same figures."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.algorithms.policy import load_policy, policy_names
from lm_eval_moecache.algorithms.registry import algorithm_names, find_algorithm
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.engine.regime import s_mbu
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.preflight import check_arguments
from lm_eval_moecache.model.moe_layers import find_moe_layers, router_digest
from lm_eval_moecache.records.artifact import PREDICTOR, write_artifact
from lm_eval_moecache.records.schemas.keys import CHOICES
from lm_eval_moecache.report.metrics import task_metrics
from lm_eval_moecache.testing.streams import artifact_for
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace
from tests.artifacts import predictor_of
from tests.conftest import Checkpoint
from tests.harness import choices, make_instance


def _cases() -> list[dict[str, str]]:
    """Every lossless composition, and every eviction and prefetch algorithm in `on_demand`.

    By turns in one cache and per layer (where the eviction allows it).
    """
    policies = [load_policy(name) for name in policy_names() if load_policy(name).is_lossless]
    cases = [{"policy": p.name} for p in policies if not p.prefetch.algorithm.needs_draft]
    for axis in ("eviction", "prefetch"):
        for name in algorithm_names(axis):
            algorithm = find_algorithm(axis, name)
            if algorithm.is_offline or getattr(algorithm, "needs_draft", False):
                continue
            if "fetch" in algorithm.pairs_with.get("miss", ["fetch"]):
                cases.append({"policy": "on_demand", axis: name})
    for index, case in enumerate(cases):
        overrides = {key: value for key, value in case.items() if key != "policy"}
        eviction = load_policy(case["policy"], overrides).eviction.algorithm
        case["capacity"] = "20%" if index % 2 or eviction.compares_layers else "4/layer"
    return [
        *cases,
        {"policy": "specmd", "cache_reset": "request", "capacity": "40%"},
        {"policy": "specmd", **REAL, "attention": "context"},
        # Commits before routing is known: the predicted experts are executed.
        {"policy": "commitmoe_no_owa", "capacity": "40%"},
    ]


REAL = {"capacity": "40%", "emulate": "Qwen3-30B-A3B", "hardware": "rtx-4090"}


@pytest.fixture(scope="module")
def lm(checkpoint: Checkpoint) -> MoECacheLM:
    return MoECacheLM(pretrained=str(checkpoint("olmoe")), device="cpu")


def _run(lm: MoECacheLM, **options: Any) -> None:
    gen_kwargs: dict[str, Any] = {"until": ["\n\n"], "max_gen_toks": 4, "do_sample": False}
    gen_kwargs |= options
    prompts = enumerate(["One, two,", "Count the apples: 3"])
    lm.generate_until(
        [make_instance("generate_until", "t", i, p, gen_kwargs) for i, p in prompts], True
    )
    pairs = enumerate([("It is", " a"), ("It is", " b"), ("A longer context", " with more")])
    lm.loglikelihood([make_instance("loglikelihood", "t", i, *pair) for i, pair in pairs], True)


def _run_alone(lm: MoECacheLM) -> None:
    """One request, so that a decode step has one token."""
    gen_kwargs = {"until": ["\n\n"], "max_gen_toks": 4, "do_sample": False}
    lm.generate_until([make_instance("generate_until", "t", 0, "One, two,", gen_kwargs)], True)


def _recorded(lm: MoECacheLM, folder: Path, given: dict[str, Any], **options: Any) -> Trace:
    """Run behind the cache of these arguments and read the recorded trace."""
    lm.install(read_config({"streams": 2, **given, "trace": str(folder)}))
    _run(lm, **options)
    return load_trace(str(lm.finish_trace()), logits=True, predicted=True)


def _assert_replayed(lm: MoECacheLM, trace: Trace) -> None:
    """Compare a replay of the live run's trace with the run, pass by pass and in its totals."""
    replayed = replay(trace, lm.engine.setting, cache_reset=lm.moecache.cache_reset)
    assert replayed.ledger.passes == lm.engine.ledger.passes
    requests = replayed.ledger.requests
    roof = s_mbu(requests, replayed.geometry, replayed.setting)
    totals = task_metrics(requests, replayed.peak_cache_bytes) | {"s_mbu": roof}
    assert totals == lm.report()["totals"]


def _counts(engine: Engine) -> list[tuple[int, ...]]:
    passes = engine.ledger.passes
    return [(p.misses, p.late, p.bytes_moved, p.evictions) for p in passes]


def _given(lm: MoECacheLM, chosen: dict[str, str]) -> dict[str, str]:
    overrides = {key: value for key, value in chosen.items() if key == "prefetch"}
    return predictor_of(lm.model, load_policy(chosen["policy"], overrides))


@pytest.mark.parametrize("chosen", _cases(), ids=lambda c: "-".join(c.values()))
def test_a_live_run_equals_the_replay_of_its_trace(
    lm: MoECacheLM, tmp_path: Path, chosen: dict[str, str]
) -> None:
    trace = _recorded(lm, tmp_path, {**chosen, **_given(lm, chosen), "seed": 5})
    _assert_replayed(lm, trace)
    live = lm.engine.ledger.passes
    if "attention" in chosen:
        assert lm.report()["attention"] == "context"
        lm.install(read_config({**REAL, "streams": 2}))
        _run(lm)
        flat = lm.engine.ledger.passes
        assert sum(p.duration_s for p in live) > sum(p.duration_s for p in flat)
    if chosen["policy"] == "commitmoe_no_owa":
        decoded = [p for p in live if p.phase == "decode"]
        assert sum(p.unfaithful for p in decoded) > 0 and sum(p.predicted for p in decoded) > 0
        assert sum(p.unfaithful for p in live if p.phase == "prefill") == 0


def test_rows_of_a_batch_are_recorded_with_their_own_predictions(
    lm: MoECacheLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm, "batch_size_per_gpu", 3)
    given = {"policy": "specmd", "streams": 1, "trace_keep": "all", "capacity": "40%"}
    _assert_replayed(lm, _recorded(lm, tmp_path, given))


def test_choices_that_find_the_cache_as_others_left_it_are_recorded_as_their_own_passes(
    lm: MoECacheLM, tmp_path: Path
) -> None:
    given = {"policy": "max_rank", "capacity": "40%", "cache_reset": "never", "trace_keep": "all"}
    lm.install(read_config({**given, "trace": str(tmp_path)}))
    lm.loglikelihood(choices(), True)
    _assert_replayed(lm, load_trace(str(lm.finish_trace()), logits=True, predicted=True))


@pytest.mark.parametrize("cache_reset", ["never", "request"])
def test_a_prompt_in_chunks_replays_as_it_ran(
    lm: MoECacheLM, tmp_path: Path, cache_reset: str
) -> None:
    given = {"policy": "specmd", "capacity": "40%", "cache_reset": cache_reset}
    trace = _recorded(lm, tmp_path, given, prefill_chunk_size=3)
    _assert_replayed(lm, trace)
    assert [p.phase for p in lm.engine.ledger.passes].count("prefill") > 4


@pytest.mark.parametrize("cache_reset", ["never", "request"])
def test_a_warmed_run_equals_its_replay(lm: MoECacheLM, tmp_path: Path, cache_reset: str) -> None:
    config = {"policy": "on_demand", "cache_reset": cache_reset, "capacity": "40%"}
    _recorded(lm, tmp_path / "cold", config)
    cold, (profile,) = lm.engine.ledger.passes, (tmp_path / "cold").iterdir()
    trace = _recorded(lm, tmp_path / "warm", {**config, "warm": str(profile)})
    assert lm.engine.ledger.passes[0].misses < cold[0].misses
    assert lm.report()["warm"] == profile.name
    _assert_replayed(lm, trace)
    lm.engine.check_integrity()


@pytest.mark.parametrize(
    ("chosen", "scoring"),
    [
        ({"capacity": "40%"}, "parallel"),
        ({"policy": "on_demand", "capacity": "4/layer"}, "parallel"),
        ({"policy": "on_demand", "capacity": "4/layer"}, "scan"),
    ],
)
def test_the_windows_of_one_text_replay_as_one_request(
    lm: MoECacheLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chosen: dict[str, str],
    scoring: str,
) -> None:
    setting = {**chosen, "trace": str(tmp_path), "cache_reset": "request", "scoring": scoring}
    lm.install(read_config(setting))
    monkeypatch.setattr(lm, "_max_length", 24)
    text = "One text of three windows, counted in bytes: 1, 2, 3, 4, 5."
    texts = enumerate([text, "A short one.", "A" * 70])
    requests = [make_instance("loglikelihood_rolling", "task", i, text) for i, text in texts]
    lm.loglikelihood_rolling(requests, True)
    _run(lm)
    assert max(len(request.passes) for request in lm.engine.ledger.requests[:3]) > 1
    trace = load_trace(str(lm.finish_trace()), predicted=True)
    replayed = replay(trace, lm.engine.setting, cache_reset="request")
    assert _counts(replayed) == _counts(lm.engine)
    assert scoring == "scan" or replayed.ledger.passes == lm.engine.ledger.passes


def test_a_scanned_text_is_recorded_as_decode_passes(lm: MoECacheLM, tmp_path: Path) -> None:
    config = {"policy": "on_demand", "scoring": "scan", "capacity": "4/layer"}
    replayed = replay(_recorded(lm, tmp_path, config), lm.engine.setting)
    assert _counts(replayed) == _counts(lm.engine)
    # The scan goes layer by layer, the replay token by token: the same sums in another order.
    replayed_s, live_s = ([p.duration_s for p in e.ledger.passes] for e in (replayed, lm.engine))
    assert replayed_s == pytest.approx(live_s)


def test_a_closed_recording_takes_no_further_passes(lm: MoECacheLM, tmp_path: Path) -> None:
    lm.install(read_config({"policy": "on_demand", "trace": str(tmp_path)}))
    _run(lm)
    assert lm.finish_trace() is not None and lm.finish_trace() is None
    with pytest.raises(ValueError, match="has been closed"):
        _run(lm)
    lm.install(read_config({"policy": "on_demand"}))


def test_predictions_of_gates_and_of_a_predictor_are_not_taken_for_each_other(
    lm: MoECacheLM, tmp_path: Path
) -> None:
    policy = {"policy": "commitmoe_prefetch", "capacity": "40%"}
    (shared,) = _given(lm, policy).values()
    # A copy: it is overwritten below.
    predictor_config = {**policy, "prefetch.profile": str(shutil.copy(shared, tmp_path / "own"))}
    settings, traces = [], []
    for config in (
        predictor_config,
        {"policy": "on_demand", "prefetch": "next_gate", "capacity": "40%"},
    ):
        traces.append(_recorded(lm, tmp_path, {**config, "trace_keep": "all"}))
        settings.append(lm.engine.setting)
    with pytest.raises(ValueError, match="predictions are of the model's own gates and not of the"):
        replay(traces[1], settings[0])
    with pytest.raises(ValueError, match=r"of the predictor .* and not of the model's own gates"):
        replay(traces[0], settings[1])
    other = artifact_for(PREDICTOR, lm.geometry, seed=2, hidden=32)
    write_artifact(predictor_config["prefetch.profile"], other)
    with pytest.raises(ValueError, match=r"of the predictor .* and not of the predictor"):
        replay(traces[0], settings[0])


def test_a_predictor_of_other_routers_is_refused_once_they_are_known(
    lm: MoECacheLM, tmp_path: Path
) -> None:
    config = {"policy": "commitmoe_prefetch"}
    path = str(tmp_path / "other.safetensors")
    write_artifact(path, artifact_for(PREDICTOR, lm.geometry, hidden=32))
    with pytest.raises(ValueError, match=r"router weights .* are not those of"):
        lm.install(read_config({**config, "prefetch.profile": path}))
    narrow = artifact_for(PREDICTOR, lm.geometry, hidden=16)
    digest = router_digest(find_moe_layers(lm.model))
    write_artifact(path, dataclasses.replace(narrow, router_digest=digest))
    with pytest.raises(ValueError, match="hidden states of 16 numbers, but the routers of"):
        lm.install(read_config({**config, "prefetch.profile": path}))
    lm.install(read_config({"policy": "on_demand"}))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("kl", "predicts nothing for expert 2 of layer 0: its row of '2.1.weight' is all zero"),
        ("bce", "was trained with loss='bce', but prefetch.loss='kl'"),
    ],
)
def test_a_predictor_that_does_not_fit_is_refused_before_the_weights_are_loaded(
    lm: MoECacheLM, tmp_path: Path, loss: str, message: str
) -> None:
    path = tmp_path / "predictor.safetensors"
    artifact = artifact_for(PREDICTOR, lm.geometry, hidden=32, loss=loss)
    if loss == "kl":
        artifact.arrays["2.1.weight"][2] = 0
    write_artifact(path, artifact)
    arguments = {"policy": "commitmoe_prefetch", "prefetch.profile": str(path)}
    with pytest.raises(ValueError, match=message):
        check_arguments(lm.geometry.model, arguments)


def test_what_a_trace_keeps_is_exact_and_what_it_lacks_is_said(
    lm: MoECacheLM, tmp_path: Path
) -> None:
    """One plain run's trace serves every composition that prefetches by gates; others refuse it."""
    traces = {
        keep: _recorded(lm, tmp_path / keep, {"policy": "on_demand", "trace_keep": keep})
        for keep in CHOICES["trace_keep"]
    }
    for policy in ("specmd", "mixtral_offloading", "fate", "moe_infinity", "on_demand"):
        lm.install(read_config({"policy": policy, "capacity": "20%", "streams": 2}))
        _run(lm)
        _assert_replayed(lm, traces["lossless"])
    plain, weighed, far, lossy = (
        read_config({"policy": "on_demand", "capacity": "20%", **overrides}).setting(lm.geometry)
        for overrides in (
            {"eviction": "lfu"},
            {"eviction": "score"},
            {"prefetch": "next_gate", "prefetch.depth": 2},
            {"routing": "max_rank"},
        )
    )
    for trace in traces.values():
        assert replay(trace, plain).ledger.passes == replay(traces["all"], plain).ledger.passes
    for keep, setting, lacks in (
        ("routing", weighed, "a row has no weights"),
        ("lossless", far, "there is no column 'predicted'"),
        ("lossless", lossy, "there is no column 'logits'"),
    ):
        with pytest.raises(ValueError, match=f"{lacks}, .*trace_keep=all"):
            replay(traces[keep], setting)
    stateful, stateless = (
        read_config({"policy": policy}).setting(lm.geometry)
        for policy in ("specmd", "mixtral_offloading")
    )
    replay(traces["lossless"], stateless, cache_reset="never")
    with pytest.raises(ValueError, match="under cache_reset='request', not under 'never'"):
        replay(traces["lossless"], stateful, cache_reset="never")
    with pytest.raises(ValueError, match=r"trace_keep='all' says what a trace keeps, and none is"):
        read_config({"trace_keep": "all"})


@pytest.mark.parametrize(
    "chosen",
    [
        {"policy": "pruning"},
        {"policy": "mixture_cache"},
        {"policy": "max_rank", "phases": "all"},
        {"policy": "on_demand", "miss": "substitute_random"},
    ],
    ids=lambda c: "-".join(c.values()),
)
def test_recording_changes_no_figure_of_a_lossy_run(
    lm: MoECacheLM, tmp_path: Path, chosen: dict[str, str]
) -> None:
    """Lost weight too, of rules that look at no weight and decode one token at a time."""
    totals = []
    for recorded in ({}, {"trace": str(tmp_path)}):
        lm.install(read_config({**chosen, "capacity": "40%", **recorded}))
        _run_alone(lm)
        totals.append(lm.report()["totals"])
    assert totals[0] == totals[1] and totals[0]["lost_weight_share"] > 0


def test_lost_weight_does_not_depend_on_whether_proposals_were_recorded(
    lm: MoECacheLM, tmp_path: Path
) -> None:
    chosen = {"policy": "on_demand", "prefetch": "next_gate", "capacity": "40%"}
    config = read_config({**chosen, "routing": "pruning"})
    counts = []
    for keep in ("lossless", "all"):
        lm.install(read_config({**chosen, "trace": str(tmp_path / keep), "trace_keep": keep}))
        _run_alone(lm)
        trace = load_trace(str(lm.finish_trace()), logits=True, predicted=True)
        assert bool(trace.proposed) == (keep == "lossless")
        passes = replay(trace, config.setting(lm.geometry)).ledger.passes
        counts.append([p.lost_weight for p in passes])
    assert counts[0] == counts[1] and all(counts[0])


def test_a_lossy_runs_trace_keeps_everything(lm: MoECacheLM, tmp_path: Path) -> None:
    """Its prefetcher saw changed routing, so that proposals recorded there serve no other run."""
    trace = _recorded(lm, tmp_path, {"policy": "specmd_2", "capacity": "40%"})
    assert trace.logits is not None and trace.predicted is not None
    assert not trace.proposed


@pytest.mark.parametrize("policy", ["commitmoe_prefetch", "commitmoe_no_owa"])
def test_everything_is_kept_beside_a_predictor_of_its_own(
    lm: MoECacheLM, tmp_path: Path, policy: str
) -> None:
    """Requests served alone, of a policy that looks at no logits of the gates."""
    chosen = {"policy": policy, "capacity": "40%", "streams": 1, "trace_keep": "all"}
    trace = _recorded(lm, tmp_path, {**chosen, **_given(lm, chosen)})
    assert trace.logits is not None and trace.predicted is not None
