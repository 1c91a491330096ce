"""Speed figures in lm-eval's own table, the task groups that request them, and the judge."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from functools import partialmethod
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from lm_eval_moecache.harness.judge import Judge, read_verdict
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.tasks import (
    SpeedTask,
    add_speed_rows,
    document_metrics,
    drop_placeholders,
    speed_row,
)
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.files import task_configs_dir
from lm_eval_moecache.records.ledger import PassRecord, RequestRecord
from lm_eval_moecache.report.metrics import BATCH
from lm_eval_moecache.report.runs.run import independent, scores_of
from tests.harness import small_tasks

SPEED = "!function lm_eval_moecache.harness.tasks.SpeedTask"

GROUPS = f"""
speedy: |
  group: speedy
  task:
  - task: generated
    class: {SPEED}
  - group: inner
    class: {SPEED}
  aggregate_metric_list: [{{metric: ttft_ms}}, {{metric: e2el_ms}}]
inner: |
  group: inner
  task: [chosen, innermost]
innermost: |
  group: innermost
  task: [rolling]
plain: |
  group: plain
  task: [generated, inner]
  aggregate_metric_list: [{{metric: ttft_ms}}]
"""


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """Small tasks, and groups that nest them two deep."""
    return small_tasks(tmp_path_factory.mktemp("tasks"), yaml.safe_load(GROUPS))


Measure = Callable[[Instance], dict[str, float] | None]


class ScriptedLM(LM):  # type: ignore[misc]
    """Answers "YES" to everything and leaves on each request what `measure` returns."""

    def __init__(self, measure: Measure) -> None:
        super().__init__()
        self.measure = measure

    def answer(self, requests: list[Instance], response: Any) -> list[Any]:
        for request in requests:
            figures = self.measure(request)
            if figures is not None:
                request.moecache = figures
        return [response] * len(requests)

    loglikelihood = partialmethod(answer, response=(-1.0, False))
    loglikelihood_rolling = partialmethod(answer, response=-1.0)
    generate_until = partialmethod(answer, response="YES")


def measure_by_document(request: Instance) -> dict[str, float]:
    """TTFT grows with the document and differs by choice; only document 1 has a TPOT."""
    assert request.doc_id is not None
    figures = {"ttft_ms": 10.0 * request.doc_id + request.idx, "e2el_ms": 5.0}
    figures["request_hit_rate"] = 0.5
    if request.request_type == "generate_until" and request.doc_id == 1:
        figures["tpot_ms"] = 7.0
    return figures


def evaluate(
    manager: TaskManager, measure: Measure, tasks: list[str], **options: Any
) -> dict[str, Any]:
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=ScriptedLM(measure), tasks=tasks, task_manager=manager, **options
    )
    return results


@pytest.fixture(scope="module")
def speedy(manager: TaskManager) -> dict[str, Any]:
    return evaluate(manager, measure_by_document, ["speedy"])


def test_speed_joins_the_score_with_a_standard_error(speedy: dict[str, Any]) -> None:
    results = speedy["results"]
    # Documents 0 to 3; the mean over two choices adds half a millisecond to each.
    assert results["generated"]["ttft_ms,speed"] == pytest.approx(15.0)
    assert results["chosen"]["ttft_ms,speed"] == pytest.approx(15.5)
    assert results["rolling"]["ttft_ms,speed"] == pytest.approx(15.0)
    # Sample standard deviation of 0, 10, 20, 30 over the square root of 4.
    assert results["generated"]["ttft_ms_stderr,speed"] == pytest.approx(12.9099445 / 2)
    assert results["chosen"]["acc,none"] == pytest.approx(0.5)


def test_speed_is_listed_once_and_what_nobody_measured_is_left_out(speedy: dict[str, Any]) -> None:
    generated, chosen = (speedy["results"][kind] for kind in ("generated", "chosen"))
    assert [key for key in generated if key.startswith("ttft_ms,")] == ["ttft_ms,speed"]
    scores = {key: value for key, value in generated.items() if key.startswith("exact_match,")}
    assert scores == {"exact_match,strict": 0.0, "exact_match,loose": 1.0}
    assert generated["tpot_ms,speed"] == 7.0
    assert speedy["n-samples"]["generated"]["effective"] == 4
    assert "tpot_ms,speed" not in chosen and "request_tok_per_s,speed" not in generated


def test_printed_table_has_arrows_and_a_group_averages_over_all_documents_below_it(
    speedy: dict[str, Any],
) -> None:
    rows = [line.replace(" ", "").split("|") for line in make_table(speedy).splitlines()]
    assert "↓" in next(row for row in rows if {"ttft_ms", "±", "speed"} <= set(row))
    assert "↑" in next(row for row in rows if "request_hit_rate" in row)
    group = speedy["groups"]["speedy"]
    assert group["ttft_ms,speed"] == pytest.approx((15.0 + 15.5 + 15.0) / 3)
    assert group["ttft_ms_stderr,speed"] > 0


def test_speed_leaves_the_plain_tasks_as_they_are(
    manager: TaskManager, speedy: dict[str, Any]
) -> None:
    plain = evaluate(manager, lambda _: None, ["plain"])
    unmeasured = evaluate(manager, lambda _: None, ["speedy"])
    for task in ("generated", "chosen", "rolling"):
        for part in ("results", "samples", "higher_is_better"):
            assert unmeasured[part][task] == plain[part][task]
        scores = {k: v for k, v in speedy["results"][task].items() if ",speed" not in k}
        assert scores == plain["results"][task]


def test_limit_and_logged_samples_carry_the_figures(manager: TaskManager) -> None:
    results = evaluate(manager, measure_by_document, ["speedy"], limit=2, log_samples=True)

    samples = [s for s in results["samples"]["chosen"] if s["filter"] == "speed"]

    assert [sample["ttft_ms"] for sample in samples] == [0.5, 10.5]
    assert samples[0]["filtered_resps"][1]["ttft_ms"] == 1.0
    assert json.loads(json.dumps(samples[0]["filtered_resps"])) == samples[0]["filtered_resps"]
    assert results["results"]["chosen"]["ttft_ms,speed"] == pytest.approx(5.5)


def test_chosen_samples_repeats_and_predict_only_keep_working(manager: TaskManager) -> None:
    samples = {"generated": [2], "chosen": [3], "rolling": [1]}
    results = evaluate(manager, measure_by_document, ["speedy"], samples=samples)["results"]
    assert results["generated"].items() >= {"e2el_ms,speed": 5.0, "sample_len": 1}.items()
    whole = evaluate(manager, measure_by_document, ["speedy"], predict_only=True)
    results = whole["results"]
    assert results["chosen"]["ttft_ms,speed"] == pytest.approx(15.5)
    assert results["generated"]["bypass,strict"] == 999 and not scores_of(results["generated"])
    drop_placeholders(whole)
    assert not [key for row in results.values() for key in row if key.startswith("bypass")]
    spec = {**manager.task_index["generated"].cfg, "class": SpeedTask, "repeats": 3}
    task = manager.load([spec])["tasks"]["generated"]
    repeated = evaluate(manager, measure_by_document, [task])["results"]["generated"]
    assert repeated["ttft_ms,speed"] == pytest.approx(15.0)


# --- the groups in task_configs/ ---------------------------------------------------------------

PAPER_GROUPS = {
    "moecache_leaderboard": {"gsm8k": 5, "mmlu_astronomy": 5, "arc_easy": 0, "truthfulqa_mc2": 0},
    "moecache_specmd": {"gsm8k": 5, "truthfulqa_gen": 0, "nq_open": 0},
    "moecache_cache_conditional": {"wikitext": 0, "mmlu_virology": 5, "gsm8k_cot": 8},
    "moecache_commitmoe": {"gsm8k": 5, "truthfulqa_gen": 0, "bbh_cot_fewshot_snarks": 3},
    "moecache_buddymoe": {"arc_easy": 0, "arc_challenge": 0},
    "moecache_sp_moe": {"moecache_humaneval_100": 0, "bbh_zeroshot_snarks": 0},
}


@pytest.fixture(scope="module")
def shipped() -> TaskManager:
    return TaskManager(include_path=str(task_configs_dir()))


def group_files() -> list[Path]:
    files = [p for p in task_configs_dir().rglob("*.yaml") if "offline" not in p.parts]
    return [path for path in files if path.read_text().find("\ngroup: ") != -1]


@pytest.mark.slow
@pytest.mark.parametrize("path", group_files(), ids=lambda path: path.stem)
def test_every_member_of_a_shipped_group_carries_speed(path: Path, shipped: TaskManager) -> None:
    text = path.read_text().replace("!function ", "")
    config = yaml.safe_load(text)
    assert config["group"] in shipped.all_groups
    for item in config["task"]:
        if isinstance(item, str):  # a task or group of ours, which carries speed itself
            assert item.startswith("moecache_")
            assert item in shipped.all_tasks
        else:
            assert item["class"] in (
                "lm_eval_moecache.harness.tasks.SpeedTask",
                "lm_eval_moecache.harness.judge.JudgedTask",
            )
            assert (item.get("task") or item["group"]) in shipped.all_tasks


@pytest.mark.slow
@pytest.mark.parametrize("group", PAPER_GROUPS)
def test_shipped_group_runs_on_real_data(
    group: str, shipped: TaskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = os.environ.get("MOECACHE_SHARED_DATA")
    if not shared:
        pytest.skip("needs a folder laid out like the hub, named by MOECACHE_SHARED_DATA")
    monkeypatch.chdir(Path(shared) / "hub")

    results = evaluate(shipped, measure_by_document, [group], limit=2, bootstrap_iters=10)

    leaves = {name for name in results["n-samples"]}
    assert all("ttft_ms,speed" in results["results"][name] for name in leaves)
    for task, shots in PAPER_GROUPS[group].items():
        assert results["n-shot"][task] == shots


class Endpoint(BaseHTTPRequestHandler):
    """Grades an answer correct if it ends in the reference's last word, as `####` answers do."""

    asked: list[dict[str, Any]]
    reply: str | None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append({"path": self.path, **body})
        prompt = body["messages"][0]["content"]
        _, _, graded = prompt.partition("Reference answers: ")
        reference, _, answer = graded.partition("\nAnswer to grade: ")
        words = answer.partition("\n\nThe answer is correct")[0].split()
        is_correct = words[-1:] == reference.split()[-1:]
        verdict = "CORRECT." if is_correct else "It is **INCORRECT**"
        reply = {"content": verdict if self.reply is None else self.reply}
        text = json.dumps({"choices": [{"message": reply}]})
        self.send_response(500 if self.reply == "broken" else 200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def endpoint() -> Iterator[tuple[str, type[Endpoint]]]:
    handler = type("Handler", (Endpoint,), {"asked": [], "reply": None})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", handler
    server.shutdown()
    thread.join()


def manager_of(metadata: dict[str, str]) -> TaskManager:
    folder = str(task_configs_dir())
    return TaskManager(include_path=folder, include_defaults=False, metadata=metadata)


def run(metadata: dict[str, str]) -> dict[str, Any]:
    lm = MoECacheLM(policy="on_demand", capacity="50%")
    options = {"task_manager": manager_of(metadata), "limit": 3, "bootstrap_iters": 0}
    results = lm_eval.simple_evaluate(lm, tasks=["moecache_judged"], **options)
    return dict(results["results"]["tiny_gsm8k"])


def test_an_endpoint_judges_and_its_agreement_with_exact_match_is_reported(
    endpoint: tuple[str, type[Endpoint]], tmp_path: Path
) -> None:
    url, handler = endpoint
    metadata = {"judge_url": url, "judge_model": "some-model"}
    scores = run({**metadata, "judge_cache": str(tmp_path / "v.jsonl")})
    assert scores["judged,judge"] == scores["exact_match,strict-match"]
    assert (scores["judge_agreement,judge"], scores["judge_unread,judge"]) == (1.0, 0.0)
    assert "request_tok_per_s,speed" in scores
    targets = [(request["path"], request["model"]) for request in handler.asked]
    assert targets == [("/v1/chat/completions", "some-model")] * 3
    assert handler.asked[0]["temperature"] == 0
    # The judge reads the whole answer, not what a filter extracts from it.
    assert "####" in handler.asked[0]["messages"][0]["content"].split("Answer to grade:")[1]


def test_a_verdict_is_asked_for_once(endpoint: tuple[str, type[Endpoint]], tmp_path: Path) -> None:
    url, handler = endpoint
    cache = tmp_path / "deep" / "verdicts.jsonl"
    assert Judge("m", url, cache).verdict("2 + 3?", "5", "It is 5") == 1.0
    assert Judge("m", url, cache).verdict("2 + 3?", "5", "It is 6") == 0.0
    with cache.open("a") as file:
        file.write('{"key": "cut o')  # left by a killed run
    reopened = Judge("m", url, cache)
    assert reopened.verdict("2 + 3?", "5", "It is 5") == 1.0
    assert len(handler.asked) == 2
    assert Judge("other", url, cache).verdict("2 + 3?", "5", "It is 5") == 1.0
    assert len(handler.asked) == 3, "another judge has verdicts of its own"


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("CORRECT", "CORRECT"),
        ("**Incorrect.**", "INCORRECT"),
        ("Verdict: correct", "CORRECT"),
        ("INCORRECT, because 5 is wrong", "INCORRECT"),
        ("Incorrect (the reference says CORRECT: 7)", "INCORRECT"),
        ("2 + 3 is 5, as the answer says.\n\nThe answer is CORRECT.", "CORRECT"),
        ("The answer is not correct.", None),
        ("Perhaps.", None),
        ("Correct answers differ from this one", None),
        ("CORRECT at first sight.\nINCORRECT", "INCORRECT"),
        ("CORRECT\nFinal verdict: INCORRECT", None),
        ("CORRECT?", None),
        ("", None),
    ],
)
def test_a_verdict_is_read_only_where_it_is_clear(reply: str, verdict: str | None) -> None:
    assert read_verdict(reply) == verdict


