"""Experts that a checkpoint has otherwise are written to disk once, and found by later loads."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import core_model_loading

from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.precision import encoded_store, loading
from lm_eval_moecache.model.precision.codecs import AsStored
from lm_eval_moecache.model.precision.encoded_store import EncodedExpertStore
from lm_eval_moecache.model.precision.stored import Encoded
from lm_eval_moecache.model.precision.whole import WholeFile
from tests.harness import answers
from tests.models import save_model

HOST: dict[str, Any] = {"device": "cpu", "max_length": 48, "batch_size": 2}
SIZES = {"hidden_size": 64, "intermediate_size": 64}
CONVERTED: dict[str, Any] = {"dtype": "float32"}
ENCODED: dict[str, Any] = {"precision": "int8:nf4", "miss": "fetch_priority"}


def on_disk(path: Path, folder: Path, **changes: Any) -> MoECacheLM:
    wall = {"clock": "wall", "policy": "on_demand", "capacity": "30%", "store": "disk"}
    return MoECacheLM(pretrained=str(path), store_dir=str(folder), **HOST, **{**wall, **changes})


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The experts' matrices that transformers reads from here on."""
    found: list[str] = []
    add = core_model_loading.WeightTransform.add_tensor

    def noted(self: Any, target: str, key: str, *given: Any) -> None:
        if "experts" in target and "bias" not in target:
            found.append(target)
        add(self, target, key, *given)

    monkeypatch.setattr(core_model_loading.WeightTransform, "add_tensor", noted)
    return found


def files(folder: Path) -> dict[Path, int]:
    found = folder.rglob("*.safetensors")
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in found}


@pytest.mark.parametrize("given", [CONVERTED, ENCODED], ids=["converted", "encoded"])
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_a_second_load_reads_and_writes_no_experts(
    family: str, given: dict[str, Any], tmp_path: Path, read: list[str]
) -> None:
    path, folder = save_model(tmp_path / "model", family, **SIZES), tmp_path / "store"
    lm = on_disk(path, folder, **given)
    first, written = answers(lm), files(folder)
    assert read and len(written) == 3 * (1 if given is CONVERTED else 2)
    read.clear()
    lm.wrapped.unwrap()
    again = on_disk(path, folder, **given)
    assert answers(again) == first and read == [] and files(folder) == written
    again.wrapped.unwrap()
    if given is CONVERTED:
        assert first == answers(HFLM(pretrained=str(path), dtype="float32", **HOST))


def test_experts_encoded_for_memory_are_read_from_their_files(
    tmp_path: Path, read: list[str]
) -> None:
    path, both = save_model(tmp_path / "model", "olmoe", **SIZES), tmp_path / "encoded"
    host = {"clock": "wall", "policy": "on_demand", "capacity": "30%"}
    ram = MoECacheLM(pretrained=str(path), encoded_dir=str(both), **HOST, **{**host, **ENCODED})
    expected, written = answers(ram), files(both)
    read.clear()
    lm = on_disk(path, tmp_path / "store", encoded_dir=str(both), **ENCODED)
    assert answers(lm) == expected and read == [] and files(both) == written
    assert not (tmp_path / "store").exists()
    lm.wrapped.unwrap()


def test_memory_holds_one_layer_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_model(tmp_path / "model", "olmoe", **SIZES)
    done: list[str] = []
    encode, write = loading.encode, EncodedExpertStore.write  # type: ignore[attr-defined]

    def encoded(*given: Any) -> Any:
        done.append("encode")
        return encode(*given)

    def written(self: EncodedExpertStore, stored: Any) -> Any:
        done.append("write")
        return write(self, stored)

    monkeypatch.setattr(loading, "encode", encoded)
    monkeypatch.setattr(EncodedExpertStore, "write", written)
    on_disk(path, tmp_path / "store", precision="int8").wrapped.unwrap()
    assert done == ["encode", "encode", "write"] * 3


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "no_note"])
def test_a_file_that_is_not_whole_is_made_again(damage: str, tmp_path: Path) -> None:
    path, folder = save_model(tmp_path / "model", "olmoe", **SIZES), tmp_path / "store"
    lm = on_disk(path, folder, **CONVERTED)
    first = answers(lm)
    lm.wrapped.unwrap()
    file = sorted(folder.rglob("*.safetensors"))[1]
    data = file.read_bytes()
    if damage == "flipped":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "gone":
        file.unlink()
    else:
        WholeFile(file).note.unlink()
    lm = on_disk(path, folder, **CONVERTED)
    assert answers(lm) == first and file.read_bytes() == data
    lm.wrapped.unwrap()


