"""What becomes of each generation option, of `gen_kwargs` or of a checkpoint's own defaults.

`OPTIONS` is the one list. A test compares it with the fields of transformers' GenerationConfig; one
that a later transformers adds is followed by transformers' own loop. No torch here: command lines
are checked before it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from lm_eval_moecache.harness.arguments import as_arguments_error
from lm_eval_moecache.records.errors import ArgumentsError
from lm_eval_moecache.records.numbers import read_count, read_number, shown, unknown_name_error

TOGETHER, ALONE = "together", "alone"


class Option(NamedTuple):
    """What becomes of one option."""

    way: str
    """`TOGETHER`: rows of a batch follow it, or it changes no answer. `ALONE`: it looks at a row's
    earlier tokens or length, where padding would count, or is another search: transformers' own
    loop follows it, one request at a time. Otherwise why it is refused."""
    off: tuple[Any, ...]
    """Values under which it does nothing, in addition to None."""


def _each(way: str, names: str, *off: Any) -> dict[str, Option]:
    return {name: Option(way, off) for name in names.split()}


_OWN_DRAFTS = "would change what drafts. Allowed: --model moecache-spec with draft and draft_tokens"
_OF_THE_HUB = "is a search that transformers loads from the hub, which lm-eval does not allow"
_TOKENIZER = "needs the tokenizer, which lm-eval does not hand to `generate`. For stops: until"
OPTIONS: Mapping[str, Option] = {
    **_each(TOGETHER, "do_sample temperature top_k top_p min_p top_h typical_p"),
    **_each(TOGETHER, "epsilon_cutoff eta_cutoff renormalize_logits remove_invalid_values"),
    **_each(TOGETHER, "suppress_tokens max_new_tokens prefill_chunk_size use_cache"),
    **_each(TOGETHER, "pad_token_id bos_token_id eos_token_id decoder_start_token_id"),
    **_each(TOGETHER, "early_stopping length_penalty diversity_penalty low_memory"),
    **_each(TOGETHER, "max_cache_len cache_config compile_config disable_compile"),
    **_each(TOGETHER, "output_attentions output_hidden_states output_scores output_logits"),
    **_each(TOGETHER, "num_assistant_tokens num_assistant_tokens_schedule max_matching_ngram_size"),
    **_each(TOGETHER, "assistant_confidence_threshold assistant_ensemble_weight"),
    **_each(TOGETHER, "assistant_lookbehind target_lookbehind continuous_batching_config"),
    **_each(TOGETHER, "transformers_version"),
    **_each(ALONE, "max_length bad_words_ids sequence_bias watermarking_config"),
    **_each(ALONE, "forced_bos_token_id forced_eos_token_id begin_suppress_tokens"),
    **_each(ALONE, "exponential_decay_length_penalty"),
    **_each(
        ALONE, "min_length min_new_tokens no_repeat_ngram_size encoder_no_repeat_ngram_size", 0
    ),
    **_each(ALONE, "num_beams repetition_penalty encoder_repetition_penalty", 1),
    **_each(ALONE, "cache_implementation", "dynamic", "hybrid"),
    **_each("makes answers depend on how fast this machine is", "max_time"),
    **_each(_TOKENIZER, "stop_strings"),
    **_each(_TOKENIZER, "token_healing", False),
    **_each("takes a second pass for each token, which no cache serves", "guidance_scale", 1),
    **_each(_OF_THE_HUB, "dola_layers constraints force_words_ids"),
    **_each(_OF_THE_HUB, "penalty_alpha", 0),
    **_each(_OF_THE_HUB, "num_beam_groups", 1),
    **_each("must be 1: a request has one answer", "num_return_sequences", 1),
    **_each("is not what lm-eval reads", "return_dict_in_generate is_assistant", False),
    **_each(_OWN_DRAFTS, "prompt_lookup_num_tokens assistant_early_exit speculation_type"),
    **_each(_OWN_DRAFTS, "use_mtp", False),
}
_CACHES = ("dynamic", "static", "hybrid", "sliding_window", "hybrid_chunked")
"""Values of `cache_implementation` that keep keys and values whole and on the device."""
_PASSED = ("max_length", "do_sample", "use_cache", "pad_token_id")
"""Options that lm-eval always passes, so that a checkpoint's value counts for nothing."""
_DRAFTING = (
    *("assistant_model", "assistant_tokenizer", "assistant_early_exit", "custom_generate"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind"),
)
"""What a request may not ask for, as it would make a draft or change the one asked for."""
_NOT_THE_USERS = (
    *("use_cache", "pad_token_id", "return_dict_in_generate", "output_attentions", "use_mtp"),
    *("output_hidden_states", "output_logits", "output_scores", "is_assistant", "compile_config"),
    *("transformers_version", "continuous_batching_config", "speculation_type"),
    "assistant_ensemble_weight",
)
"""Fields that lm-eval passes itself, that change what `generate` returns, or that a text cannot
give."""
_DRAFTED: Mapping[str, tuple[Any, ...]] = {
    **{"do_sample": (False,), "num_beams": (1,), "num_return_sequences": (1,)},
    **{"temperature": (0,), "top_p": (0, 1), "top_k": (0, 1, 50), "min_p": (0,)},
    **{"typical_p": (1,), "cache_implementation": OPTIONS["cache_implementation"].off},
    "prefill_chunk_size": (),
}
"""Option -> its values, beside None, with which drafts can be verified; 50 is transformers' own."""
_OF_A_CHECKPOINT = ("num_beams", "cache_implementation", "prefill_chunk_size")
"""Those of them that count where they stand in a checkpoint: its sampling is off."""
_MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""lm-eval's names for the most tokens to generate."""
_COUNTS: Mapping[str, int] = {
    **dict.fromkeys((*_MOST_TOKENS, "max_length", "num_beams", "prefill_chunk_size"), 1),
    **dict.fromkeys(("top_k", "min_length", "min_new_tokens", "no_repeat_ngram_size"), 0),
}
"""Option -> the least whole number that generates anything."""
_FIGURES: Mapping[str, Mapping[str, float]] = {
    "temperature": {"least": 0},
    **{key: {"least": 0, "most": 1} for key in ("top_p", "min_p", "typical_p", "top_h")},
    **{key: {"above": 0} for key in ("repetition_penalty", "encoder_repetition_penalty")},
    "length_penalty": {},
}


@cache
def fields() -> frozenset[str]:
    """Return the names of transformers' generation options. Imports transformers, not torch."""
    from transformers.generation.configuration_utils import GenerationConfig

    return frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))


