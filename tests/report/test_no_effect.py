"""A setting that did nothing on a task is said, and only then."""

from __future__ import annotations

from typing import Any

import pytest

from lm_eval_moecache.records.event import DECODE, PREFILL
from lm_eval_moecache.records.ledger import Ledger, RequestRecord
from lm_eval_moecache.report.no_effect import settings_without_effect


def served(kind: str, *phases: str) -> list[RequestRecord]:
    ledger = Ledger()
    request = ledger.new_request("any", kind)
    ledger.serve([request])
    for phase in phases:
        ledger.begin_pass(phase, 1, 0.0)
    return [request]


TASKS = {
    "mmlu": served("loglikelihood", PREFILL),
    "gsm8k": served("generate_until", PREFILL, DECODE),
    "arc": served("loglikelihood", PREFILL, PREFILL),
}


@pytest.mark.parametrize(
    ("phases", "scoring", "idle", "said", "unsaid"),
    [
        ("decode", "parallel", {}, ("phases=decode", "arc, mmlu"), "gsm8k"),
        ("all", "scan", {}, ("scoring=scan", "gsm8k"), "mmlu"),
        ("all", "parallel", {"idle_seed": 3}, ("seed=3",), "scan"),
        ("all", "parallel", {"idle_levels": ("int8", "int4")}, ("precision=int8:int4",), "scan"),
        ("all", "parallel", {"idle_cutoff": True}, ("prefetch.cutoff=auto",), "scan"),
        ("all", "parallel", {"idle_link": True}, ("link=fifo",), "scan"),
    ],
)
def test_what_did_nothing_is_said_with_its_tasks(
    phases: str, scoring: str, idle: dict[str, Any], said: tuple[str, ...], unsaid: str
) -> None:
    (warning,) = settings_without_effect(TASKS, phases, scoring, **idle)
    assert all(text in warning for text in said)
    assert unsaid not in warning


@pytest.mark.parametrize(
    ("tasks", "phases", "scoring"),
    [
        (TASKS, "all", "parallel"),
        ({"gsm8k": TASKS["gsm8k"]}, "decode", "parallel"),
        # scan reads a text as if it were decoded.
        ({"text": served("loglikelihood_rolling", DECODE, DECODE)}, "decode", "scan"),
        ({}, "decode", "scan"),
    ],
)
def test_settings_that_did_something_are_not_warned_of(
    tasks: dict[str, list[RequestRecord]], phases: str, scoring: str
) -> None:
    assert settings_without_effect(tasks, phases, scoring) == []
