"""Feeds bad inputs and damaged files to readers and commands, in-process, under a time guard."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.harness.arguments import read_config, split_arguments
from lm_eval_moecache.sweep.run import check_cell
from lm_eval_moecache.sweep.spec import Cell
from lm_eval_moecache.tiny import MODEL_DIR
from tests.engine import traces
from tests.report.runs import leaderboard_of_four
from tests.soak.corpus import Bad
from tests.soak.kinds import KINDS, Damaged

GUARD_S = 60
CLEAR, ACCEPTED, UNCLEAR, TRACEBACK, HANG = "clear", "accepted", "unclear", "traceback", "hang"
LEFT = "refused, but left a file"
FAULTS = (TRACEBACK, HANG, UNCLEAR, ACCEPTED, LEFT)


class HangError(BaseException):
    """The time guard went off. No reader may catch it."""


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Interrupt the block after GUARD_S (main thread, systems with signals)."""

    def ring(number: int, frame: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, GUARD_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Tally:
    """The outcomes of the inputs tried; `problems` lists every outcome but a clear refusal."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    still_sound: int = 0
    """Damaged files that are still valid, as the changed part may vary."""

    def note(self, verdict: str, told: str) -> None:
        self.counts[verdict] += 1
        if verdict != CLEAR:
            self.problems.append(f"{verdict}: {told}")

    def line(self) -> str:
        rest = ", ".join(f"{name} {self.counts[name]}" for name in (CLEAR, *FAULTS))
        return f"bad inputs: tried {sum(self.counts.values())}, {rest}"


def says(text: str, words: str) -> bool:
    """Whether a refusal has these words; `…` stands for any text between them."""
    return all(part in text for part in words.split(" … "))


def judged(act: Callable[[], object], words: str) -> tuple[str, str]:
    """Return the outcome and the message for an input that has to be refused."""
    try:
        with guarded():
            act()
    except HangError:
        return HANG, f"longer than {GUARD_S} s"
    except (ValueError, FileNotFoundError) as error:
        text = str(error)
        return (CLEAR if says(text, words) and len(text) < 20_000 else UNCLEAR), text[:400]
    except Exception as error:
        return TRACEBACK, f"{type(error).__name__}: {error}"[:400]
    return ACCEPTED, ""


def command(argv: list[str], words: str) -> tuple[str, str]:
    """Run a command that has to end with exit code 2 and a message."""

    def act() -> None:
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
            try:
                code: object = main(argv)
            except SystemExit as error:
                code = error.code
        text = stderr.getvalue()
        if code != 0:
            raise (ValueError if code == 2 and "Traceback" not in text else Exception)(text)

    verdict, message = judged(act, words)
    return verdict, f"{argv}: {message}"


def judge(bad: Bad, folder: Path, places: dict[str, str]) -> tuple[str, str]:
    """Try one row of the table."""
    if bad.kind in ("arguments", "drafted"):
        drafted = bad.kind == "drafted"
        return judged(
            lambda: read_config(split_arguments(bad.given, ())[0], speculative=drafted), bad.words
        )
    if bad.kind in ("host", "spec"):
        placed = {k: v.format(**places) for k, v in bad.given.items() if "{models}" in str(v)}
        return judged(lambda: refused_model({**bad.given, **placed}, bad.kind == "spec"), bad.words)
    if bad.kind == "command":
        return command([word.format(**places) for word in bad.given], bad.words)
    return read_bad(bad.kind, bad.given, folder, bad.words)


def read_bad(kind: str, data: str | bytes, folder: Path, words: str) -> tuple[str, str]:
    """Give a file with these contents to the reader of this kind."""
    path = folder / KINDS[kind].name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return judged(lambda: KINDS[kind].read(path), words)


def refused_model(given: dict[str, Any], drafts: bool) -> None:
    """Check arguments on both ways into a run; AssertionError where their messages differ."""
    from lm_eval_moecache.harness.lm import MoECacheLM, MoECacheSpecLM

    def refusal(act: Callable[[], object]) -> str:
        try:
            act()
        except ValueError as error:
            return str(error)
        return ""

    kind, name = (MoECacheSpecLM, "moecache-spec") if drafts else (MoECacheLM, "moecache")
    cell = Cell(model=name, model_args=given, tasks=("tiny_arc",))
    alone, in_sweep = refusal(lambda: kind(**given)), refusal(lambda: check_cell(cell))
    assert alone == in_sweep, f"alone: {alone!r}, in a sweep: {in_sweep!r}"
    raise ValueError(alone)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Silence the warnings about skipped files."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def places_in(folder: Path) -> dict[str, str]:
    """Make the sound files that commands need."""
    places = {name: folder / name for name in ("traces", "folder", "special", "models")}
    for place in (*places.values(), folder / "results"):
        place.mkdir()
    for suffix in ("yaml", "json", "csv", "jsonl", "npz", "parquet", "svg", "txt"):
        os.mkfifo(places["special"] / f"pipe.{suffix}")
        (places["special"] / f"zero.{suffix}").symlink_to("/dev/zero")
    config = json.loads((MODEL_DIR / "config.json").read_text())
    for name, changes in (("negative", {"num_experts": -1}), ("binary", {})):
        (places["models"] / name).mkdir()
        (places["models"] / name / "config.json").write_text(json.dumps({**config, **changes}))
    (places["models"] / "binary" / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"Some words to read: {number}." for number in range(20)))
    places |= {"text": text, "trace": traces.record(places["traces"])}
    places["results"] = leaderboard_of_four(folder / "results")
    return {name: str(path) for name, path in places.items()}


def try_table(folder: Path, tally: Tally, rows: Iterable[Bad]) -> None:
    """Try rows of the table of bad inputs."""
    places = places_in(folder)
    with silent():
        for bad in rows:
            verdict, message = judge(bad, folder, places)
            leftovers = [*Path(places["folder"]).iterdir()]
            verdict = LEFT if verdict == CLEAR and leftovers else verdict
            label = f"{bad.kind}: {str(bad.given)[:160]}"
            tally.note(verdict, f"{label}: wanted {bad.words!r}: {message}, left {leftovers}")


def try_damaged(damaged: Damaged, folder: Path, tally: Tally) -> None:
    """Read a damaged file: a still valid one may be accepted, a refusal names the file."""
    with silent():
        name = KINDS[damaged.kind].name
        verdict, message = read_bad(damaged.kind, damaged.data, folder, name)
    if verdict == UNCLEAR and (damaged.kind in ("sweep", "views") or "=" in message):
        verdict = CLEAR  # it names the field instead; callers of the reader name a sweep's cells
    if verdict == ACCEPTED and not damaged.must_be_refused:
        tally.still_sound += 1
    else:
        tally.note(verdict, f"{damaged.kind} {damaged.how}: {message}")
