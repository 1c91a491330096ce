"""One loaded model for several evaluations: each reports its own requests, from a cold cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.report.metrics import request_metrics
from lm_eval_moecache.trace.importers import load_trace
from tests.conftest import Checkpoint
from tests.harness import generations

TASKS = {
    "asked": "output_type: generate_until\ngeneration_kwargs: {until: ['zz'], max_gen_toks: 4}\n"
    "doc_to_target: yes\nmetric_list: [{metric: exact_match}]\n",
    "chosen": "output_type: multiple_choice\ndoc_to_choice: [a, longer]\ndoc_to_target: 0\n"
    "metric_list: [{metric: acc}]\n",
}


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps({"text": f"page {i} " * (i + 1)}) + "\n" for i in range(4)))
    for name, text in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        shared = 'test_split: test\ndoc_to_text: "{{text}}"\nnum_fewshot: 0\n'
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{source}{shared}{text}")
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def lm(checkpoint: Checkpoint) -> MoECacheLM:
    return MoECacheLM(
        pretrained=str(checkpoint("olmoe")), max_length=48, policy="on_demand", capacity="50%"
    )


def evaluate(lm: Any, manager: TaskManager, *tasks: str, **options: Any) -> dict[str, Any]:
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=lm, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **options
    )
    return results


def figures(results: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = results["config"]["moecache"]
    return found


def test_each_evaluation_reports_its_own_requests_as_a_model_of_its_own_would(
    lm: MoECacheLM, manager: TaskManager
) -> None:
    first = figures(evaluate(lm, manager, "asked"))
    second = figures(evaluate(lm, manager, "chosen"))
    again = figures(evaluate(lm, manager, "asked"))
    assert list(first["tasks"]) == ["asked"]
    assert first["totals"]["requests"] == 4
    assert list(second["tasks"]) == ["chosen"]
    assert again == first


def test_an_evaluation_that_failed_half_way_leaves_nothing(
    lm: MoECacheLM, manager: TaskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = figures(evaluate(lm, manager, "asked"))
    with monkeypatch.context() as patch:
        patch.setattr(lm, "loglikelihood", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            evaluate(lm, manager, "asked", "chosen")
    assert figures(evaluate(lm, manager, "asked")) == before


def test_evaluate_itself_begins_anew_as_well(lm: MoECacheLM, manager: TaskManager) -> None:
    for _ in range(2):
        lm_eval.evaluate(lm=lm, task_dict=manager.load(["asked"]), bootstrap_iters=0)
        assert lm.report()["totals"]["requests"] == 4


def test_reset_empties_cache_and_counts(lm: MoECacheLM) -> None:
    def misses() -> list[int]:
        lm.generate_until(generations(2), disable_tqdm=True)
        return [p.misses for p in lm.engine.ledger.passes]

    lm.reset()
    cold = misses()
    warm = misses()
    assert warm[: len(cold)] == cold
    assert sum(warm[len(cold) :]) < sum(cold)
    lm.reset()
    assert lm.report()["totals"]["requests"] == 0
    assert misses() == cold


def test_each_evaluation_has_a_trace_of_its_own(
    checkpoint: Checkpoint, manager: TaskManager, tmp_path: Path
) -> None:
    lm = MoECacheLM(pretrained=str(checkpoint("olmoe")), policy="on_demand", trace=str(tmp_path))
    moved = [
        figures(evaluate(lm, manager, task))["totals"]["requests"] for task in ("asked", "chosen")
    ]
    traces = [load_trace(str(path)) for path in sorted(tmp_path.glob("*.parquet"))]
    assert moved == [4, 8]
    assert len(traces) == 2


def test_figures_of_any_task_stand_beside_its_scores_and_on_its_samples(
    lm: MoECacheLM, manager: TaskManager
) -> None:
    results = evaluate(lm, manager, "asked", "chosen")
    requests = lm.engine.ledger.requests
    asked = [r for r in requests if r.task == "asked"]
    ttft_ms = [request_metrics(r)["ttft_ms"] for r in asked]
    row = results["results"]["asked"]
    assert row["ttft_ms,speed"] == pytest.approx(sum(ttft_ms) / 4)
    assert row["ttft_ms_stderr,speed"] > 0
    assert "tpot_ms,speed" not in results["results"]["chosen"]  # nothing is decoded there
    assert results["higher_is_better"]["asked"]["request_miss_rate"] is False
    samples = results["samples"]["asked"]
    assert [s["speed"]["ttft_ms"] for s in samples] == ttft_ms
    # What a latency is read against is no figure of its own in the table of results.
    assert [s["speed"]["prompt_tokens"] for s in samples] == [r.prompt_tokens for r in asked]
    assert 0 < asked[0].prompt_tokens < asked[3].prompt_tokens
    assert "prompt_tokens,speed" not in row
    # Two choices of a document are one figure: their mean.
    both = [request_metrics(r)["e2el_ms"] for r in requests if r.task == "chosen"]
    assert results["samples"]["chosen"][0]["speed"]["e2el_ms"] == pytest.approx(sum(both[:2]) / 2)


def test_figures_are_those_of_the_documents_that_were_asked_for(
    lm: MoECacheLM, manager: TaskManager
) -> None:
    results = evaluate(lm, manager, "asked", samples={"asked": [3, 1]})
    by_length = sorted(lm.engine.ledger.requests, key=lambda r: r.prompt_tokens)
    short, long = (request_metrics(r)["ttft_ms"] for r in by_length)
    # By the document's text: lm-eval numbers documents that were not asked for in order wrongly.
    found = {s["doc"]["text"][:6]: s["speed"]["ttft_ms"] for s in results["samples"]["asked"]}
    assert found == {"page 3": long, "page 1": short}
