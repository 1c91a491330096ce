"""A judge beside a task's own scores: an endpoint that speaks the protocol, and a local model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from lm_eval_moecache.harness.judge import Judge
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.records.paths import task_configs_dir


class Endpoint(BaseHTTPRequestHandler):
    """Finds an answer correct that ends in the reference's last word, as `####` answers do."""

    asked: list[dict[str, Any]]
    reply: str | None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append({"path": self.path, **body})
        prompt = body["messages"][0]["content"]
        _, _, graded = prompt.partition("Reference answers: ")
        reference, _, answer = graded.partition("\nAnswer to grade: ")
        words = answer.partition("\n\nThe answer is correct")[0].split()
        right = words[-1:] == reference.split()[-1:]
        said = "CORRECT." if right else "It is **INCORRECT**"
        reply = {"content": said if self.reply is None else self.reply}
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
    found = lm_eval.simple_evaluate(lm, tasks=["moecache_judged"], **options)
    return dict(found["results"]["tiny_gsm8k"])


def test_an_endpoint_judges_and_its_agreement_with_exact_match_is_reported(
    endpoint: tuple[str, type[Endpoint]], tmp_path: Path
) -> None:
    url, handler = endpoint
    metadata = {"judge_url": url, "judge_model": "some-model"}
    scores = run({**metadata, "judge_cache": str(tmp_path / "v.jsonl")})
    assert scores["judged,judge"] == scores["exact_match,strict-match"]
    assert scores["judge_agreement,judge"] == 1.0
    assert "request_tok_per_s,speed" in scores
    assert [(one["path"], one["model"]) for one in handler.asked] == [
        ("/v1/chat/completions", "some-model")
    ] * 3
    assert handler.asked[0]["temperature"] == 0
    # The judge reads the whole answer, not what a filter extracts from it.
    assert "####" in handler.asked[0]["messages"][0]["content"].split("Answer to grade:")[1]


def test_a_verdict_is_asked_for_once(endpoint: tuple[str, type[Endpoint]], tmp_path: Path) -> None:
    url, handler = endpoint
    cache = tmp_path / "deep" / "verdicts.jsonl"
    assert Judge("m", url, cache).verdict("2 + 3?", "5", "It is 5") == 1.0
    assert Judge("m", url, cache).verdict("2 + 3?", "5", "It is 6") == 0.0
    with cache.open("a") as file:
        file.write('{"key": "cut o')  # what a killed run leaves
    again = Judge("m", url, cache)
    assert again.verdict("2 + 3?", "5", "It is 5") == 1.0
    assert len(handler.asked) == 2
    assert Judge("other", url, cache).verdict("2 + 3?", "5", "It is 5") == 1.0
    assert len(handler.asked) == 3, "another judge has verdicts of its own"


def test_a_judge_that_says_neither_word_or_fails_is_named(
    endpoint: tuple[str, type[Endpoint]], tmp_path: Path
) -> None:
    url, handler = endpoint
    handler.reply = "Perhaps."
    with pytest.raises(ValueError, match=r"said neither CORRECT nor INCORRECT: 'Perhaps\.'"):
        Judge("m", url, tmp_path / "v").verdict("q", "r", "a")
    handler.reply = "broken"
    with pytest.raises(ValueError, match="answered 500"):
        Judge("m", url, tmp_path / "v").verdict("q", "r", "a")


def test_a_local_model_judges_without_an_endpoint(tmp_path: Path) -> None:
    judge = Judge("tiny", None, tmp_path / "v.jsonl")
    assert judge.verdict("2 + 3?", "5", "It is 5") in (0.0, 1.0)
    assert "transformers:tiny" in (tmp_path / "v.jsonl").read_text()


@pytest.mark.parametrize(
    ("metadata", "words"),
    [({}, "none is named"), ({"judge_modle": "x"}, "Did you mean 'judge_model'")],
)
def test_a_wrong_judge_is_refused_before_anything_runs(
    metadata: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        manager_of(metadata).load(["moecache_judged"])
