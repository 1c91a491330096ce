"""Every name of the glossary is one of the code, and no word stands there twice or out of order."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"


def rows(part: str) -> list[str]:
    text = GLOSSARY.read_text().split(f"## {part}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)[1:]


def test_every_name_is_one_of_the_code() -> None:
    names = rows("Names in the code")
    assert len(set(names)) == len(names) > 20
    for name in names:
        module, _, attribute = name.strip("`").rpartition(".")
        source = ROOT.joinpath("lm_eval_moecache", *module.split(".")).with_suffix(".py")
        assert re.search(rf"^class {attribute}\b", source.read_text(), re.MULTILINE), name


def test_words_are_in_order() -> None:
    words = rows("Words")
    assert words == sorted(set(words), key=str.lower)
    assert len(words) > 30
