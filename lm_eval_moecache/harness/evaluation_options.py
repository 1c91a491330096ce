"""Checks of lm-eval's options together with the model's arguments, and of its whole command lines.

A command line is checked before torch is imported (`check_command`); from Python, where
`simple_evaluate` is called, generation options and a store of outputs are checked at the first
request.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from lm_eval_moecache.harness.arguments import (
    as_arguments_error,
    exit_with_message,
    hflm_keys,
    is_lm_eval_command,
    read_config,
    split_arguments,
)
from lm_eval_moecache.harness.generation import check_generation
from lm_eval_moecache.harness.plugin import MODELS, SPECULATIVE
from lm_eval_moecache.harness.saving import Unsaved, check_output
from lm_eval_moecache.harness.task_names import check_known
from lm_eval_moecache.records.errors import ArgumentsError
from lm_eval_moecache.records.files import TINY, check_include_path, read_yaml
from lm_eval_moecache.records.numbers import (
    check_typed,
    listed_names,
    plain_number,
    read_count,
    shown,
)
from lm_eval_moecache.records.schemas import Schema, check

_LOGGERS = {"wandb_args": "wandb", "trackio_args": "trackio"}
"""lm-eval's option -> the package that it needs, whose absence lm-eval does not say."""
_MOST_FEWSHOT = 1000


def _limit(value: object) -> object:
    limit = plain_number(value)
    if isinstance(value, str) or limit is None or limit <= 0 or (limit > 1 and limit % 1):
        raise ValueError("must be a whole number of documents above 0, or a share below 1")
    return value if limit < 1 else read_count("limit", limit)


def _gen_kwargs(value: object) -> object:
    is_text = isinstance(value, str) and all("=" in item for item in value.split(","))
    is_mapping = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if not is_text and not is_mapping:
        raise ValueError("must be a mapping of generation arguments, or text like 'temperature=0'")
    return value


Limit = Annotated[Any, BeforeValidator(_limit)]
Fewshot = Annotated[int, Field(ge=0, le=_MOST_FEWSHOT)]


class Options(Schema):
    """The options of a cell that go to lm-eval's `simple_evaluate`."""

    limit: Limit = None
    num_fewshot: Fewshot | None = None
    gen_kwargs: Annotated[Any, BeforeValidator(_gen_kwargs)] = None
    apply_chat_template: bool | str | None = None
    system_instruction: str | None = None


def check_limit(limit: object, what: str) -> None:
    """Raise ValueError if `--limit` is given but is not a number or share of documents."""
    if limit is not None:
        check(Options, {"limit": limit}, what)


def check_command(words: Sequence[str]) -> dict[str, Any]:
    """Check the words after `lm_eval` where they name our models; return its options.

    Covers all that needs no model: keys and values of `--model_args`, the policy, the options of
    the evaluation, the output path. Imports no torch. Raises ArgumentsError.
    """
    evaluation = options_of(words)
    if evaluation.get("model") not in MODELS:
        return evaluation
    with as_arguments_error(None):
        for word in words:
            check_typed("" if word.startswith("-") else word)
    speculative = evaluation["model"] == SPECULATIVE
    model_args = evaluation.get("model_args") or {}
    with as_arguments_error(model_args.get("pretrained", TINY)):
        own_args, _ = split_arguments(model_args, hflm_keys())
        # `warm` is read once, with the model: a trace may be large.
        read_config({k: v for k, v in own_args.items() if k != "warm"}, speculative)
    check_use_cache(evaluation.get("use_cache"))
    options = {
        key: evaluation[key] for key in Options.model_fields if evaluation.get(key) is not None
    }
    with as_arguments_error(None):
        check(Options, options, "evaluation options")
        folders = evaluation.get("include_path", [])
        check_include_path(folders)
        check_known(evaluation.get("tasks", []), folders)
    if evaluation.get("gen_kwargs"):
        check_generation(evaluation["gen_kwargs"], speculative)
    check_output(evaluation)
    for key, package in _LOGGERS.items():
        if evaluation.get(key) and importlib.util.find_spec(package) is None:
            raise ArgumentsError(
                f"--{key} needs the package {package!r}, which is not installed. Install it with "
                f"`pip install {package}`, or leave --{key} out."
            )
    return evaluation


def check_lm_eval_command(words: Sequence[str]) -> None:
    """Refuse a command line of `lm_eval` that our models cannot run, before torch is imported.

    lm-eval lists its tasks and imports torch before it makes the model, which takes ten seconds or
    more: a misspelt key is reported before that. Ends the process with a one-line message.
    """
    if is_lm_eval_command():
        with exit_with_message():
            if check_command(words).get("model") in MODELS:
                Unsaved().end_process()


def check_use_cache(use_cache: Any) -> None:
    """Raise ArgumentsError if lm-eval's store of outputs is used."""
    if use_cache is not None:
        raise ArgumentsError(
            f"--use_cache={shown(use_cache)}: stored outputs come without the passes that made "
            "them, so speed could not be measured. Leave --use_cache out with --model moecache."
        )


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of `lm_eval run`, which override those of its --config file.

    Tasks and folders of tasks are lists. Empty for other commands. lm-eval's own parser reads them,
    and ends the process on an error as it would later.
    """
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import simple_parse_args_string

    command = HarnessCLI()
    if words and words[0] not in command._subparsers.choices:
        words = ["run", *words]
    parsed = vars(command._parser.parse_args(list(words)))
    if parsed.get("command") != "run":
        return {}
    options: dict[str, Any] = {}
    if parsed.get("config"):
        # lm-eval reports a faulty file itself.
        with suppress(ValueError, TypeError, OSError):
            options = dict(read_yaml(Path(parsed["config"]), parsed["config"]))
    options = {key: value for key, value in options.items() if value is not None}
    options |= {key: value for key, value in parsed.items() if value or value == 0}
    for key in ("model_args", "gen_kwargs"):
        if isinstance(options.get(key), str):
            options[key] = simple_parse_args_string(options[key])
    for key in {"tasks", "include_path"} & options.keys():
        given = options[key]
        split = listed_names(given) if key == "tasks" and isinstance(given, str) else given
        options[key] = [*map(str, split)] if isinstance(split, (list, tuple)) else [str(split)]
    limit = options.get("limit")
    if isinstance(limit, float) and limit.is_integer():
        options["limit"] = int(limit)
    return options
