"""Makes a command of a function: its options, their types, defaults and help are the function's.

A parameter that may be given by place is an argument, each keyword an option; a `bool` that is
False by default is a switch. The first paragraphs of the docstring are the command's help, its
`Args:` that of the options. `**parameters` take every `--AXIS.PARAMETER=VALUE`.
"""

from __future__ import annotations

import inspect
import re
from argparse import SUPPRESS, Action
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.records.files import check_place, check_writable, parse_yaml, read_yaml
from lm_eval_moecache.records.numbers import MOST_COUNT, read_number, shown, unknown_name_error
from lm_eval_moecache.records.sizes import check_one_word

Command = Callable[..., Any]
WRITTEN = ("out", "output", "plot", "report", "timeline")
"""Options that name a file or folder the command writes."""
_SECTION = re.compile(r"^(Args|Returns|Raises|Example):$", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+): ", re.MULTILINE)
_REFUSED = re.compile(r'Parser key "([\w-]+)":.*(?:Got|Given) value: (.*)', re.DOTALL)
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", list: "a list of them"}


class Option(NamedTuple):
    """One parameter of a command's function."""

    name: str
    kind: Any
    """Its annotation, without None."""
    default: Any
    about: str
    is_place: bool
    """Whether it is an argument, which has no `--`."""

    @property
    def is_many(self) -> bool:
        """Whether it takes any number of arguments."""
        kinds = get_args(self.kind) if _is_union(self.kind) else (self.kind,)
        return self.is_place and any(get_origin(kind) is Sequence for kind in kinds)

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.kind is bool and self.default is False

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it may have; empty for any."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def reads(self) -> Any:
        """What jsonargparse reads it as: text, where a function takes text among others."""
        kinds = {int, float, bool, list}
        if self.is_many:
            return str
        own = {get_origin(kind) or kind for kind in (get_args(self.kind) or (self.kind,))}
        return self.kind if own <= kinds else str

    def is_raw(self, value: Any) -> bool:
        """Whether a file's value goes to the function as it is: a list of more than texts."""
        parts = value if isinstance(value, list) else ()
        return self.reads is str and any(isinstance(part, dict) for part in parts)

    def as_typed(self, value: Any) -> Any:
        """Return a file's value as it would be typed: text, a list of texts with commas."""
        if self.reads is not str:
            return value
        if isinstance(value, list) and not self.is_many:
            return ",".join(map(str, value))
        if isinstance(value, (bool, int, float)):
            return str(value).lower() if isinstance(value, bool) else str(value)
        return [value] if self.is_many and isinstance(value, str) else value


