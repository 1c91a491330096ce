"""A setting that did nothing on a task is said, and only then."""

from __future__ import annotations

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


def test_decode_only_policies_say_which_tasks_decoded_nothing() -> None:
    (warning,) = settings_without_effect(TASKS, "decode", "parallel")
    assert "phases=decode" in warning
    assert "arc, mmlu" in warning
    assert "gsm8k" not in warning


def test_scan_says_which_tasks_scored_no_text() -> None:
    (warning,) = settings_without_effect(TASKS, "all", "scan")
    assert "scoring=scan" in warning
    assert "gsm8k" in warning
    assert "mmlu" not in warning


def test_a_seed_that_nothing_draws_from_is_said() -> None:
    (warning,) = settings_without_effect(TASKS, "all", "parallel", idle_seed=3)
    assert "seed=3" in warning


def test_a_cutoff_of_no_layer_is_said() -> None:
    (warning,) = settings_without_effect(TASKS, "all", "parallel", idle_cutoff=True)
    assert "prefetch.cutoff=auto" in warning


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
