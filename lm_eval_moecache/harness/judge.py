"""A language model as judge of free text, in addition to a task's own scores.

    - task: nq_open
      class: !function lm_eval_moecache.harness.judge.JudgedTask

adds `judged` (the share of documents whose answer the judge calls correct, of those whose verdict
could be read), `judge_unread` (the share whose verdict could not, or for which the judge gave no
answer) and, where the task has
an exact match, `judge_agreement` (how often the two agree). SpecMD section 5.1 has GPT-5 judge
TruthfulQA and NaturalQuestions. The command line names the judge:

    --metadata '{"judge_url": "http://localhost:8000/v1", "judge_model": "gpt-oss-120b"}'

It is called at any OpenAI-compatible endpoint, with the key of OPENAI_API_KEY. Verdicts are cached
in `judge_cache` (JSON lines) by a digest of judge, prompt and answer: a rerun calls no judge.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean

from lm_eval_moecache.harness.tasks import SpeedTask
from lm_eval_moecache.records.files import (
    check_writable,
    lines_of,
    read_text,
    task_configs_dir,
)
from lm_eval_moecache.records.ledger import GENERATE
from lm_eval_moecache.records.numbers import shown, unknown_name_error
from lm_eval_moecache.report.runs.run import SPEED_FILTER as SPEED

logger = logging.getLogger(__name__)
FILTER = "judge"
PROMPT_FILE = "judge_prompt.txt"
VERDICTS = {"CORRECT": 1.0, "INCORRECT": 0.0}
KEYS = ("judge_model", "judge_url", "judge_cache")
DEFAULT_CACHE = Path("~/.cache/lm-eval-moecache/verdicts.jsonl")
_EXACT = ("exact_match", "acc", "em")
_TIMEOUT_S = 120
MOST_FAILURES = 3
"""Failures in a row after which a judge is not called again."""

_SUBJECT = r"(?:it|this|that|(?:final |my |the |given )*(?:verdict|answer|judge?ment|grade))"
_VERDICT = re.compile(
    rf"\W*(?:{_SUBJECT}(?: is)?\W+)?(IN)?CORRECT(?:[^\w?]*$|\s*[.,;:!(-].*)", re.IGNORECASE
)


def read_verdict(reply: str) -> str | None:
    """Return the verdict with which a reply's first or last line begins.

    None where neither line begins with one, or the two disagree: a sentence such as "the answer is
    not correct" is no verdict, and neither is a word quoted within one.
    """
    lines = [line for line in reply.splitlines() if line.strip()]
    found = {
        f"{match[1] or ''}correct".upper()
        for line in lines[:1] + lines[-1:]
        if (match := _VERDICT.match(line.strip()))
    }
    return found.pop() if len(found) == 1 else None


class Judge:
    """Judges whether an answer is correct, and caches its verdicts on disk."""

    def __init__(self, model: str, url: str, cache: Path) -> None:
        self.name = f"{url}:{model}"
        self._model, self._url, self._cache = model, url, cache.expanduser()
        self._prompt = read_text(task_configs_dir() / PROMPT_FILE, PROMPT_FILE)
        self._known: dict[str, float] = {}
        text = read_text(self._cache, "judge_cache") if self._cache.is_file() else ""
        for line in lines_of(text):
            # A killed run may leave a torn last line: its verdict is asked for again.
            with suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                self._known[entry["key"]] = VERDICTS[entry["verdict"]]
        self._failures = 0

    def verdict(self, question: str, references: str, answer: str) -> float | None:
        """Return 1.0 for correct, 0.0 for incorrect, None for a reply that says neither clearly.

        None also where the endpoint fails, which is logged: the answers are not lost with it. Only
        clear verdicts are cached.
        """
        prompt = self._prompt.format(question=question, reference=references, answer=answer)
        key = hashlib.sha256(f"{self.name}\n{prompt}".encode()).hexdigest()
        if key not in self._known:
            verdict = self._try_endpoint(prompt)
            if verdict is None:
                return None
            self._known[key] = VERDICTS[verdict]
            self._store({"key": key, "judge": self.name, "verdict": verdict})
        return self._known[key]

    def _store(self, entry: Mapping[str, str]) -> None:
        try:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            with self._cache.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:  # a disk that has filled up since the check
            logger.warning("judge_cache: a verdict was not kept: %s", error)

    def _try_endpoint(self, prompt: str) -> str | None:
        if self._failures == MOST_FAILURES:
            return None
        try:
            verdict = self._ask_endpoint(prompt)
        except (requests.RequestException, ValueError, LookupError, TypeError) as error:
            self._failures += 1
            logger.warning("judge %s gave no answer, so a verdict is missing: %s", self.name, error)
            if self._failures == MOST_FAILURES:
                logger.warning(
                    "judge %s failed %d times in a row and is not called again: the verdicts of "
                    "the other answers are missing. A rerun judges only those.",
                    self.name,
                    MOST_FAILURES,
                )
            return None
        self._failures = 0
        return verdict

    def _ask_endpoint(self, prompt: str) -> str | None:
        key = os.environ.get("OPENAI_API_KEY")
        messages = [{"role": "user", "content": prompt}]
        reply = requests.post(
            f"{self._url.rstrip('/')}/chat/completions",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            json={"model": self._model, "messages": messages, "temperature": 0, "seed": 0},
            timeout=_TIMEOUT_S,
        )
        if reply.status_code != requests.codes.ok:
            raise ValueError(f"it answered {reply.status_code}: {reply.text[:200]}")
        text = str(reply.json()["choices"][0]["message"]["content"])
        return read_verdict(text)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer with the output of the task's first filter, in place of a response."""

    text: str
    filtered: Any