def stands_alone(asked: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether requests with these options are computed one at a time, by transformers' own loop.

    `own` are the checkpoint's defaults.
    """
    return any(
        option.way == ALONE and value not in option.off
        for _, option, value in _given(asked, own).values()
    )


def _given(asked: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, tuple[str, Option, Any]]:
    """Return option -> (where it stands, what becomes of it, its value), of those that are set."""
    places = dict.fromkeys(set(own) - {*_PASSED, *asked}, "generation_config.json")
    places |= dict.fromkeys(asked, "gen_kwargs")
    values = {**own, **asked}
    # A field that is new in transformers is left to transformers.
    return {
        name: (place, OPTIONS.get(name, Option(ALONE, ())), values[name])
        for name, place in sorted(places.items())
        if values[name] is not None and name in fields()
    }


def check_generation(
    gen_kwargs: Mapping[str, Any] | str, speculative: bool, own: Mapping[str, Any] | None = None
) -> None:
    """Refuse options that `generate` does not know or cannot follow, and those that change drafts.

    The latter draft in another way than `draft=`, or sample with drafts, which are verified
    greedily. A text is read as lm-eval reads it. Raises ArgumentsError naming the option.

    Args:
        gen_kwargs: What a request asks for.
        speculative: Whether a draft model drafts (`moecache-spec`).
        own: The checkpoint's defaults, once the model is loaded.
    """
    if isinstance(gen_kwargs, str):
        from lm_eval.utils import simple_parse_args_string

        gen_kwargs = dict[str, Any](simple_parse_args_string(gen_kwargs))
    for key in _DRAFTING:
        if gen_kwargs.get(key) is not None:
            raise ArgumentsError(f"gen_kwargs: {key}={shown(gen_kwargs[key])} {_OWN_DRAFTS}.")
    with as_arguments_error(None):
        for key, value in gen_kwargs.items():
            _check_value(key, value)
        for key, (place, option, value) in _given(gen_kwargs, own or {}).items():
            _check_followed(key, value, place, option)
    for key, allowed in _DRAFTED.items() if speculative else ():
        is_own = key in _OF_A_CHECKPOINT and key not in gen_kwargs
        value = (own or {}).get(key) if is_own else gen_kwargs.get(key)
        if value not in (None, *allowed):
            place = "generation_config.json" if is_own else "gen_kwargs"
            raise ArgumentsError(
                f"{place}: {key}={shown(value)} with --model moecache-spec, which reads a prompt "
                "in one pass and accepts drafts greedily. Allowed: do_sample=False, num_beams=1, "
                "temperature=0, no prefill_chunk_size; or --model moecache."
            )


def _check_value(key: str, value: Any) -> None:
    """Raise ValueError for an unknown option, or a value that no generation can have."""
    what, known = f"gen_kwargs: {key}", {*fields(), *_MOST_TOKENS, "until"}
    if key not in known - {*_DRAFTING, *_NOT_THE_USERS}:
        allowed = [name for name in known if name not in OPTIONS or _is_followed(name)]
        raise unknown_name_error("gen_kwargs: the key", key, allowed)
    if value is None:
        return
    if key == "until":
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{what}={shown(value)} must be a text or a list of texts.")
    elif key == "do_sample" and not isinstance(value, bool):
        raise ValueError(f"{what}={shown(value)} must be true or false.")
    elif key in _COUNTS or key in _FIGURES:
        if isinstance(value, str):
            raise ValueError(f"{what}={shown(value)} must be a number, and is text.")
        if key in _COUNTS:
            read_count(what, value, least=_COUNTS[key])
        else:
            read_number(what, value, **_FIGURES[key])


def _is_followed(name: str) -> bool:
    """Whether a request may ask for this option."""
    followed = OPTIONS[name].way in (TOGETHER, ALONE)
    return followed and name not in (*_DRAFTING, *_NOT_THE_USERS)


def _check_followed(key: str, value: Any, place: str, option: Option) -> None:
    """Raise ValueError for an option that cannot be followed, wherever it stands."""
    if key == "cache_implementation" and value not in _CACHES:
        raise ValueError(
            f"{place}: {key}={shown(value)} moves or rounds keys and values, which no clock "
            f"charges. Allowed: {', '.join(_CACHES)}."
        )
    if option.way not in (TOGETHER, ALONE) and value not in option.off:
        allowed = " or ".join(["none", *map(repr, option.off)])
        raise ValueError(f"{place}: {key}={shown(value)} {option.way}. Allowed here: {allowed}.")
