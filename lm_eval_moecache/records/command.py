"""What a command returns, options that commands share, and lines of text that fit a terminal."""

from __future__ import annotations

import inspect
import keyword
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, get_type_hints

from lm_eval_moecache.records.ranges import split_range

Options = Mapping[str, tuple[Any, Any, str]]
"""Option -> its type, its default and its help."""


class Report(dict[str, Any]):
    """What a command found: a mapping, as `--json` prints it; `str` is the page that it prints.

    Args:
        found: The mapping.
        page: The text, or a function that makes it once it is asked for.
        code: The command's exit code.
    """

    def __init__(
        self, found: Mapping[str, Any], page: str | Callable[[], str] = "", code: int = 0
    ) -> None:
        super().__init__(found)
        self.code = code
        self._page = page

    def __str__(self) -> str:
        text = self._page if isinstance(self._page, str) else self._page()
        return text.rstrip("\n")


def with_options(
    options: Options, **defaults: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command's function these options as keywords of its `**`, with their defaults.

    `defaults` are those that differ. A `**parameters` remains for more. Calls raise ValueError for
    what lies outside of the range of its type (`records.ranges`).
    """
    own_defaults = {key: default for key, (_, default, _) in options.items()} | defaults

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(function, include_extras=True)
        hints |= {key: kind for key, (kind, _, _) in options.items()}
        ranges = {key: split_range(hint)[1] for key, hint in hints.items()}

        @wraps(function)
        def filled(*args: Any, **keywords: Any) -> Any:
            given = {key.rstrip("_"): value for key, value in keywords.items()}
            for key, value in given.items():
                if allowed := ranges.get(key):
                    allowed.check(key, value)
            return function(*args, **{**own_defaults, **given})

        *named, rest = inspect.signature(function).parameters.values()
        own = [
            inspect.Parameter(
                f"{key}_" if keyword.iskeyword(key) else key,
                inspect.Parameter.KEYWORD_ONLY,
                default=own_defaults[key],
                annotation=split_range(kind)[0],
            )
            for key, (kind, _, _) in options.items()
        ]
        last = [rest] if rest.name == "parameters" else []
        signature = inspect.Signature([*named, *own, *last])
        filled.__signature__ = signature  # type: ignore[attr-defined]
        filled.options_about = {k: text for k, (*_, text) in options.items()}  # type: ignore[attr-defined]
        return filled

    return decorated


def terminal_width() -> int:
    """Return the columns of a line: COLUMNS, the terminal's, or 80, but 40 at least."""
    return max(shutil.get_terminal_size((80, 24)).columns, 40)


def wrapped(text: str, indent: int = 0) -> list[str]:
    """Return a paragraph as lines that fit the terminal."""
    lead = " " * indent
    return textwrap.wrap(
        text,
        terminal_width() - 1,
        initial_indent=lead,
        subsequent_indent=lead,
        break_on_hyphens=False,
    )


def listed(rows: Iterable[tuple[str, str]], lead: int) -> list[str]:
    """Return lines of names with their texts, wrapped to the terminal after `lead` columns."""
    lines: list[str] = []
    for name, text in rows:
        first, *others = wrapped(text, lead)
        lines += [f"  {name:{lead - 3}s} {first.lstrip()}", *others]
    return lines


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return lines of cells in columns, each aligned to its side: `<` or `>`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]