def test_bytes_are_compared_where_the_file_is_another_than_was_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, summed = WholeFile(tmp_path / "x.safetensors"), list[Path]()
    file.write(b"\x02" + b"\0" * 7 + b"{}")
    total = WholeFile._sum

    def noted(self: WholeFile) -> str:
        summed.append(self.path)
        return total(self)

    monkeypatch.setattr(WholeFile, "_sum", noted)
    assert file.is_sound(thorough=False) and summed == []
    assert file.is_sound(thorough=True) and len(summed) == 1
    os.utime(file.path, ns=(1, 1))
    # A copy of the folder has other times: read once, and then noted.
    assert file.is_sound(thorough=False) and len(summed) == 2
    assert file.is_sound(thorough=False) and len(summed) == 2


def test_what_was_made_of_weights_that_have_changed_is_removed_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, folder = save_model(tmp_path / "model", "olmoe", **SIZES), tmp_path / "store"
    other = tmp_path / "other"
    shutil.copytree(path, other)
    on_disk(other, folder, **CONVERTED).wrapped.unwrap()
    (of_other,) = folder.iterdir()
    on_disk(path, folder, **CONVERTED).wrapped.unwrap()
    (first,) = set(folder.iterdir()) - {of_other}
    # Of the same weights in another form: that stays.
    on_disk(path, folder, **ENCODED).wrapped.unwrap()
    assert len(list(folder.iterdir())) == 4
    shard = path / "model.safetensors"
    os.utime(shard, ns=(1, shard.stat().st_mtime_ns + 10**9))
    on_disk(path, folder, **CONVERTED).wrapped.unwrap()
    left = set(folder.iterdir())
    assert first not in left and of_other in left and len(left) == 2
    assert f"removed {first}: the checkpoint has changed" in caplog.text


def test_a_new_release_of_a_library_leaves_the_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another environment may be using them."""
    path, folder = save_model(tmp_path / "model", "olmoe", **SIZES), tmp_path / "store"
    on_disk(path, folder, **CONVERTED).wrapped.unwrap()
    monkeypatch.setattr(encoded_store, "version", lambda library: "99.0")
    on_disk(path, folder, **CONVERTED).wrapped.unwrap()
    assert len(list(folder.iterdir())) == 2


def make(folder: Path, **given: Any) -> EncodedExpertStore:
    return EncodedExpertStore(
        folder, "[1, 2, 3]", torch.float32, [AsStored(torch.float32)], **given
    )


def test_one_makes_the_files_and_others_wait_for_it(tmp_path: Path) -> None:
    tensors: dict[str, Encoded] = {"w": [(torch.ones(2, 3),)]}
    begun, found = threading.Event(), list[bool]()

    def other() -> None:
        begun.set()
        with make(tmp_path).claimed(1) as is_whole:
            found.append(is_whole)

    own = make(tmp_path)
    with own.claimed(1) as is_whole:
        assert not is_whole
        waiting = [threading.Thread(target=other) for _ in range(3)]
        for thread in waiting:
            thread.start()
        assert begun.wait(30)
        waiting[0].join(0.2)
        assert found == [] and all(thread.is_alive() for thread in waiting)
        own.place(0, own.write(tensors))
    for thread in waiting:
        thread.join(30)
    assert found == [True] * 3


def test_readers_hold_the_files_together(tmp_path: Path) -> None:
    own = make(tmp_path)
    with own.claimed(1):
        own.place(0, own.write({"w": [(torch.ones(2, 3),)]}))
    meeting, found = threading.Barrier(3, timeout=30), list[bool]()

    def read() -> None:
        with make(tmp_path).claimed(1) as is_whole:
            meeting.wait()
            found.append(is_whole)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [True] * 3


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"bytes free, the experts take 1\d+\."),
        make(tmp_path, needed=10**18).claimed(1),
    ):
        raise AssertionError("it begins")
