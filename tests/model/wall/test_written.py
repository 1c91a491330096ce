"""Experts that a checkpoint has otherwise are written to disk once, and found by later loads."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import core_model_loading

from lm_eval_moecache.model.precision import loading
from lm_eval_moecache.model.precision.codecs import AsStored
from lm_eval_moecache.model.precision.encoded_store import EncodedExpertStore
from lm_eval_moecache.model.precision.stored import Encoded
from tests.harness import answers
from tests.model.wall import models
from tests.model.wall.models import HOST
from tests.models import save_model

SIZES = {"hidden_size": 64, "intermediate_size": 64}
CONVERTED: dict[str, Any] = {"dtype": "float32"}
ENCODED: dict[str, Any] = {"precision": "int8:nf4", "miss": "fetch_priority"}


on_disk = partial(models.on_disk, policy="on_demand", capacity="30%")


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
