"""Data parallel: two processes share the documents, and one report has all requests."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.requests import merge, without_padding
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.files import task_configs_dir
from lm_eval_moecache.records.ledger import Ledger, PassRecord, RequestRecord
from lm_eval_moecache.report.metrics import task_metrics
from tests.harness import texts


def rank_of(*durations: float) -> list[RequestRecord]:
    requests = []
    for index, seconds in enumerate(durations):
        record = PassRecord(index, PREFILL, 3, 0.0, end_s=seconds, requests=2, misses=1)
        requests.append(RequestRecord(index, "task", "loglikelihood", passes=[record]))
    return requests


def test_passes_of_different_ranks_are_not_taken_for_one() -> None:
    requests, peak = merge([(rank_of(1.0, 3.0), 100), (rank_of(5.0), 200), ([], 0)])
    assert peak == 200 and [r.passes[0].index for r in requests] == [0, 1, 2]
    metrics = task_metrics(requests, peak)
    assert metrics["requests"] == 3 and metrics["ttft_ms"]["mean"] == pytest.approx(3000)
    assert metrics["miss_rate"] == 0.5 and metrics["prompt_tok_per_s"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("names", "repeats", "count"), [("abc", 1, 3), ("abccc", 1, 3), ("aabbbb", 2, 4), ("", 1, 0)]
)
def test_requests_that_only_fill_up_a_rank_do_not_count(
    names: str, repeats: int, count: int
) -> None:
    requests = {name: SimpleNamespace(repeats=repeats) for name in set(names)}
    assert without_padding([requests[name] for name in names]) == count


@pytest.mark.parametrize("batch_size", [1, 3])
def test_windows_that_only_fill_up_a_rank_do_not_count(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank has 4 more windows: HFLM repeats this rank's first window 4 times."""
    lm = MoECacheLM(device="cpu", max_length=48, batch_size=batch_size, policy="on_demand")
    expected = lm.loglikelihood_rolling(texts(), disable_tqdm=True)
    counts = [(r.prompt_tokens, len(r.passes)) for r in lm.engine.ledger.requests]
    lm.install(lm.moecache)
    monkeypatch.setattr(lm, "_world_size", 2)
    monkeypatch.setattr(lm, "all_gather", lambda mine: torch.stack([mine, mine + 4]))
    assert lm.loglikelihood_rolling(texts(), disable_tqdm=True) == expected
    requests = lm.engine.ledger.requests
    assert [r.prompt_tokens for r in requests] == [tokens for tokens, _ in counts]
    served = {p.index for r in requests for p in r.passes}
    if batch_size == 1:
        assert [len(r.passes) for r in requests] == [passes for _, passes in counts]
        assert len(lm.engine.ledger.passes) == len(served)
    lm.wrapped.unwrap()


def test_figures_are_sent_once_after_the_requests_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others: tuple[list[RequestRecord], int] | None = (rank_of(2.0, 3.0), 7)
    sent: list[Any] = []

    def gather(lm: HFLM, obj: Any, dst: int) -> Any:
        sent.append(obj)
        return [obj, ("theirs", others)]

    monkeypatch.setattr(HFLM, "gather_object", gather)
    lm: Any = MoECacheLM.__new__(MoECacheLM)
    ledger = SimpleNamespace(requests=rank_of(1.0))
    lm.engine = SimpleNamespace(ledger=ledger, peak_cache_bytes=5)
    lm._has_unsent = True
    assert lm.gather_object("mine") == ["mine", "theirs"]
    ledger.requests = rank_of(1.0, 4.0)
    others = None
    assert lm.gather_object("more") == ["more", "theirs"]
    assert [figures is not None for _, figures in sent] == [True, False]
    assert merge(lm._gathered)[1] == 7 and len(lm.evaluated()) == 3
    lm._has_unsent = True
    assert lm.gather_object("last") == ["last", "theirs"]
    assert sent[-1][1] == (ledger.requests, 5) and len(lm.evaluated()) == 2


def test_a_forgotten_request_leaves_its_index_to_no_other() -> None:
    ledger = Ledger()
    first = [ledger.new_request("task", "loglikelihood") for _ in range(3)]
    ledger.forget(first[1:])
    assert ledger.new_request("task", "generate_until").index == 3


def evaluate(
    folder: Path, launcher: Sequence[str] = (sys.executable,), **environment: str
) -> dict[str, Any]:
    """Run five documents through the command in `folder`; return its results JSON."""
    # `lm_eval run` where the start-up file is installed; else our command, which needs none.
    startup_file = importlib.util.find_spec("lm_eval_moecache_startup")
    module = ("lm_eval", "run") if startup_file else ("lm_eval_moecache", "eval")
    command = [*launcher, "-m", *module, "--model", "moecache", "--model_args"]
    command += ["policy=on_demand,capacity=25%,max_length=256", "--device", "cpu"]
    command += ["--include_path", str(task_configs_dir()), "--tasks", "tiny_arc", "--limit", "5"]
    folder.mkdir()
    env = {**os.environ, "HF_HOME": str(folder / "home"), **environment}
    process = subprocess.run(
        [*command, "--output_path", "out"], cwd=folder, env=env, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-3000:]
    [path] = (folder / "out").rglob("results_*.json")
    results: dict[str, Any] = json.loads(path.read_text())
    return results


@pytest.mark.slow
def test_two_ranks_give_the_scores_and_the_requests_of_one(tmp_path: Path) -> None:
    """`accelerate launch` does the same on GPUs; here two processes share a CPU."""
    single = evaluate(tmp_path / "one")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    parallel = evaluate(tmp_path / "two", launcher, ACCELERATE_USE_CPU="true")
    assert parallel["results"]["tiny_arc"]["acc,none"] == single["results"]["tiny_arc"]["acc,none"]
    one_rank, two_ranks = (r["config"]["moecache"] for r in (single, parallel))
    assert two_ranks["ranks"] == 2 and "ranks" not in one_rank
    for name in ("requests", "token_miss_rate"):
        assert two_ranks["totals"][name] == pytest.approx(one_rank["totals"][name], abs=0.05), name
    assert two_ranks["totals"]["requests"] == 20