def options_of(function: Command) -> dict[str, Option]:
    """Return what a command of the function can be given, by the names that users type."""
    about = {**getattr(function, "options_about", {}), **_documented(function)[1]}
    hints, options = get_type_hints(function), {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        hint = hints.get(name, parameter.annotation)
        kinds = get_args(hint) if _is_union(hint) else (hint,)
        kind: Any = Union[tuple(kind for kind in kinds if kind is not NoneType)]  # noqa: UP007
        typed = name.rstrip("_")  # `from_`: a word of Python's
        place = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        options[typed] = Option(
            name, kind, parameter.default, about.get(name) or about.get(typed, ""), place
        )
    return options


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _documented(function: Command) -> tuple[str, dict[str, str]]:
    """Return a docstring's first paragraphs, and parameter -> what its `Args` say."""
    head, *sections = _SECTION.split(inspect.getdoc(function) or "")
    named = dict(zip(sections[::2], sections[1::2], strict=True))
    _, *entries = _ENTRY.split(named.get("Args", ""))
    texts = (" ".join(text.split()) for text in entries[1::2])
    return head.strip(), dict(zip(entries[::2], texts, strict=True))


class PlainHelp(DefaultHelpFormatter):
    """Shows an option's help as it is: its default stands in it."""

    def _expand_help(self, action: Action) -> str:
        return (action.help or "").replace("%%", "%")


def parser_of(name: str, function: Command) -> ArgumentParser:
    """Return the parser of a command; it yields only what was typed."""
    summary, _ = _documented(function)
    parser = ArgumentParser(
        prog=f"moecache {name}",
        description=summary,
        formatter_class=PlainHelp,
        print_config=None,
        exit_on_error=False,
    )
    parser.add_argument("--config", type=str, default=SUPPRESS, help="read options from a YAML")
    add = partial(parser.add_argument, default=SUPPRESS)
    add("--json", action="store_true", help="print machine-readable output")
    for typed, option in options_of(function).items():
        text = _help(option)
        if option.is_place:
            add(typed, type=str, nargs="*" if option.is_many else "?", help=text)
        elif option.is_switch:
            words = dict.fromkeys((f"--{typed.replace('_', '-')}", f"--{typed}"))
            add(*words, action="store_true", help=text)
        elif option.choices:
            add(f"--{typed}", type=str, metavar=f"{{{','.join(option.choices)}}}", help=text)
        else:
            add(f"--{typed}", type=option.reads, help=text)
    return parser


def _help(option: Option) -> str:
    default = option.default
    silent = default in (None, False, "", inspect.Parameter.empty) or "default" in option.about
    if silent:
        return option.about
    return f"{option.about} (default: {default})"


def given(name: str, function: Command, argv: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Return the function's keywords as the words and their `--config` give them, and `--json`.

    Raises ValueError, naming option and value, for what cannot be; OSError where an output cannot
    be written, before any work is done.
    """
    check_one_word(argv)
    options, free = options_of(function), _takes_any(function)
    words, parameters = _parameters(argv) if free else (list(argv), {})
    _check_names(words, options)
    parser = parser_of(name, function)
    found = _read(parser.parse_args, words, options)
    if (file := found.pop("config", None)) is not None:
        entries, others = _of_file(file, {*options, "json"}, free)
        raw = {key: v for key, v in entries.items() if key in options and options[key].is_raw(v)}
        typed = {key: options[key].as_typed(v) for key, v in entries.items() if key in options}
        typed = {key: value for key, value in {**entries, **typed}.items() if key not in raw}
        of_file = {**_read(parser.parse_object, typed, options), **raw}
        # An algorithm that is named anew has none of the parameters given before.
        others = {key: v for key, v in others.items() if key.partition(".")[0] not in found}
        found, parameters = {**of_file, **found}, {**others, **parameters}
    as_json = bool(found.pop("json", False))
    for key, value in found.items():
        _check(key, value, options[key])
    required = [key for key, each in options.items() if each.default is inspect.Parameter.empty]
    if missing := [key for key in required if not found.get(key)]:
        names = (key.upper() if options[key].is_place else f"--{key}" for key in missing)
        raise ValueError(f"missing: {', '.join(names)}. `moecache {name} --help` shows what it is.")
    return {**{options[key].name: v for key, v in found.items()}, **parameters}, as_json


def _check_names(words: Sequence[str], options: Mapping[str, Option]) -> None:
    """Refuse an option that no option begins with, naming the nearest."""
    own = {"config", "json", *(key for key, option in options.items() if not option.is_place)}
    for word in words:
        typed = word[2:].partition("=")[0].replace("-", "_")
        if word.startswith("--") and typed and not any(n.startswith(typed) for n in own | {"help"}):
            raise unknown_name_error("option", word.partition("=")[0], [f"--{n}" for n in own])


def _takes_any(function: Command) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _read(parse: Callable[[Any], Any], what: Any, options: Mapping[str, Option]) -> dict[str, Any]:
    """Parse words or a mapping; ValueError, naming option, value and what is allowed."""
    try:
        return {key: value for key, value in vars(parse(what)).items() if value is not None}
    except ArgumentError as error:
        refused = _REFUSED.search(str(error))
        if refused is None or refused[1] not in options:
            raise ValueError(" ".join(str(error).split())) from None
        kinds = get_args(options[refused[1]].kind) or (options[refused[1]].kind,)
        words = [_KINDS[get_origin(kind) or kind] for kind in kinds]
        allowed = " or ".join(dict.fromkeys(words))
        raise ValueError(f"--{refused[1]}={shown(refused[2])} must be {allowed}.") from None


def _check(key: str, value: Any, option: Option) -> None:
    if option.choices and value not in option.choices:
        raise unknown_name_error(key if option.is_place else f"--{key}", value, option.choices)
    if option.is_place and value == "":
        raise ValueError(f"{key.upper()}='' is not a path or a name. {option.about.capitalize()}.")
    if key == "pretrained":
        check_place(key, value)
    if key in WRITTEN and value:
        check_writable(Path(value))
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            read_number(f"--{key}", number, least=0, most=MOST_COUNT)


# --- parameters of algorithms, which no parser lists, and files of options ---


def _is_parameter(key: object) -> bool:
    axis, dot, _ = str(key).partition(".")
    return bool(dot) and axis in AXES


def _parameters(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the parser's words, and every `--AXIS.PARAMETER=VALUE`."""
    rest: list[str] = []
    parameters: dict[str, Any] = {}
    words: Iterator[str] = iter(argv)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not _is_parameter(name):
            rest.append(word)
            continue
        if not (value or (not equals and (value := next(words, "")))):
            raise ValueError(f"--{name} needs a value: --{name}=VALUE.")
        parameters[name] = parse_yaml(value, f"--{name}={shown(value)}")
    return rest, parameters


def _of_file(file: str, known: set[str], free: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a `--config` file: its options, and parameters; an axis may be a mapping."""
    # Read here: jsonargparse would expand a bomb of YAML aliases.
    entries = read_yaml(file, f"config={file!r}")
    if not isinstance(entries, dict):
        raise ValueError(
            f"config={file!r} must hold a mapping of options; it holds {shown(entries)}."
        )
    options: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for key, value in entries.items():
        if free and key in AXES and isinstance(value, dict):
            parameters |= {f"{key}.{k}": v for k, v in value.items() if k != "name"}
            options |= {key: value["name"]} if "name" in value else {}
        elif free and _is_parameter(key):
            parameters[key] = value
        elif key not in known:
            raise unknown_name_error(f"config file {Path(file).name}: option", key, known)
        elif value is not None:
            options[key] = value
    return options, parameters
