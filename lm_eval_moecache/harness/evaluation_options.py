"""What lm-eval is asked for beside the model's arguments, and whole command lines of it.

A command line is checked before torch is imported (`check_command`); who calls `simple_evaluate`
from Python learns of a generation option or a store of outputs at the first request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lm_eval_moecache.harness.arguments import (
    ArgumentsError,
    as_arguments_error,
    ending_lm_eval_in_one_line,
    host_keys,
    is_lm_eval_command,
    read_config,
    split_arguments,
)
from lm_eval_moecache.harness.plugin import MODELS, SPECULATIVE
from lm_eval_moecache.records.files import TINY, check_writable, read_yaml
from lm_eval_moecache.records.numbers import check_typed, shown
from lm_eval_moecache.records.schemas import check
from lm_eval_moecache.records.schemas.inputs import Options

# Of transformers' generation: what makes a draft, or changes the one that was asked for.
_DRAFTING = (
    *("assistant_model", "assistant_tokenizer", "assistant_early_exit", "custom_generate"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind"),
)
_GREEDY: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (None, False),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "temperature": (None, 0, 0.0),
    "top_p": (None, 0, 1),
    "top_k": (None, 0, 1, 50),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "penalty_alpha": (None, 0),
}
"""What each sampling option may be where decoding is greedy; 50 is transformers' own default."""


def check_command(words: Sequence[str]) -> None:
    """Refuse what the words after `lm_eval` ask of our models in vain. Imports no torch.

    Everything is checked that can be without the model: keys and values of `--model_args`, the
    policy, the options of the evaluation, the place of the results. Raises ArgumentsError.
    """
    asked = options_of(words)
    if asked.get("model") not in MODELS:
        return
    with as_arguments_error(None):
        for word in words:
            check_typed("" if word.startswith("-") else word)
    speculative = asked["model"] == SPECULATIVE
    given = asked.get("model_args") or {}
    with as_arguments_error(given.get("pretrained", TINY)):
        ours, _ = split_arguments(given, host_keys())
        # What the cache starts with is read once, with the model: a trace may be large.
        read_config({k: v for k, v in ours.items() if k != "warm"}, speculative)
    check_use_cache(asked.get("use_cache"))
    options = {key: asked[key] for key in Options.model_fields if asked.get(key) is not None}
    with as_arguments_error(None):
        check(Options, options, "evaluation options")
    if isinstance(asked.get("gen_kwargs"), Mapping):
        check_generation(asked["gen_kwargs"], speculative)
    output = str(asked.get("output_path") or "")
    path = Path(output)
    try:
        if output:
            check_writable(path.parent if path.suffix == ".json" else path)
    except OSError as error:
        raise ArgumentsError(
            f"--output_path={output!r} cannot be written: {error.strerror}. Allowed: a folder that "
            "can be made, or a .json file in one."
        ) from None


def check_lm_eval_command(words: Sequence[str]) -> None:
    """Refuse a command line of `lm_eval` that our models cannot run, before torch is imported.

    lm-eval lists its tasks and imports torch before it asks for a model, which takes it ten seconds
    and more: a misspelt key is told before. Ends the process in one line.
    """
    if is_lm_eval_command():
        with ending_lm_eval_in_one_line():
            check_command(words)


def check_use_cache(asked: Any) -> None:
    """Refuse lm-eval's store of outputs. Raises ArgumentsError."""
    if asked is not None:
        raise ArgumentsError(
            f"--use_cache={shown(asked)}: stored outputs come without the passes that made them, "
            "so speed could not be measured. Leave --use_cache out with --model moecache."
        )


def check_generation(given: Mapping[str, Any], speculative: bool) -> None:
    """Refuse options that make another draft than `draft=`, and sampling where drafts are verified.

    Raises ArgumentsError naming the option.
    """
    for key in _DRAFTING:
        if given.get(key) is not None:
            raise ArgumentsError(
                f"gen_kwargs: {key}={shown(given[key])} would change what drafts. Allowed: "
                "--model moecache-spec with draft and draft_tokens."
            )
    if not speculative:
        return
    for key, allowed in _GREEDY.items():
        if key in given and given[key] not in allowed:
            raise ArgumentsError(
                f"gen_kwargs: {key}={shown(given[key])} with --model moecache-spec, which accepts "
                "drafts greedily. Allowed: do_sample=False, num_beams=1, temperature=0; or --model "
                "moecache."
            )


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of `lm_eval run`, those of its --config file below; empty for others.

    lm-eval's own parser reads them, and what it cannot read ends the process as it would later.
    """
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import simple_parse_args_string

    command = HarnessCLI()
    if words and words[0] not in command._subparsers.choices:
        words = ["run", *words]
    found = vars(command._parser.parse_args(list(words)))
    if found.get("command") != "run":
        return {}
    asked: dict[str, Any] = {}
    if found.get("config"):
        # What is wrong with the file, lm-eval will say.
        with suppress(ValueError, TypeError, OSError):
            asked = dict(read_yaml(Path(found["config"]), found["config"]))
    asked = {key: value for key, value in asked.items() if value is not None}
    asked |= {key: value for key, value in found.items() if value or value == 0}
    for key in ("model_args", "gen_kwargs"):
        if isinstance(asked.get(key), str):
            asked[key] = simple_parse_args_string(asked[key])
    limit = asked.get("limit")
    if isinstance(limit, float) and limit.is_integer():
        asked["limit"] = int(limit)
    return asked
