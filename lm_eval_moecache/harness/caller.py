"""What lm-eval was asked beside the model's arguments, checked before the model is loaded.

lm-eval tells a model neither where the results go nor how to generate until it is loaded: both are
read from the frame of `simple_evaluate`, if that is what makes the model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from lm_eval_moecache.harness.refusal import ArgumentsError
from lm_eval_moecache.records.files import check_writable
from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.records.schemas.base import check
from lm_eval_moecache.records.schemas.sweep import Options

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


def check_caller(speculative: bool) -> None:
    """Refuse what the run would fail on after loading: see the checks for which options.

    Or would not fail on: lm-eval runs all documents with `num_fewshot=-1`.
    """
    asked = _asked()
    check_use_cache(asked.get("use_cache"))
    given = {key: asked[key] for key in Options.model_fields if asked.get(key) is not None}
    try:
        check(Options, given, "evaluation options")
    except ValueError as error:
        raise ArgumentsError(str(error)) from None
    generation = asked.get("gen_kwargs")
    if isinstance(generation, Mapping):
        check_generation(generation, speculative)
    path = getattr(asked.get("evaluation_tracker"), "output_path", None)
    if path:
        _check_output(str(path))


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


def _asked() -> Mapping[str, Any]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        is_lm_eval = frame.f_globals.get("__name__") == "lm_eval.evaluator"
        if is_lm_eval and frame.f_code.co_name == "simple_evaluate":
            return frame.f_locals
        frame = frame.f_back
    return {}


def _check_output(output: str) -> None:
    """Refuse a place where lm-eval could not write its results; nothing is made there yet."""
    path = Path(output)
    try:
        check_writable(path.parent if path.suffix == ".json" else path)
    except OSError as error:
        raise ArgumentsError(
            f"--output_path={output!r} cannot be written: {error.strerror}. Allowed: a folder that "
            "can be made, or a .json file in one."
        ) from None
