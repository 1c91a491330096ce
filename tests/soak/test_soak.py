"""A short, seeded soak; `make soak SECONDS=600` runs for any given time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.corpus import LIGHT, table
from tests.soak.judge import CLEAR, Tally, places_in, try_damaged, try_table
from tests.soak.kills import Ended, Eval, Fault, Sweep
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


def test_the_kills_ask_for_a_recording_once_a_request_was_finished(tmp_path: Path) -> None:
    traced = Eval("traced", "trace=traces", limit=1)
    progress = "Running loglikelihood requests:   0%|     | {}/4 [00:00<?, ?it/s]"
    ended = Ended(130, "", progress.format(0), True, 1.0)
    assert traced.check_killed(tmp_path, ended) == 0
    with pytest.raises(Fault, match="1 requests were finished and no recording is there"):
        traced.check_killed(tmp_path, ended._replace(err=progress.format(1)))


def test_the_kills_see_what_is_lost_doubled_or_left(tmp_path: Path) -> None:
    """`make kills` runs the kills themselves, which take minutes."""
    sweep, runs = Sweep(), tmp_path / Sweep.out / "runs"
    runs.mkdir(parents=True)
    (runs / "a.json").write_text('{"configuration_hash": "1"}')
    ended = Ended(0, "{}", "", True, 1.0)
    kept_runs = sweep.check_killed(tmp_path, ended)
    (runs / "b.json").write_text('{"configuration_hash": "1"}')
    with pytest.raises(Fault, match="twice"):
        sweep.check_killed(tmp_path, ended)
    (runs / ".b.json.1.part").touch()
    with pytest.raises(Fault, match="litter"):
        sweep.check_rerun(tmp_path, ended, kept_runs)
    (runs / "a.json").unlink()
    with pytest.raises(Fault, match="lost or ran again"):
        sweep.check_rerun(tmp_path, ended, kept_runs)
