"""The glossary is short, in order, and explains only what pages say."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", GLOSSARY.read_text(), re.MULTILINE)[1:]


def test_terms_are_few_and_in_order() -> None:
    terms = [term for term, _ in ROWS]
    assert sorted(set(terms), key=str.lower) == terms
    assert 20 < len(terms) <= 30


def test_every_term_is_used_on_a_page() -> None:
    pages = {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "results/README.md"} - {GLOSSARY}
    text = "\n".join(path.read_text() for path in pages).lower()
    unused = [term for term, _ in ROWS if not re.search(rf"\b{re.escape(term.lower())}", text)]
    assert unused == []


def test_every_meaning_is_one_or_two_sentences() -> None:
    for term, meaning in ROWS:
        assert 1 <= len(re.findall(r"\.(?: |$)", meaning)) <= 2, term
