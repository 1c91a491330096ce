"""Encoded experts are made once: kept by what they are made of, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.precision import encoded_store, loading, stored
from tests.harness import answers
from tests.models import save_model

LADDER = {"precision": "int8:nf4", "miss": "fetch_priority", "policy": "on_demand"}
SIZES = {"hidden_size": 64, "intermediate_size": 64}


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The matrices that are encoded from here on."""
    done: list[str] = []
    encode = stored.encode

    def noted(module: Any, stacked: Any, codecs: Any, *given: Any) -> Any:
        done.append(":".join(codec.name for codec in codecs))
        return encode(module, stacked, codecs, *given)

    monkeypatch.setattr(loading, "encode", noted)
    return done


def load(path: Path, folder: Path, **given: Any) -> MoECacheLM:
    usual = {"device": "cpu", "max_length": 48, "capacity": "30%", **LADDER}
    return MoECacheLM(pretrained=str(path), encoded_dir=str(folder), **{**usual, **given})


@pytest.mark.slow
@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_a_second_load_encodes_nothing_and_answers_the_same(
    clock: str, tmp_path: Path, encoded: list[str]
) -> None:
    path, folder = save_model(tmp_path / "model", "olmoe", **SIZES), tmp_path / "kept"
    first = answers(load(path, folder, clock=clock))
    assert len(encoded) == 6
    encoded.clear()
    assert answers(load(path, folder, clock=clock)) == first
    assert answers(load(path, folder, clock=clock, precision="nf4", miss="fetch")) != first
    assert encoded == []
    # The other clock and another ladder read the same files, level by level.
    other = "wall" if clock == "virtual" else "virtual"
    assert answers(load(path, folder, clock=other)) == first
    assert encoded == []
    store = {"clock": "wall", "store": "disk", "store_dir": str(tmp_path / "store")}
    assert answers(load(path, folder, **store)) == first
    assert encoded == [] and not (tmp_path / "store").exists()


@pytest.mark.parametrize("change", ["weights", "dtype", "version", "codec"])
def test_what_was_made_of_something_else_is_not_used(
    change: str, tmp_path: Path, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = save_model(tmp_path / "model", "olmoe", **SIZES), tmp_path / "kept"
    load(path, folder)
    encoded.clear()
    given: dict[str, Any] = {}
    if change == "weights":
        shard = path / "model.safetensors"
        os.utime(shard, ns=(1, shard.stat().st_mtime_ns + 10**9))
    elif change == "dtype":
        given["dtype"] = "float32"
    elif change == "version":
        monkeypatch.setattr(encoded_store, "version", lambda library: "99.0")
    else:
        given["precision"] = "int8:nf4/g128"
    load(path, folder, **given)
    assert len(encoded) == 6


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_file_that_is_not_whole_is_made_again(
    damage: str, tmp_path: Path, encoded: list[str]
) -> None:
    path, folder = save_model(tmp_path / "model", "olmoe", **SIZES), tmp_path / "kept"
    first = answers(load(path, folder))
    encoded.clear()
    file = sorted(folder.rglob("*.safetensors"))[2]
    data = file.read_bytes()
    file.unlink()
    if damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    assert answers(load(path, folder)) == first
    assert len(encoded) == 6
    encoded.clear()
    assert answers(load(path, folder)) == first and encoded == []
    assert not list(folder.rglob("*.part"))


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_a_full_disk_costs_the_next_load_its_time(
    clock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = save_model(tmp_path / "model", "olmoe", **SIZES), tmp_path / "kept"

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(encoded_store, "write_whole", full)
    first = answers(load(path, folder, clock=clock))
    monkeypatch.undo()
    assert answers(load(path, folder, clock=clock)) == first


def test_what_has_no_effect_or_no_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="encoded_dir='x' has no effect without precision"):
        read_config({"encoded_dir": "x"})
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"encoded_dir=.* cannot be written to"):
        read_config({"encoded_dir": str(tmp_path / "file"), "precision": "int8"})
