"""A short, seeded soak; `make soak SECONDS=600` runs for any given time."""

from __future__ import annotations

import codecs
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lm_eval_moecache.profiling._texts import read_prompts
from lm_eval_moecache.profiling.use import read_counts as read_use_counts
from moecache_lab.analyzed_model import read_texts
from moecache_plan.counts import read_counts
from moecache_plan.published import read_rows
from moecache_plan.validation import read_measured
from tests.soak.corpus import LIGHT, table
from tests.soak.judge import CLEAR, Tally, places_in, try_damaged, try_table
from tests.soak.kinds import KINDS, Kind, damages

SPEEDS = (
    "runtime,model,precision,hardware,placement,decode_tok_s\n"
    "llama.cpp,gpt-oss-20b,mxfp4_moe,rtx-4090-24gb,resident,180\n"
)


@pytest.mark.parametrize(
    ("is_slow", "at_least"), [(False, 1150), pytest.param(True, 80, marks=pytest.mark.slow)]
)
def test_every_row_of_the_table_is_refused_in_words(
    tmp_path: Path, is_slow: bool, at_least: int
) -> None:
    """The slow rows import lm-eval or read a model."""
    tally, slow = Tally(), ("host", "spec", "command", "views")
    rows = [bad for bad in table() if (bad.kind in slow) == is_slow]
    try_table(tmp_path, tally, rows)
    assert tally.problems == []
    assert tally.counts[CLEAR] > at_least


def test_what_needs_no_model_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """Importing torch takes seconds, or minutes on a busy machine."""
    places = places_in(tmp_path)
    commands = [[word.format(**places) for word in rows] for rows, _ in LIGHT]
    code = (
        "import contextlib, io, json, sys\n"
        "sys.modules['torch'] = None\n"
        "from lm_eval_moecache.cli.main import main\n"
        "for argv, words in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as said:\n"
        "        try: code = main(argv)\n"
        "        except SystemExit as ended: code = ended.code\n"
        "    text = said.getvalue()\n"
        "    said_all = all(part in text for part in words.split(' … '))\n"
        "    assert code == 2 and said_all, (argv, code, text)\n"
        "    assert argv[0] != 'replay' or text.count('\\n') == 1, (argv, text)\n"
    )
    words = [expected for _, expected in LIGHT]
    rows = json.dumps(list(zip(commands, words, strict=True)))
    process = subprocess.run([sys.executable, "-c", code, rows], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


MORE_TEXTS: tuple[tuple[str, str, Callable[[Path], object]], ...] = (
    ("speeds.csv", SPEEDS, lambda path: read_rows(path)[0]),
    ("measured.csv", "# a\nwall_ms,io_ms\n1,2\n", read_measured),
    ("use.csv", "layer_id,expert_id,count\n0,1,3\n", lambda path: read_use_counts(str(path), "x")),
    ("log.csv", "cache_hit_pct,read_bytes\n50,0\n", lambda path: read_counts(str(path))),
    ("prompts.jsonl", '"one\u2028more"\n"two"\n', lambda path: read_prompts(str(path))),
    ("prompts.txt", "one\ntwo\n", lambda path: read_prompts(str(path))),
    ("text.txt", "one\ntwo\n", lambda path: read_texts("x", str(path))),
)
"""Text that is read and is no kind of file of the corpus: a name, a text and its reader."""


def marked(data: bytes) -> bytes:
    """Return a text as Windows' editors write it; anything else as it is."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return data
    return codecs.BOM_UTF8 + data.replace(b"\n", b"\r\n")


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_file_with_a_mark_and_windows_line_ends_is_read(kind: Kind, tmp_path: Path) -> None:
    sound = kind.bytes_in(tmp_path)
    is_zipped = kind.form == "gz"
    data = gzip.compress(marked(gzip.decompress(sound))) if is_zipped else marked(sound)
    (tmp_path / kind.name).write_bytes(data)
    kind.read(tmp_path / kind.name)


@pytest.mark.parametrize(("name", "text", "read"), MORE_TEXTS)
def test_a_text_with_a_mark_and_windows_line_ends_is_read_as_without(
    name: str, text: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    wanted = repr(read(tmp_path / name))
    (tmp_path / name).write_bytes(marked(text.encode()))
    assert repr(read(tmp_path / name)) == wanted


def test_damaged_files_are_refused_in_words_or_still_sound(tmp_path: Path) -> None:
    tally, stream = Tally(), damages(tmp_path, seed=1)
    for _ in range(330):
        try_damaged(next(stream), tmp_path, tally)
    assert tally.problems == []
    assert tally.counts[CLEAR] > 150
