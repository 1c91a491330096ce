"""Shared by the actions that read text: their options and checks, and the text.

The text is files and tasks' documents outside their test split, or prompts for a model to continue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_moecache.harness.arguments import as_arguments_error
from lm_eval_moecache.records.command import Options
from lm_eval_moecache.records.files import TINY, lines_of, parse_json, read_text
from lm_eval_moecache.records.numbers import listed_names
from lm_eval_moecache.records.ranges import Count, Positive, Whole

if TYPE_CHECKING:
    from lm_eval_moecache.model.reading import ReadingModel

# --- options ---

_SOURCE: Options = {
    "pretrained": (str, TINY, "tiny, a folder or a hub id"),
    "trust_remote_code": (bool | None, None, "run the model's own modelling code: true"),
    "tasks": (str | None, None, "tasks whose training documents are used: a,b,c"),
    "data": (str | None, None, "plain text files, a.txt,b.txt; of prompts also .jsonl"),
    "include_path": (str | None, None, "folder with more tasks"),
    "limit": (Count, 200, "documents of each task"),
}
TEXT: Options = {**_SOURCE, "max_tokens": (Count, 20_000, "how much text to read")}
"""Options of an action that reads text verbatim."""
TRAINING: Options = {
    **_SOURCE,
    "tokens": (Count, 20, "generated tokens of each prompt"),
    "prompts_per_batch": (Count, 64, "generated together"),
    "learning_rate": (Positive, 1e-3, "of Adam at the start"),
    "batch_size": (Count, 32, "tokens, or texts, of a training step"),
    "max_epochs": (Count, 30, "most epochs"),
    "seed": (Whole, 42, "of the 80/20 split and the training"),
}
"""Options of an action that trains on what a model generates from prompts."""
Given = Mapping[str, Any]


def check_out(out: str) -> None:
    """Refuse an artifact's file name that does not end in .safetensors."""
    if Path(out).suffix != ".safetensors":
        raise ValueError(f"out={out!r} must end in .safetensors.")


def check_training(given: Given) -> None:
    """Refuse options that no training from prompts can use."""
    check_out(given["out"])
    if not (given["tasks"] or given["data"]) and given["pretrained"] != TINY:
        raise ValueError(
            "tasks, data: give --tasks, --data or both: only tiny has its own prompts."
        )


# --- text ---


@dataclass(frozen=True, slots=True)
class Example:
    """One document as lm-eval prompts it, and its answer with the delimiter before it."""

    prompt: str
    answer: str


def task_examples(
    tasks: Sequence[str], limit: int, include_path: str | None = None
) -> list[Example]:
    """Return up to `limit` training documents of each task (a group stands for its tasks).

    Where a task has none, its validation documents are taken, unless they are what lm-eval tests
    on. Raises ValueError for an unknown task, and for one that has test documents only.
    """
    from lm_eval_moecache.sweep.evaluation import leaf_tasks

    folders = (include_path,) if include_path else ()
    examples = []
    for name, task in sorted(leaf_tasks(tasks, folders).items()):
        if task.has_training_docs():
            documents = task.training_docs()
        elif task.has_validation_docs() and task.has_test_docs():
            documents = task.validation_docs()
        else:
            raise ValueError(
                f"tasks={name!r} has no documents but those it is tested on; what is learned "
                "from them would be tested on them. Allowed: a task with a training split, or "
                "--data TEXT.txt."
            )
        examples += [_example(task, document) for document in islice(documents, limit)]
    return examples


def _example(task: Any, doc: Any) -> Example:
    prompt, target = task.doc_to_text(doc), task.doc_to_target(doc)
    if task.config.doc_to_choice is not None:
        choices = task.doc_to_choice(doc)
        if isinstance(prompt, int):
            # A task with several prompts and one continuation (winogrande).
            return Example(choices[prompt], task.config.target_delimiter + str(target))
        target = choices[target] if isinstance(target, int) else target
    target = target[0] if isinstance(target, list) else target
    return Example(str(prompt), f"{task.config.target_delimiter}{target}")


def analyzed_texts(given: Given) -> tuple[ReadingModel, dict[str, Any]]:
    """Return the model with its texts, and the record of their source."""
    tasks, files = listed_names(given["tasks"]), listed_names(given["data"])
    if not (tasks or files):
        raise ValueError("tasks, data: give --tasks, --data or both: a profile needs text.")
    examples = task_examples(tasks, given["limit"], given["include_path"]) if tasks else []
    texts = [example.prompt + example.answer for example in examples]
    texts += [read_text(name, f"data={name!r}") for name in files]
    names = [Path(name).name for name in files]
    # Imported late: it brings torch, and a wrong option should not wait for it.
    from lm_eval_moecache.model.reading import ReadingModel

    model, trusted = given["pretrained"], bool(given["trust_remote_code"])
    with as_arguments_error(model):
        reading = ReadingModel(model, texts, given["max_tokens"], trust_remote_code=trusted)
    return reading, {"tasks": tasks, "data": names, "documents": len(examples)}


def collect_prompts(given: Given) -> tuple[list[str], dict[str, Any]]:
    """Return the prompts, each once, and the record of their source."""
    tasks, files = listed_names(given["tasks"]), listed_names(given["data"])
    prompts: list[str] = []
    if tasks:
        examples = task_examples(tasks, given["limit"], given["include_path"])
        prompts += [example.prompt for example in examples]
    for name in files:
        prompts += read_prompts(name)
    if not (tasks or files):
        from lm_eval_moecache.tiny.documents import training_prompts

        prompts = training_prompts(given["limit"])
    prompts = [prompt for prompt in dict.fromkeys(prompts) if prompt.strip()]
    if len(prompts) < 2:
        raise ValueError(f"tasks, data: {len(prompts)} prompts, but training needs 2 or more.")
    names = [Path(name).name for name in files]
    return prompts, {"tasks": tasks, "data": names, "limit": given["limit"]}


def read_prompts(path: str) -> list[str]:
    """Return a prompt per line; a line of a `.jsonl` is a string, or has one under `prompt`."""
    if Path(path).suffix == ".jsonl":
        return texts_in(path, "data", ("prompt",))
    return lines_of(read_text(path, f"data={path!r}"))


def texts_in(path: str, key: str, fields: Sequence[str]) -> list[str]:
    """Return the text of each line of a `.jsonl`: a string, or what stands under one of `fields`.

    ValueError for a line without one begins with `key`, the file and the line.
    """
    texts = []
    for number, line in enumerate(lines_of(read_text(path, f"{key}={path!r}")), start=1):
        label = f"{key}={path!r}: line {number}"
        entry = parse_json(line, label)
        found = [entry[field] for field in fields if isinstance(entry, dict) and field in entry]
        text = entry if isinstance(entry, str) else next(iter(found), None)
        if not isinstance(text, str):
            names = " or ".join(f"`{field}`" for field in fields)
            raise ValueError(f"{label} must be a string or have one under {names}.")
        texts.append(text)
    return texts
