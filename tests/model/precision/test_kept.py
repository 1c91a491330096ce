"""Encoded or converted experts are made once, keyed by what they are made of, and kept whole.

For `encoded_dir`, and for `store=disk` where the checkpoint has them in another form.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.precision import loading
from lm_eval_moecache.model.precision.codecs import AsStored, Encoded, encode
from lm_eval_moecache.model.precision.loading import EncodedExpertStore
from tests.harness import answers
from tests.model.wrapped import HOST, on_disk, read_experts
from tests.models import save_model, sizes_of

LADDER = {"precision": "int8:nf4", "miss": "fetch_priority", "policy": "on_demand"}
SIZES = sizes_of("olmoe")


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ladder of each matrix that is encoded from here on."""
    ladders: list[str] = []

    def noted(module: Any, name: str, stacked: Any, codecs: Any, *given: Any) -> Any:
        ladders.append(":".join(codec.name for codec in codecs))
        return encode(module, name, stacked, codecs, *given)

    monkeypatch.setattr(loading, "encode", noted)
    return ladders


def load(path: Path, folder: Path, **given: Any) -> MoECacheLM:
    defaults = {"device": "cpu", "max_length": 48, "capacity": "30%", **LADDER}
    return MoECacheLM(pretrained=str(path), encoded_dir=str(folder), **{**defaults, **given})


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
    changes: dict[str, Any] = {}
    if change == "weights":
        shard = path / "model.safetensors"
        os.utime(shard, ns=(1, shard.stat().st_mtime_ns + 10**9))
    elif change == "dtype":
        changes["dtype"] = "float32"
    elif change == "version":
        monkeypatch.setattr(loading, "version", lambda library: "99.0")
    else:
        changes["precision"] = "int8:nf4/g128"
    load(path, folder, **changes)
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


def test_a_full_disk_costs_the_next_load_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = save_model(tmp_path / "model", "olmoe", **SIZES), tmp_path / "kept"

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(loading, "write_whole", full)
    first = answers(load(path, folder))
    monkeypatch.undo()
    assert answers(load(path, folder)) == first


# --- store=disk ---------------------------------------------------------------------------------

CONVERTED: dict[str, Any] = {"dtype": "float32"}
ENCODED: dict[str, Any] = {"precision": "int8:nf4", "miss": "fetch_priority"}
stored = partial(on_disk, policy="on_demand", capacity="30%")


def files(folder: Path) -> dict[Path, int]:
    paths = folder.rglob("*.safetensors")
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in paths}


@pytest.mark.parametrize("given", [CONVERTED, ENCODED], ids=["converted", "encoded"])
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_a_second_load_reads_and_writes_no_experts(
    family: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_experts(monkeypatch)
    path, folder = save_model(tmp_path / "model", family, **SIZES), tmp_path / "store"
    lm = stored(path, folder, **given)
    first, written = answers(lm), files(folder)
    assert read and len(written) == 3 * (1 if given is CONVERTED else 2)
    read.clear()
    lm.wrapped.unwrap()
    reloaded = stored(path, folder, **given)
    assert answers(reloaded) == first and read == [] and files(folder) == written
    reloaded.wrapped.unwrap()
    if given is CONVERTED:
        assert first == answers(HFLM(pretrained=str(path), dtype="float32", **HOST))


def test_memory_holds_one_layer_while_it_is_written(
    tmp_path: Path, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path / "model", "olmoe", **SIZES)
    write = EncodedExpertStore.write

    def written(self: EncodedExpertStore, held: Any) -> Any:
        encoded.append("written")
        return write(self, held)

    monkeypatch.setattr(EncodedExpertStore, "write", written)
    stored(path, tmp_path / "store", precision="int8").wrapped.unwrap()
    assert encoded == ["int8", "int8", "written"] * 3


def make(folder: Path, **given: Any) -> EncodedExpertStore:
    return EncodedExpertStore(
        folder, "[1, 2, 3]", torch.float32, [AsStored(torch.float32)], **given
    )


def test_one_makes_the_files_and_others_wait_for_it(tmp_path: Path) -> None:
    tensors: Encoded = [{"w.0": torch.ones(2, 3)}]
    begun, whole_flags = threading.Event(), list[bool]()

    def other() -> None:
        begun.set()
        with make(tmp_path).claimed(1) as is_whole:
            whole_flags.append(is_whole)

    maker = make(tmp_path)
    with maker.claimed(1) as is_whole:
        assert not is_whole
        waiting = [threading.Thread(target=other) for _ in range(3)]
        for thread in waiting:
            thread.start()
        assert begun.wait(30)
        waiting[0].join(0.2)
        assert whole_flags == [] and all(thread.is_alive() for thread in waiting)
        maker.place(0, maker.write(tensors))
    for thread in waiting:
        thread.join(30)
    assert whole_flags == [True] * 3
