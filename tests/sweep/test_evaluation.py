"""What a record keeps of lm-eval's results."""

from __future__ import annotations

from typing import Any

import pytest

from lm_eval_moecache.sweep import evaluation
from lm_eval_moecache.sweep.spec import Cell

FOLLOWS_FROM_THE_CONFIGURATION = {
    "model_num_parameters": 7,
    "model_dtype": "torch.bfloat16",
    "model_revision": "main",
    "model_sha": "abc",
    "limit": 2.0,
    "bootstrap_iters": 1000,
    "gen_kwargs": {"temperature": 0.5},
    "random_seed": 1,
    "numpy_seed": 2,
    "torch_seed": 3,
    "fewshot_seed": 4,
    "moecache": {"capacity": "25%"},
}
OF_THE_MACHINE = {"model": "x", "batch_size": 1, "batch_sizes": [], "device": None}


def test_a_record_keeps_what_a_rerun_reproduces(monkeypatch: pytest.MonkeyPatch) -> None:
    of_tasks = {
        "results": {"quiz": {"acc,none": 0.5}},
        "groups": {"all": {"acc,none": 0.5}},
        "group_subtasks": {"all": ["quiz"]},
        "versions": {"quiz": 1},
        "n-shot": {"quiz": 3},
        "higher_is_better": {"quiz": {"acc": True}},
        "n-samples": {"quiz": {"original": 9, "effective": 2}},
    }
    config = {**FOLLOWS_FROM_THE_CONFIGURATION, **OF_THE_MACHINE}
    asked: dict[str, Any] = {}

    def simple_evaluate(**arguments: Any) -> dict[str, Any]:
        asked.update(arguments)
        return {**of_tasks, "config": config, "samples": {}, "date": 1.0, "git_hash": "x"}

    monkeypatch.setattr(evaluation.lm_eval.evaluator, "simple_evaluate", simple_evaluate)
    options = {"limit": 2, "num_fewshot": 3, "gen_kwargs": "temperature=0.5"}
    settings = {"capacity": "25%"}
    cell = Cell(model="moecache", model_args=settings, tasks=("tiny_mmlu",), options=options)
    record = evaluation.evaluate(cell, object())
    assert record == {**of_tasks, "config": FOLLOWS_FROM_THE_CONFIGURATION, "scores": {}}
    assert {name: asked[name] for name in options} == options
    assert (asked["tasks"], asked["model_args"]) == (["tiny_mmlu"], {"capacity": "25%"})
