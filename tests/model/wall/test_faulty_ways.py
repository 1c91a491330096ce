"""Faults on every way of the wall clock: a message that names the cause, no hang, nothing left."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.wall_table import LADDER
from lm_eval_moecache.engine.wall.worker import TransferError
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.spec_lm import MoECacheSpecLM
from lm_eval_moecache.model.precision import encoded_store
from lm_eval_moecache.model.wall.pools import DeviceMover
from tests.model.wall.races import Family, Way, generate, sizes_of
from tests.model.wall.test_faults import LIMIT_S, within_the_limit
from tests.models import save_model

LEVELS = {"precision": LADDER, "miss": "fetch_priority"}
WAYS = {
    "spec": Way("spec", {"policy": "sp_moe", "prefetch.cutoff": 2, "dtype": "float32"}, True),
    "levels": Way("levels", LEVELS, False),
    "host": Way("host", {"miss": "host", "miss.rule": "always", "dtype": "float32"}, False),
    "warm": Way("warm", {"warm": "", "cache_reset": "request", "dtype": "float32"}, False),
    "encoded_dir": Way("encoded_dir", {**LEVELS, "encoded_dir": ""}, False),
    "cached first": Way("cached first", {"miss": "fetch_cached_first", "dtype": "float32"}, False),
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No thread and no process of ours outlives a run, whatever became of it."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    end_s = time.monotonic() + LIMIT_S
    for thread in set(threading.enumerate()) - before:
        # A pool's threads end when it is collected, and need a moment for it.
        if thread.name.startswith("moecache"):
            thread.join(max(0.0, end_s - time.monotonic()))
            assert not thread.is_alive(), thread.name
    assert not multiprocessing.active_children()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A profile to warm by, and a checkpoint that nobody harms."""
    return Family("olmoe", tmp_path_factory.mktemp("faults"))


def arguments(way: Way, shared: Family, folder: Path, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"policy": "on_demand", "capacity": "25%", **way.given}
    if "warm" in given:
        given["warm"] = shared.arguments(Way("", {"warm": ""}, False))["warm"]
    if "encoded_dir" in given:
        given["encoded_dir"] = str(folder / "encoded")
    return {"device": "cpu", "max_length": 64, "clock": "wall", **given, **more}


def load(way: Way, shared: Family, folder: Path, **more: Any) -> MoECacheLM:
    """Load a way's model from files: experts under `folder`, the checkpoint beside them."""
    path = folder / "model"
    if not path.is_dir():
        save_model(path, "olmoe", **sizes_of("olmoe"))
    kind = MoECacheSpecLM if way.speculative else MoECacheLM
    on_disk = {"store": "disk", "store_dir": str(folder / "store")}
    return kind(str(path), **arguments(way, shared, folder, **{**on_disk, **more}))


def answer(lm: MoECacheLM) -> list[list[int]]:
    tokens: list[list[int]] = within_the_limit(lambda: generate(lm))
    return tokens


@pytest.mark.parametrize("at", [0, 7])
@pytest.mark.parametrize("name", WAYS)
def test_a_workers_exception_ends_the_run_with_its_words(
    name: str, at: int, shared: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = DeviceMover.begin, itertools.count()

    def broken(mover: DeviceMover, transfer: Any) -> object:
        if next(begun) >= at:
            raise OSError("the cable is out")
        return begin(mover, transfer)

    way = WAYS[name]
    if name == "host":
        # Where the host executes all that is absent, only prefetches move.
        way = Way(name, {"miss": "host", "prefetch": "next_gate"}, False)
    monkeypatch.setattr(DeviceMover, "begin", broken)
    with pytest.raises(TransferError, match="moving experts failed: OSError: the cable is out"):
        answer(within_the_limit(lambda: load(way, shared, tmp_path, store="ram", store_dir=None)))


@pytest.mark.parametrize("name", WAYS)
def test_folders_that_are_removed_under_a_run_do_it_no_harm(
    name: str, shared: Family, tmp_path: Path
) -> None:
    lm = within_the_limit(lambda: load(WAYS[name], shared, tmp_path))
    expected = answer(lm)
    for folder in ("store", "encoded", "model"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
    lm.reset()
    assert answer(lm) == expected
    lm.wrapped.unwrap()


def cut_open_files(*folders: Path) -> int:
    """Cut what this process has open there, also if it has no name any more; return how many."""
    cut = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            file = Path(os.readlink(link))
            is_ours = not {*file.parents}.isdisjoint(folders)
            if is_ours and ".safetensors" in file.name:
                with link.open("r+b") as opened:
                    opened.truncate(3000)
                cut += 1
    return cut


@pytest.mark.parametrize("name", WAYS)
def test_a_file_that_is_cut_under_a_run_is_named(name: str, shared: Family, tmp_path: Path) -> None:
    lm = within_the_limit(lambda: load(WAYS[name], shared, tmp_path))
    assert cut_open_files(tmp_path / "store", tmp_path / "encoded")
    with pytest.raises((TransferError, OSError), match=r"ends at byte .* the file is truncated"):
        answer(lm)
    lm.wrapped.unwrap()


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real file system that fills up, on which more is said to be free."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**30))
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], capture_output=True)


@pytest.mark.parametrize("name", WAYS)
def test_a_disk_that_is_full_is_said(
    name: str, shared: Family, tmp_path: Path, small_disk: Path
) -> None:
    given = {"store_dir": str(small_disk / "store")}
    if name == "encoded_dir":
        given["encoded_dir"] = str(small_disk / "encoded")
    with pytest.raises(ValueError, match=r"store='disk': the model cannot be loaded") as caught:
        within_the_limit(lambda: load(WAYS[name], shared, tmp_path, **given))
    assert "space" in str(caught.value).lower() or "os error 28" in str(caught.value).lower()
    assert str(small_disk) in str(caught.value)
    assert not list(small_disk.glob("store/experts-*"))


def test_a_full_disk_keeps_no_encoded_experts_and_ends_no_run_in_memory(
    shared: Family, tmp_path: Path, small_disk: Path
) -> None:
    def loaded(folder: Path) -> MoECacheLM:
        given = {"store": "ram", "store_dir": None, "encoded_dir": str(folder)}
        lm: MoECacheLM = within_the_limit(
            lambda: load(WAYS["encoded_dir"], shared, tmp_path, **given)
        )
        return lm

    found = []
    for folder in (small_disk / "encoded", tmp_path / "elsewhere"):
        lm = loaded(folder)
        found.append(answer(lm))
        lm.wrapped.unwrap()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["spec", "levels", "encoded_dir"])
def test_a_folder_that_is_removed_while_it_is_written_is_said(
    name: str, shared: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by somebody who cleans up: what was written is gone before its layer has its name."""
    write, written = encoded_store.write_whole, itertools.count()

    def gone(path: Path, data: bytes) -> None:
        write(path, data)
        if next(written) == 2:
            for folder in (tmp_path / "store", tmp_path / "encoded"):
                shutil.rmtree(folder, ignore_errors=True)

    monkeypatch.setattr(encoded_store, "write_whole", gone)
    with pytest.raises(ValueError, match=r"store='disk': the model cannot be loaded.*No such file"):
        within_the_limit(lambda: load(WAYS[name], shared, tmp_path))
