"""Shared by the actions that read text: their options and checks, and the text.

The text is files and tasks' documents outside their test split, or prompts for a model to continue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.harness.arguments import as_arguments_error
from lm_eval_moecache.records.files import TINY, lines_of, parse_json, read_text
from lm_eval_moecache.records.numbers import listed_names

if TYPE_CHECKING:
    from lm_eval_moecache.model.reading import ReadingModel

# --- options ---


def add_options(parser: ArgumentParser, *options: tuple[str, Any, str]) -> None:
    """Add options, each (name, default, help) and of its default's type (None: a text)."""
    for name, default, help_text in options:
        kind = str | None if default is None else type(default)
        parser.add_argument(f"--{name}", type=kind, default=default, help=help_text)


def add_source_options(parser: ArgumentParser, files: str, limit: int) -> None:
    """Add the options that name a model and the documents it reads, from tasks or files."""
    add_options(
        parser,
        ("pretrained", TINY, "tiny, a folder or a hub id"),
        ("trust_remote_code", False, "run the modelling code that comes with the model"),
        ("tasks", None, "tasks whose training documents are used: a,b,c"),
        ("data", None, files),
        ("include_path", None, "folder with more tasks"),
        ("limit", limit, "documents of each task"),
    )


def add_text_options(parser: ArgumentParser, limit: int = 200, max_tokens: int = 20_000) -> None:
    """Add the options of an action that reads text verbatim."""
    add_source_options(parser, "plain text files: a.txt,b.txt", limit)
    add_options(parser, ("max_tokens", max_tokens, "how much text to read"))


def add_training_options(parser: ArgumentParser, what: str, **defaults: Any) -> None:
    """Add the options of an action that trains on what a model generates from prompts."""
    parser.add_argument("--out", type=str, required=True, help=f"the {what}: NAME.safetensors")
    add_source_options(parser, "files of prompts: a.txt,b.jsonl", defaults["limit"])
    add_options(
        parser,
        ("tokens", defaults["tokens"], "generated tokens of each prompt"),
        ("prompts_per_batch", 64, "generated together"),
        ("learning_rate", defaults["learning_rate"], "of Adam at the start"),
        ("batch_size", defaults["batch_size"], "tokens, or texts, of a training step"),
        ("max_epochs", defaults["max_epochs"], "most epochs"),
        ("patience", 5, "epochs without gain until it stops"),
        ("seed", 42, "of the 80/20 split and the training"),
    )


def check_counts(arguments: Namespace, *names: str, least: int = 1) -> None:
    """Refuse options below `least`."""
    for name in names:
        if getattr(arguments, name) < least:
            raise ValueError(f"{name}={getattr(arguments, name)} must be {least} or more.")


def check_out(out: str) -> None:
    """Refuse an artifact's file name that does not end in .safetensors."""
    if Path(out).suffix != ".safetensors":
        raise ValueError(f"out={out!r} must end in .safetensors.")


def check_training(arguments: Namespace, *counts: str) -> None:
    """Refuse options that no training from prompts can use; `counts` must be 1 or more."""
    check_out(arguments.out)
    check_counts(arguments, "limit", "tokens", "prompts_per_batch", "batch_size", "max_epochs")
    check_counts(arguments, "patience", *counts)
    check_counts(arguments, "seed", least=0)
    if not arguments.learning_rate > 0:
        raise ValueError(f"learning_rate={arguments.learning_rate} must be above 0.")
    if not (arguments.tasks or arguments.data) and arguments.pretrained != TINY:
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


def analyzed_texts(arguments: Namespace) -> tuple[ReadingModel, dict[str, Any]]:
    """Return the model with its texts, and the record of their source."""
    tasks, files = listed_names(arguments.tasks), listed_names(arguments.data)
    if not (tasks or files):
        raise ValueError("tasks, data: give --tasks, --data or both: a profile needs text.")
    check_counts(arguments, "limit", "max_tokens")
    examples = task_examples(tasks, arguments.limit, arguments.include_path) if tasks else []
    texts = [example.prompt + example.answer for example in examples]
    texts += [read_text(name, f"data={name!r}") for name in files]
    names = [Path(name).name for name in files]
    # Imported late: it brings torch, and a wrong option should not wait for it.
    from lm_eval_moecache.model.reading import ReadingModel

    model, trusted = arguments.pretrained, arguments.trust_remote_code
    with as_arguments_error(model):
        reading = ReadingModel(model, texts, arguments.max_tokens, trust_remote_code=trusted)
    return reading, {"tasks": tasks, "data": names, "documents": len(examples)}


def collect_prompts(arguments: Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return the prompts, each once, and the record of their source."""
    tasks, files = listed_names(arguments.tasks), listed_names(arguments.data)
    prompts: list[str] = []
    if tasks:
        examples = task_examples(tasks, arguments.limit, arguments.include_path)
        prompts += [example.prompt for example in examples]
    for name in files:
        prompts += read_prompts(name)
    if not (tasks or files):
        from lm_eval_moecache.tiny.documents import training_prompts

        prompts = training_prompts(arguments.limit)
    prompts = [prompt for prompt in dict.fromkeys(prompts) if prompt.strip()]
    if len(prompts) < 2:
        raise ValueError(f"tasks, data: {len(prompts)} prompts, but training needs 2 or more.")
    names = [Path(name).name for name in files]
    return prompts, {"tasks": tasks, "data": names, "limit": arguments.limit}


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


Told = tuple[Mapping[str, Any], str]
"""What an action of `moecache profile` returns: its report, and the same in words."""