@pytest.mark.parametrize(
    ("reply", "said"), [("Perhaps.", ""), ("broken", "answered 500"), (None, "refused")]
)
def test_a_missing_verdict_ends_no_run_and_is_counted(
    endpoint: tuple[str, type[Endpoint]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    reply: str | None,
    said: str,
) -> None:
    url, handler = endpoint
    handler.reply = reply
    if reply is None:  # no answer at all
        url = "http://127.0.0.1:9/v1"
    cache = tmp_path / "v.jsonl"
    scores = run({"judge_url": url, "judge_model": "m", "judge_cache": str(cache)})
    assert scores["judge_unread,judge"] == 1.0 and "exact_match,strict-match" in scores
    assert not isinstance(scores.get("judged,judge"), float) or math.isnan(scores["judged,judge"])
    assert not cache.exists()
    lines = [r.getMessage() for r in caplog.records if r.name.endswith(".judge")]
    failures = [line for line in lines if "gave no answer" in line and said in line]
    assert len(failures) == (3 if said else 0)
    assert ("not called again" in "".join(lines)) == bool(said)


def test_only_failures_in_a_row_silence_a_judge(
    endpoint: tuple[str, type[Endpoint]], tmp_path: Path
) -> None:
    url, handler = endpoint
    judge = Judge("m", url, tmp_path / "v.jsonl")
    verdicts = []
    for number, reply in enumerate(["broken", "broken", "CORRECT", *["broken"] * 3, "CORRECT"]):
        handler.reply = reply
        verdicts.append(judge.verdict("q", "r", f"answer {number}"))
    assert verdicts == [None, None, 1.0, None, None, None, None]
    assert len(handler.asked) == 6, "the last answer is not asked about"
    assert judge.verdict("q", "r", "answer 2") == 1.0, "a verdict that is known is still given"


THERE = {"judge_model": "m", "judge_url": "http://127.0.0.1:9/v1"}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "metadata has no judge_model"),
        ({"judge_model": "m"}, "metadata has no judge_url"),
        ({"judge_modle": "x"}, "Did you mean 'judge_model'"),
        ({"judge_model": "m", "judge_url": "localhost:8000/v1"}, "judge_url='localhost:8000/v1'"),
        ({"judge_model": "m", "judge_url": "ftp://host/v1"}, "Allowed: http://HOST:PORT/v1"),
        ({"judge_model": "m", "judge_url": "http:///v1"}, "is not an address of an endpoint"),
        ({**THERE, "judge_cache": "/dev/null/v.jsonl"}, "Not a directory"),
        ({**THERE, "judge_cache": "/dev/full"}, "a device or a pipe"),
        ({**THERE, "judge_cache": "/tmp"}, "it is a folder"),
    ],
)
def test_a_wrong_judge_is_refused_before_anything_runs(
    metadata: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        manager_of(metadata).load(["moecache_judged"])


# --- documents of one batch are one sample ---


def served(*batches: int, seconds: float = 1.0) -> list[RequestRecord]:
    """One document for each number given, which is its batch: batch k is read in 1 + k s."""
    passes = [
        PassRecord(k, PREFILL, 1, 0.0, seconds * (1 + k), requests=4, misses=k)
        for k in range(max(batches) + 1)
    ]
    return [
        RequestRecord(i, "quiz", "loglikelihood", passes=[passes[k]], document=i)
        for i, k in enumerate(batches)
    ]


def test_a_tasks_error_of_speed_is_that_of_its_batches() -> None:
    """Eight documents in two batches, 1 and 2 s: the error is 0.5 s, not 0.5 x sqrt(8 / 7 / 8)."""
    documents = document_metrics(served(0, 0, 0, 0, 1, 1, 1, 1))["quiz"]
    assert len({figures[BATCH] for figures in documents.values()}) == 2
    row = speed_row(documents.values())
    assert row["ttft_ms,speed"] == 1500
    assert row["ttft_ms_stderr,speed"] == pytest.approx(500)
    # One batch alone: no error can be told.
    assert speed_row([documents[0], documents[1]])["ttft_ms_stderr,speed"] == "N/A"
    alone = document_metrics(served(0, 1, 2))["quiz"]
    assert all(BATCH not in figures for figures in alone.values())
    assert speed_row(alone.values())["ttft_ms_stderr,speed"] == pytest.approx(1000 / math.sqrt(3))


def test_lm_evals_errors_are_replaced_where_documents_share_batches() -> None:
    key = "ttft_ms_stderr,speed"
    task = {"ttft_ms,speed": 1500.0, key: 189.0}
    group = {"ttft_ms,speed": 1500.0, key: 189.0}
    results = {"results": {"quiz": task, "all": group}, "groups": {"all": dict(group)}}
    add_speed_rows(results, served(0, 0, 1, 1), {})
    assert task[key] == pytest.approx(500)
    # lm-eval pools a group's error from its tasks' documents, as if each were independent.
    assert group[key] == results["groups"]["all"][key] == "N/A"
    alone = {"results": {"quiz": dict(task), "all": {key: 7.0}}, "groups": {"all": {key: 7.0}}}
    add_speed_rows(alone, served(0, 1), {})
    assert alone["groups"]["all"][key] == 7.0


def test_documents_of_one_batch_are_one_sample_with_the_mean_kept() -> None:
    """Batch 7 holds `a` and `b`, `c` was alone: sums 6 and 9 over 3 documents, two samples."""
    samples = independent({"a": (2.0, 7.0), "c": (9.0, None), "b": (4.0, 7.0)})
    assert samples == {"a + b": 6 * 2 / 3, "c": 9 * 2 / 3}
    assert sum(samples.values()) / 2 == pytest.approx((2 + 4 + 9) / 3)
    assert independent({"a": (2.0, None)}) == {"a": 2.0} and independent({}) == {}
