"""Inspect's own evaluation of `moecache/tiny`, with the real package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache import MoECacheLM
from tests.harness import make_instance

inspect_ai = pytest.importorskip("inspect_ai", reason="needs the extra `inspect`")

from inspect_ai import Task, eval  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.scorer import match  # noqa: E402
from inspect_ai.solver import generate, use_tools  # noqa: E402
from inspect_ai.tool import bash  # noqa: E402

from lm_eval_moecache.harness.inspect_model import MoECacheAPI  # noqa: E402

QUESTIONS = {
    "Question: Tom has 3 apples and 4 pears. How many fruits does he have?\nAnswer:": "7",
    "Question: Mia had 12 eggs and ate 5. How many are left?\nAnswer:": "7",
    "Question: Ann buys 3 packs of 6 pens. How many pens?\nAnswer:": "18",
}
# Which requests share a batch depends on when they come, and a batch may round otherwise.
ARGUMENTS = {"policy": "specmd", "capacity": "25%", "batch_size": 1}


def run(folder: Path, solver: Any = None, arguments: Any = None, **options: Any) -> Any:
    dataset = [Sample(input=question, target=answer) for question, answer in QUESTIONS.items()]
    task = Task(
        dataset=dataset, solver=solver or generate(), scorer=match(numeric=True), name="words"
    )
    where = {"log_dir": str(folder), "display": "none"}
    (log,) = eval(task, "moecache/tiny", model_args=arguments or ARGUMENTS, **where, **options)
    return log


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("logs")
    run(folder, max_tokens=24, logprobs=True, top_logprobs=2)
    (path,) = folder.glob("*.eval")
    return inspect_ai.log.read_eval_log(str(path))


def test_inspect_gets_the_answers_speed_and_table_of_lm_evals_model(log: Any) -> None:
    lm = MoECacheLM("tiny", **ARGUMENTS)
    asked = {"until": [], "max_gen_toks": 24, "do_sample": False}
    requests = [
        make_instance("generate_until", "words", place, text, dict(asked))
        for place, text in enumerate(QUESTIONS)
    ]
    answers = lm.generate_until(requests, disable_tqdm=True)
    assert [sample.output.completion for sample in log.samples] == answers
    speeds = [sample.output.metadata["moecache"] for sample in log.samples]
    assert speeds == [request.moecache for request in requests]
    assert log.metadata["moecache"]["totals"] == lm.report()["totals"]
    assert "|words" in log.metadata["moecache_table"]
    tokens = [record.output_tokens for record in lm.evaluated()]
    assert [sample.output.usage.output_tokens for sample in log.samples] == tokens


def test_greedy_answers_have_the_likeliest_tokens(log: Any) -> None:
    for sample in log.samples:
        content = sample.output.choices[0].logprobs.content
        assert "".join(word.token for word in content) == sample.output.completion
        for word in content:
            assert word.logprob == pytest.approx(word.top_logprobs[0].logprob, abs=1e-4)
            assert len(word.top_logprobs) == 2 and word.logprob <= 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": [use_tools(bash()), generate()]}, "tools=['bash'] cannot be called"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5 is not followed"),
        ({"logprobs": True, "arguments": {"policy": "buddymoe"}}, "Allowed with it: a lossless"),
    ],
)
def test_what_cannot_be_followed_fails_by_name(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    failed = run(tmp_path, **options)
    assert failed.status == "error" and message in failed.error.message


def test_a_request_that_fails_leaves_the_others_of_its_batch_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = MoECacheAPI._serve

    def serve(api: Any, batch: list[Any]) -> None:
        if "Tom" in batch[0][0]:
            raise ValueError("no answer for Tom")
        served(api, batch)

    monkeypatch.setattr(MoECacheAPI, "_serve", serve)
    samples = run(tmp_path, max_tokens=2, fail_on_error=False).samples
    errors = [sample.error and sample.error.message for sample in samples]
    assert errors == ["ValueError('no answer for Tom')", None, None]


def test_a_misspelt_key_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("Did you mean 'policy'?")):
        run(tmp_path, arguments={"polcy": "specmd"})
