"""A short, seeded soak; `make soak SECONDS=600` runs for any given time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.corpus import LIGHT, table
from tests.soak.judge import CLEAR, Tally, places_in, try_damaged, try_table
from tests.soak.kinds import damages


@pytest.mark.parametrize(
    ("is_slow", "at_least"), [(False, 1150), pytest.param(True, 80, marks=pytest.mark.slow)]
)
def test_every_row_of_the_table_is_refused_in_words(
    tmp_path: Path, is_slow: bool, at_least: int
) -> None:
    """The slow rows import lm-eval or read a model."""
    tally, slow = Tally(), ("host", "command", "views")
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
        "    assert code == 2 and words in text, (argv, code, text)\n"
        "    assert argv[0] != 'replay' or text.count('\\n') == 1, (argv, text)\n"
    )
    words = [expected for _, expected in LIGHT]
    rows = json.dumps(list(zip(commands, words, strict=True)))
    process = subprocess.run([sys.executable, "-c", code, rows], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_damaged_files_are_refused_in_words_or_still_sound(tmp_path: Path) -> None:
    tally, stream = Tally(), damages(tmp_path, seed=1)
    for _ in range(330):
        try_damaged(next(stream), tmp_path, tally)
    assert tally.problems == []
    assert tally.counts[CLEAR] > 150
