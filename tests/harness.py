"""Harness requests of every kind, made without a task, and refusals before weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

STOP = {"until": ["\n\n"], "max_gen_toks": 6}


def make_instance(kind: str, task: str, index: int, *arguments: Any, choice: int = 0) -> Instance:
    return Instance(kind, {"id": index}, arguments, choice, (task, index, 1))


def generations(count: int = 4) -> list[Instance]:
    """Contexts of different lengths, so that batches are padded on the left."""
    texts = [f"Hello number {i} " + "x" * (3 * i) for i in range(count)]
    return [make_instance("generate_until", "gen", i, t, dict(STOP)) for i, t in enumerate(texts)]


def choices() -> list[Instance]:
    """Choices of one token, which HFLM serves by one forward, and of several."""
    return [
        make_instance("loglikelihood", "choice", i, f"Question {i * 111}:", text, choice=j)
        for i in range(2)
        for j, text in enumerate(("A", "B", " a long one"))
    ]


def texts() -> list[Instance]:
    """Texts of several windows where `max_length` is 48."""
    return [
        make_instance("loglikelihood_rolling", "text", i, "some text " * (9 + 2 * i))
        for i in range(2)
    ]


_TASKS = """
generated: |
  output_type: generate_until
  doc_to_target: "{{choices[0]}}"
  metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
  generation_kwargs: {until: [zz], max_gen_toks: 4}
  filter_list:
  - {name: strict, filter: [{function: take_first}]}
  - {name: loose, filter: [{function: lowercase}, {function: take_first}]}
chosen: |
  output_type: multiple_choice
  doc_to_choice: "{{choices}}"
  doc_to_target: gold
  metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
rolling: |
  output_type: loglikelihood_rolling
  doc_to_text: ""
  doc_to_target: "{{text}}"
  metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
"""


def small_tasks(folder: Path, groups: Mapping[str, str]) -> TaskManager:
    """Return three tasks on four local documents of growing length, and `groups`."""
    data, source = folder / "docs.jsonl", {"dataset_path": "json", "test_split": "test"}
    docs = [
        {"text": f"page {i} " * (i + 1), "choices": ["yes", "no"], "gold": i % 2} for i in range(4)
    ]
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    source |= {"dataset_kwargs": {"data_files": {"test": str(data)}}, "num_fewshot": 0}
    for name, text in yaml.safe_load(_TASKS).items():
        task = {"task": name, **source, "doc_to_text": "{{text}}", **yaml.safe_load(text)}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    for name, text in groups.items():
        (folder / f"{name}.yaml").write_text(text)
    return TaskManager(include_path=str(folder), include_defaults=False)


def answers(lm: Any) -> tuple[list[str], list[tuple[float, bool]], list[float]]:
    """Return a model's answers to requests of every kind."""
    return (
        lm.generate_until(generations(), disable_tqdm=True),
        lm.loglikelihood(choices(), disable_tqdm=True),
        lm.loglikelihood_rolling(texts(), disable_tqdm=True),
    )


@contextmanager
def unloaded() -> Iterator[None]:
    """Fail the test if the model's or its draft's weights are loaded."""
    from lm_eval.models.huggingface import HFLM

    from lm_eval_moecache.harness import lm

    def loaded(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("the weights were loaded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFLM, "_create_model", loaded)
        patch.setattr(lm, "make_draft", loaded)
        yield


def refusal(kind: Any = None, **arguments: Any) -> str:
    """Return the message of the ValueError that a model's arguments raise before it is loaded."""
    from lm_eval_moecache.harness.lm import MoECacheLM

    with unloaded(), pytest.raises(ValueError) as caught:
        (kind or MoECacheLM)(device="cpu", **arguments)
    return str(caught.value)


def assert_loads(kind: Any = None, **arguments: Any) -> None:
    """Check that a model's arguments are accepted: it begins to load its weights."""
    with pytest.raises(AssertionError, match="the weights were loaded"):
        refusal(kind, **arguments)


def says(message: str, *parts: str) -> None:
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
