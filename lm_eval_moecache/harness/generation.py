"""What becomes of each generation option, of `gen_kwargs` or of a checkpoint's own defaults.

`generation.yaml` is the one list. A test compares it with the fields of transformers'
GenerationConfig; one that a later transformers adds is followed by transformers' own loop. No torch
here: command lines are checked before it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lm_eval_moecache.harness.arguments import as_arguments_error
from lm_eval_moecache.records.errors import ArgumentsError
from lm_eval_moecache.records.files import read_yaml
from lm_eval_moecache.records.numbers import read_count, read_number, shown, unknown_name_error
from lm_eval_moecache.records.schemas import Schema, check_as

TOGETHER, ALONE, DRAFTS = "together", "alone", "drafts"
_CACHES = ("dynamic", "static", "hybrid", "sliding_window", "hybrid_chunked")
"""Values of `cache_implementation` that keep keys and values whole and on the device."""

_STOPS = ("stop", "stop_sequences", "stop_sequence")
"""What others call `until`."""


class Option(Schema):
    """A row of `generation.yaml`, which explains the columns."""

    way: str = TOGETHER
    off: list[Any] = Field(default_factory=list)
    count: int | None = None
    number: dict[str, Any] | None = None
    asked: Literal["drafts", "never"] | None = None
    passed: bool = False
    drafted: list[Any] | None = None
    stays: bool = False
    own: bool = False


@cache
def options() -> Mapping[str, Option]:
    """Return the rows of `generation.yaml` by the option's name."""
    file = Path(__file__).with_name("generation.yaml")
    rows: dict[str, Option] = check_as(dict[str, Option], read_yaml(file, str(file)), str(file))
    return rows


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
    passed = {name for name, option in options().items() if option.passed}
    places = dict.fromkeys(set(own) - {*passed, *asked}, "generation_config.json")
    places |= dict.fromkeys(asked, "gen_kwargs")
    values = {**own, **asked}
    # A field that is new in transformers is left to transformers.
    return {
        name: (place, options().get(name, Option(way=ALONE)), values[name])
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
    for key, option in options().items():
        if option.asked == DRAFTS and gen_kwargs.get(key) is not None:
            why = options()["assistant_model"].way
            raise ArgumentsError(f"gen_kwargs: {key}={shown(gen_kwargs[key])} {why}.")
    with as_arguments_error(None):
        for key, value in gen_kwargs.items():
            _check_value(key, value)
        for key, (place, option, value) in _given(gen_kwargs, own or {}).items():
            _check_followed(key, value, place, option)
    for key, option in options().items() if speculative else ():
        is_own = option.stays and key not in gen_kwargs
        value = (own or {}).get(key) if is_own else gen_kwargs.get(key)
        if option.drafted is not None and value not in (None, *option.drafted):
            place = "generation_config.json" if is_own else "gen_kwargs"
            raise ArgumentsError(
                f"{place}: {key}={shown(value)} with --model moecache-spec, which reads a prompt "
                "in one pass and accepts drafts greedily. Allowed: do_sample=False, num_beams=1, "
                "temperature=0, no prefill_chunk_size; or --model moecache."
            )


def _check_value(key: str, value: Any) -> None:
    """Raise ValueError for an unknown option, or a value that no generation can have."""
    what, option = f"gen_kwargs: {key}", options().get(key, Option())
    known = {*fields(), *(name for name, each in options().items() if each.own)}
    if key not in known or option.asked:
        if key in _STOPS:
            raise ValueError(f"{what}={shown(value)} is not known. Did you mean 'until'?")
        allowed = [name for name in known if _is_followed(options().get(name, Option()))]
        raise unknown_name_error("gen_kwargs: the key", key, allowed)
    if value is None:
        return
    if key == "until":
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{what}={shown(value)} must be a text or a list of texts.")
    elif key == "do_sample" and not isinstance(value, bool):
        raise ValueError(f"{what}={shown(value)} must be true or false.")
    elif option.count is not None or option.number is not None:
        if isinstance(value, str):
            raise ValueError(f"{what}={shown(value)} must be a number, and is text.")
        if option.count is not None:
            read_count(what, value, least=option.count)
        else:
            read_number(what, value, **(option.number or {}))


def _is_followed(option: Option) -> bool:
    """Whether a request may ask for this option."""
    return option.way in (TOGETHER, ALONE) and not option.asked


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
