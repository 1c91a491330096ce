"""The text that an artifact is made from: files, and tasks' documents outside their test split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lm_eval_moecache.records.errors import nearest
from lm_eval_moecache.records.files import read_text
from lm_eval_moecache.records.paths import TINY, task_configs_dir


@dataclass(frozen=True, slots=True)
class Example:
    """One document as lm-eval prompts it, and its answer with the delimiter before it."""

    task: str
    prompt: str
    answer: str

    @property
    def text(self) -> str:
        return self.prompt + self.answer


def task_examples(
    tasks: Sequence[str], limit: int, include_path: str | None = None
) -> list[Example]:
    """Return up to `limit` training documents of each task (a group stands for its tasks).

    Where a task has none, its validation documents are taken, unless they are what lm-eval tests
    on. Raises ValueError for an unknown task, and for one that has test documents only.
    """
    from lm_eval.tasks import TaskManager

    folders = [str(task_configs_dir()), *([include_path] if include_path else [])]
    # Indexing lm-eval's own 10,000 tasks takes seconds: only where they are needed.
    manager = TaskManager(include_path=folders, include_defaults=False)
    if not all(name in manager.task_index for name in tasks):
        manager = TaskManager(include_path=folders)
    for name in tasks:
        if name not in manager.task_index:
            raise ValueError(
                f"tasks={name!r} is not known.{nearest(name, manager.task_index)} Allowed: the "
                "tasks and groups of include_path, of this package, and of `lm_eval ls tasks`."
            )
    loaded = manager.load(list(tasks))["tasks"]
    return [
        _example(name, task, doc)
        for name, task in sorted(loaded.items())
        for doc in islice(_documents(name, task), limit)
    ]


def read_file(key: str, path: str) -> str:
    return read_text(path, f"{key}={path!r}")


def _documents(name: str, task: Any) -> Any:
    if task.has_training_docs():
        return task.training_docs()
    if task.has_validation_docs() and task.has_test_docs():
        return task.validation_docs()
    raise ValueError(
        f"tasks={name!r} has no documents beside those it is tested on; what is learned from them "
        "would be tested on them. Allowed: a task with a training split, or --data TEXT.txt."
    )


def _example(name: str, task: Any, doc: Any) -> Example:
    prompt, target = task.doc_to_text(doc), task.doc_to_target(doc)
    if task.config.doc_to_choice is not None:
        choices = task.doc_to_choice(doc)
        if isinstance(prompt, int):
            # A task with several prompts and one continuation (winogrande).
            return Example(name, choices[prompt], task.config.target_delimiter + str(target))
        if isinstance(target, int):
            target = choices[target]
    if isinstance(target, list):
        target = target[0]
    return Example(name, str(prompt), f"{task.config.target_delimiter}{target}")


def check_prompt_options(arguments: Namespace, counts: Sequence[str]) -> None:
    """Refuse options that no training from prompts can use; `counts` must be 1 or more."""
    if Path(arguments.out).suffix != ".safetensors":
        raise ValueError(f"out={arguments.out!r} must end in .safetensors.")
    for name in counts:
        if getattr(arguments, name) < 1:
            raise ValueError(f"{name}={getattr(arguments, name)} must be 1 or more.")
    if arguments.seed < 0:
        raise ValueError(f"seed={arguments.seed} must be 0 or more.")
    if not arguments.learning_rate > 0:
        raise ValueError(f"learning_rate={arguments.learning_rate} must be above 0.")
    if not (arguments.tasks or arguments.data) and arguments.pretrained != TINY:
        raise ValueError(
            "tasks, data: give --tasks, --data or both: only tiny has its own prompts."
        )


def collect_prompts(arguments: Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return the prompts, each once, and what to write down of where they come from."""
    tasks = [name for name in (arguments.tasks or "").split(",") if name]
    files = [name for name in (arguments.data or "").split(",") if name]
    prompts: list[str] = []
    if tasks:
        examples = task_examples(tasks, arguments.limit, arguments.include_path)
        prompts += [example.prompt for example in examples]
    for name in files:
        prompts += _read_prompts(name)
    if not (tasks or files):
        from lm_eval_moecache.tiny.prompts import training_prompts

        prompts = training_prompts(arguments.limit, arguments.seed)
    prompts = [prompt for prompt in dict.fromkeys(prompts) if prompt.strip()]
    if len(prompts) < 2:
        raise ValueError(f"tasks, data: {len(prompts)} prompts, but training needs 2 or more.")
    names = [Path(name).name for name in files]
    return prompts, {"tasks": tasks, "data": names, "limit": arguments.limit}


def _read_prompts(path: str) -> list[str]:
    lines = read_file("data", path).splitlines()
    if Path(path).suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"data={path!r}: line {number} is not JSON: {error}.") from error
        prompt = found.get("prompt") if isinstance(found, dict) else found
        if not isinstance(prompt, str):
            raise ValueError(
                f'data={path!r}: line {number} must be a string or {{"prompt": string, ...}}.'
            )
        prompts.append(prompt)
    return prompts
