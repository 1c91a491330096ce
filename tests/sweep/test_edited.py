"""Code that was edited makes its finished runs unfinished; words about the code do not."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from lm_eval_moecache.algorithms.registry import (
    AXES,
    algorithm_names,
    find_algorithm,
    source_digest,
)
from lm_eval_moecache.sweep import identity
from lm_eval_moecache.sweep.files import finished, unedited, write_record
from lm_eval_moecache.sweep.identity import ResolvedCell
from lm_eval_moecache.sweep.spec import Cell
from lm_eval_moecache.sweep.validation import check_cell
from lm_eval_moecache.sweep.worker import head
from tests.report.runs import record

CODE = '''"""A module."""
from lm_eval_moecache.algorithms.eviction.lru import LRU


class Mine(LRU):
    """An eviction."""

    seen = 1  # a comment
'''


def planned(eviction: str) -> ResolvedCell:
    arguments = {"policy": "on_demand", "eviction": eviction}
    return check_cell(Cell(model="moecache", model_args=arguments, tasks=("tiny_arc",)))


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)
    importlib.invalidate_caches()


def test_an_edited_class_of_a_user_makes_its_run_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "edited_eviction.py"
    rewrite(module, CODE)
    before = planned("edited_eviction.Mine")
    write_record(tmp_path, {**record("a"), **head(before, "e")})

    def is_finished() -> bool:
        again = planned("edited_eviction.Mine")
        assert again.run_id == before.run_id  # the new run takes the place of the old
        return again.configuration_hash in unedited(finished(tmp_path), [again])

    assert is_finished()
    rewrite(module, CODE.replace("a comment", "other words").replace("An evic", "My evic"))
    assert is_finished()
    rewrite(module, CODE.replace("seen = 1", "seen = 2"))
    assert not is_finished()


def test_another_shipped_model_makes_its_runs_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = planned("lru")
    write_record(tmp_path, {**record("a"), **head(before, "e")})
    assert unedited(finished(tmp_path), [before])
    monkeypatch.setattr(identity, "_shipped_weights", lambda: "others")
    assert unedited(finished(tmp_path), [planned("lru")]) == {}


def test_a_record_that_does_not_say_its_sources_counts(tmp_path: Path) -> None:
    before = planned("lru")
    old = {key: value for key, value in head(before, "e").items() if key != "sources"}
    write_record(tmp_path, {**record("a"), **old})
    assert unedited(finished(tmp_path), [before])


def test_every_algorithm_has_a_digest_of_its_own() -> None:
    found = {source_digest(find_algorithm(a, n)) for a in AXES for n in algorithm_names(a)}
    assert len(found) == sum(len(algorithm_names(axis)) for axis in AXES)
