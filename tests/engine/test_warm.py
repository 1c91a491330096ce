"""Use profiles that warm caches: their sources, and the models they fit."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.records.artifact import UseProfile
from lm_eval_moecache.sweep.identity import resolve
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.use import load_use
from tests.conftest import Moecache

from . import traces

COUNTS = ((0, 9, 2, 0, 0, 0, 0, 0), (0, 0, 0, 9, 0, 0, 0, 1), (7, 0, 0, 0, 0, 0, 0, 0))


def test_a_profile_is_the_same_from_its_trace_and_from_its_file(
    tmp_path: Path, path: Path, moecache: Moecache
) -> None:
    out = tmp_path / "use.json"
    moecache("profile", "use", path, "--out", out)
    assert load_use(str(out)) == load_use(str(path))
    rows = load_trace(str(path)).columns
    for layer, counts in enumerate(load_use(str(out)).counts):
        slow = [int((rows.experts[rows.layer == layer] == expert).sum()) for expert in range(8)]
        assert list(counts) == slow


def test_a_models_name_is_the_profile_that_ships_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = load_use("tiny")
    assert profile.model == "tiny" and len(profile.counts) == 8 and len(profile.counts[0]) == 64
    for wrong_name in ("tinny", "elsewhere/tiny"):
        with pytest.raises(ValueError, match=f"^warm='{wrong_name}'"):
            load_use(wrong_name)
    # A file of that name takes precedence, and its suffix is not a trace's.
    shutil.copy(traces.record(tmp_path)[0], "tiny")
    with pytest.raises(ValueError, match=r"^warm='tiny'"):
        load_use("tiny")


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    def warmed(profile: UseProfile) -> VirtualEngine:
        setting = dataclasses.replace(traces.setting("on_demand", "50%"), warm=profile)
        return VirtualEngine(traces.GEOMETRY, setting)

    other_profile = UseProfile(model="Other-7B", counts=COUNTS, name="use.json")
    with pytest.raises(ValueError, match="is of the model 'Other-7B', and this is 'generated'"):
        warmed(other_profile)
    warmed(dataclasses.replace(other_profile, model="Generated"))
    small = UseProfile(model="generated", counts=((1, 2),), name="use.json")
    with pytest.raises(ValueError, match=r"counts 1 layers of 2 experts, .* has 3 of 8"):
        warmed(small)


def test_a_cell_is_named_by_what_warms_it(tmp_path: Path, path: Path) -> None:
    copy = tmp_path / "copy.parquet"
    copy.write_bytes(path.read_bytes())
    assert "warm" not in resolve(read_config({}))
    names = [resolve(read_config({"warm": str(file)}))["warm"] for file in (path, copy)]
    assert names[0] == names[1]
