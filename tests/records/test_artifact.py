"""Artifact files: read back as written, and refused with the reason where they do not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.records import artifact as module
from lm_eval_moecache.records.artifact import (
    Artifact,
    check_router_digest,
    load_artifact,
    read_artifact,
    write_artifact,
)
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.testing.streams import make_geometry

GEOMETRY = make_geometry(num_layers=2, num_experts=4, top_k=2)
KEY = "miss.profile"


def make(**changes: Any) -> Artifact:
    fields: dict[str, Any] = {
        "kind": "buddies",
        "model": "some/model",
        "num_layers": 2,
        "num_experts": 4,
        "top_k": 2,
        "router_digest": "ab" * 32,
        "made_from": {"data": ["text.txt"], "tokens": 12},
        "arrays": {"counts": np.arange(8.0).reshape(2, 4), "lists": np.arange(3, dtype=np.int16)},
    }
    return Artifact(**{**fields, **changes})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "new folder" / "made.safetensors"
    write_artifact(path, make())
    return path


def test_a_file_reads_as_it_was_written(file: Path) -> None:
    read, written = read_artifact(file, "buddies", KEY), make()
    for name in ("kind", "model", "num_layers", "num_experts", "top_k", "router_digest"):
        assert getattr(read, name) == getattr(written, name)
    assert read.made_from == written.made_from
    assert read.versions["numpy"] == np.__version__
    assert read.path == str(file)
    assert read.arrays.keys() == written.arrays.keys()
    for name, array in written.arrays.items():
        np.testing.assert_array_equal(read.arrays[name], array, strict=True)


def test_the_same_artifact_gives_the_same_bytes(file: Path, tmp_path: Path) -> None:
    reordered = make(arrays=dict(reversed(make().arrays.items())))
    write_artifact(tmp_path / "again.safetensors", reordered)
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()


def test_a_file_of_another_kind_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match=r"kind 'buddies'; needed: 'predictor'"):
        read_artifact(file, "predictor", KEY)


@pytest.mark.parametrize("name", ["num_layers", "num_experts", "top_k"])
def test_another_models_counts_are_refused(file: Path, name: str) -> None:
    assert load_artifact("buddies", str(file), GEOMETRY, KEY).arrays
    counts = {"num_layers": 2, "num_experts": 4, "top_k": 2}
    other_geometry = make_geometry(**{**counts, name: counts[name] + 1})
    message = rf"'some/model' with {name}={counts[name]}, but 'stream' has {name}="
    with pytest.raises(ValueError, match=message):
        load_artifact("buddies", str(file), other_geometry, KEY)


def test_without_a_path_the_shipped_one_is_taken_or_the_error_says_how_to_make_one(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="moecache profile buddies --pretrained stream --data"):
        load_artifact("buddies", None, GEOMETRY, KEY)
    monkeypatch.setattr(module, "ARTIFACT_DIR", file.parent)
    shipped = file.parent / "stream" / "buddies.safetensors"
    write_artifact(shipped, make())
    assert load_artifact("buddies", None, GEOMETRY, KEY).path == str(shipped)
    foreign: Geometry = dataclasses.replace(GEOMETRY, model="../stream")
    with pytest.raises(ValueError, match="no buddies artifact ships"):
        load_artifact("buddies", None, foreign, KEY)


def test_arrays_that_are_missing_misshapen_or_not_finite_are_refused(file: Path) -> None:
    artifact = read_artifact(file, "buddies", KEY)
    artifact.require(counts=(2, 4), lists=(3,))
    with pytest.raises(ValueError, match="lacks the array 'gates'; it has counts, lists"):
        artifact.require(gates=(2,))
    with pytest.raises(ValueError, match=r"'counts' has the shape \(2, 4\), not \(4, 2\)"):
        artifact.require(counts=(4, 2))
    broken = make(arrays={"counts": np.array([1.0, np.nan])})
    with pytest.raises(ValueError, match="'counts' has entries that are not numbers"):
        broken.require(counts=(2,))


def test_other_router_weights_are_refused() -> None:
    check_router_digest(make(), "ab" * 32, "m")
    with pytest.raises(ValueError, match=r"made from 'some/model'.*are not those of 'other/one'"):
        check_router_digest(make(), "cd" * 32, "other/one")
