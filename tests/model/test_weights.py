"""Damaged or incomplete weights are refused before loading, with the file's name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lm_eval_moecache.harness.preflight import check_arguments, check_draft
from tests.conftest import Checkpoint

NAME, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("olmoe"), tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same checkpoint in two files and an index."""
    tensors = load_file(folder / NAME)
    (folder / NAME).unlink()
    weight_map: dict[str, str] = {}
    for number, names in enumerate([sorted(tensors)[::2], sorted(tensors)[1::2]], start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ValueError, match="pretrained=") as caught:
        check_arguments(str(folder), {})
    for word in (str(folder), *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("left", [0, 4, 500, -1])
def test_a_file_that_is_cut_short_is_named(folder: Path, left: int) -> None:
    data = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(data[:left])
    refused(folder, NAME, f"({len(data[:left])} bytes)", "cut short or damaged")
    # A header damaged in one byte.
    offset = {0: 0, 4: 7, 500: 9, -1: 60}[left]
    (folder / NAME).write_bytes(data[:offset] + bytes([data[offset] ^ 0xFF]) + data[offset + 1 :])
    refused(folder, NAME, "cut short or damaged")


def test_a_missing_or_exchanged_shard_is_named(sharded: Path) -> None:
    check_arguments(str(sharded), {})
    first, second = sorted(sharded.glob("model-*"))
    shutil.copy(first, second)
    refused(sharded, second.name, "lacks", "which the index says it has")
    second.unlink()
    refused(sharded, second.name, "is missing", INDEX)
    (sharded / INDEX).write_text("[]")
    refused(sharded, INDEX, "no weight_map")


def test_a_drafts_weights_are_looked_at_too(folder: Path, checkpoint: Checkpoint) -> None:
    data = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(data[:-1])
    with pytest.raises(ValueError, match=re.escape(f"draft={str(folder)!r}: {NAME}")):
        check_draft(str(folder), str(checkpoint("olmoe")), {}, False)