def checked_judge(settings: Mapping[str, Any]) -> Judge:
    """Return the judge that `--metadata` names.

    Raises ValueError where it can judge nothing: no address, no place for its verdicts.
    """
    name, url = str(settings["judge_model"]), settings["judge_url"]
    parts = urlsplit(url if isinstance(url, str) else "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"judge_url={shown(url)} is not an address of an endpoint. Allowed: "
            "http://HOST:PORT/v1 or https://HOST/v1."
        )
    given = str(settings.get("judge_cache", DEFAULT_CACHE))
    cache = Path(given).expanduser()
    try:
        check_writable(cache)
        if cache.is_dir():
            raise IsADirectoryError("it is a folder")
    except OSError as error:
        raise ValueError(
            f"judge_cache={given!r} cannot be written: {error.strerror or error}. Allowed: a file "
            "that can be made or appended to."
        ) from None
    return Judge(name, url, cache)


class JudgedTask(SpeedTask):
    """Any generative YAML task of lm-eval, with a judge's verdict added to its scores and speed.

    The verdicts have a filter of their own, `judge`, because the judge reads the whole answer.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        settings = {k: v for k, v in (self.config.metadata or {}).items() if k.startswith("judge_")}
        for key in settings:
            if key not in KEYS:
                raise unknown_name_error("metadata", key, KEYS)
        if self.OUTPUT_TYPE != GENERATE:
            raise ValueError(
                f"task {self.config.task!r}: output_type={self.OUTPUT_TYPE!r} gives no text to "
                "judge. Allowed with JudgedTask: generate_until."
            )
        for key in ("judge_model", "judge_url"):
            if not settings.get(key):
                raise ValueError(
                    f"task {self.config.task!r} is judged by a model, and metadata has no {key}. "
                    "Give, of any OpenAI-compatible endpoint, "
                    '--metadata \'{"judge_url": "http://HOST:PORT/v1", "judge_model": NAME}\'.'
                )
        self._judge = checked_judge(settings)
        self._agrees = False

    def apply_filters(self) -> list[Instance] | None:
        unfiltered = super().apply_filters()
        for instance in self.instances:
            name = next(name for name in instance.filtered_resps if name != SPEED)
            answer = Answer(str(instance.resps[0]), instance.filtered_resps[name])
            instance.filtered_resps[FILTER] = answer
        return unfiltered

    def process_results(self, doc: Any, results: list[Any]) -> dict[str, Any]:
        if not (results and isinstance(results[0], Answer)):
            return super().process_results(doc, results)
        answer = results[0]
        target = self.doc_to_target(doc)
        references = "; ".join(map(str, target)) if isinstance(target, list) else str(target)
        verdict = self._judge.verdict(str(self.doc_to_text(doc)), references, answer.text)
        if verdict is None:
            # Missing from the mean of `judged`, and counted.
            return {"judge_unread": 1.0}
        scores = super().process_results(doc, [answer.filtered])
        exact = next((name for name in _EXACT if name in scores), None)
        if exact is None:
            return {"judged": verdict, "judge_unread": 0.0}
        self._agrees = True
        agreement = float(verdict == float(scores[exact] > 0.5))
        return {"judged": verdict, "judge_unread": 0.0, "judge_agreement": agreement}

    def aggregation(self) -> dict[str, Any]:
        return {**super().aggregation(), **dict.fromkeys(self._own(), mean)}

    def higher_is_better(self) -> dict[str, Any]:
        own = {name: name != "judge_unread" for name in self._own()}
        return {**super().higher_is_better(), **own}

    def _own(self) -> tuple[str, ...]:
        return ("judged", "judge_unread", *(("judge_agreement",) if self._agrees else ()))
