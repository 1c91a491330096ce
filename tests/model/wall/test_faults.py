"""Faults on every way of the wall clock: a message that names the cause, no hang, nothing left."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.wall_table import LADDER
from lm_eval_moecache.harness.lm import MoECacheLM, MoECacheSpecLM
from lm_eval_moecache.model.precision import loading
from lm_eval_moecache.model.wall.pools import DeviceMover
from lm_eval_moecache.records.errors import TransferError
from tests.model.wall.races import Family, Way, generate
from tests.models import save_model, sizes_of

LIMIT_S = 120
FLOAT = {"dtype": "float32"}
LEVELS = {"precision": LADDER, "miss": "fetch_priority"}
WAYS = {
    "spec": Way("spec", {"policy": "sp_moe", "prefetch.cutoff": 2, **FLOAT}, True),
    "host": Way("host", {"miss": "host", "miss.rule": "always", **FLOAT}, False),
    "warm": Way("warm", {"warm": "", "cache_reset": "request", **FLOAT}, False),
    "encoded_dir": Way("encoded_dir", {**LEVELS, "encoded_dir": ""}, False),
    "cached first": Way("cached first", {"miss": "fetch_cached_first", **FLOAT}, False),
}
WRITTEN = ("spec", "encoded_dir")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No thread and no process of ours outlives a run, however it ended."""
    threads_before = set(threading.enumerate())
    yield
    gc.collect()
    end_s = time.monotonic() + LIMIT_S
    for thread in set(threading.enumerate()) - threads_before:
        # A pool's threads end a moment after it is collected.
        if thread.name.startswith("moecache"):
            thread.join(max(0.0, end_s - time.monotonic()))
            assert not thread.is_alive(), thread.name
    assert not multiprocessing.active_children()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A profile to warm from, and a checkpoint that no test damages."""
    return Family("olmoe", tmp_path_factory.mktemp("faults"))


def within_the_limit(work: Callable[[], Any]) -> Any:
    """Run in a thread that must end within LIMIT_S; return its value or raise its error."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it hangs"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def load(way: Way, shared: Family, folder: Path, **more: Any) -> MoECacheLM:
    """Load a way's model from files: experts under `folder`, the checkpoint next to them."""
    path = folder / "model"
    if not path.is_dir():
        save_model(path, "olmoe", **sizes_of("olmoe"))
    arguments: dict[str, Any] = {"policy": "on_demand", "capacity": "25%", **way.given}
    if "warm" in arguments:
        arguments["warm"] = shared.arguments(Way("", {"warm": ""}, False))["warm"]
    if "encoded_dir" in arguments:
        arguments["encoded_dir"] = str(folder / "encoded")
    on_disk = {"store": "disk", "store_dir": str(folder / "store"), "clock": "wall"}
    arguments |= {"device": "cpu", "max_length": 64, **on_disk, **more}
    kind = MoECacheSpecLM if way.speculative else MoECacheLM
    lm: MoECacheLM = within_the_limit(lambda: kind(str(path), **arguments))
    return lm


def answer(lm: MoECacheLM) -> list[list[int]]:
    tokens: list[list[int]] = within_the_limit(lambda: generate(lm))
    return tokens


@pytest.mark.parametrize(("name", "at"), [*zip(WAYS, (0, 7, 7, 0, 7), strict=True)])
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
        # Where the host executes all absent experts, only prefetches move.
        way = Way(name, {"miss": "host", "prefetch": "next_gate"}, False)
    monkeypatch.setattr(DeviceMover, "begin", broken)
    with pytest.raises(TransferError, match="moving experts failed: OSError: the cable is out"):
        answer(load(way, shared, tmp_path, store="ram", store_dir=None))


def cut_open_files(*folders: Path) -> int:
    """Truncate this process's open files there, unlinked ones included; return how many."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            file = Path(os.readlink(link))
            is_ours = not {*file.parents}.isdisjoint(folders)
            if is_ours and ".safetensors" in file.name:
                with link.open("r+b") as opened:
                    opened.truncate(3000)
                count += 1
    return count


@pytest.mark.parametrize("name", WAYS)
def test_folders_that_are_removed_under_a_run_do_no_harm_and_a_cut_file_is_named(
    name: str, shared: Family, tmp_path: Path
) -> None:
    lm = load(WAYS[name], shared, tmp_path)
    expected = answer(lm)
    for folder in ("store", "encoded", "model"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
    lm.reset()
    assert answer(lm) == expected
    lm.reset()
    assert cut_open_files(tmp_path / "store", tmp_path / "encoded")
    with pytest.raises((TransferError, OSError), match=r"ends at byte .* the file is truncated"):
        answer(lm)
    lm.wrapped.unwrap()


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("fault", ["No space left", "No such file"])
def test_a_disk_that_is_full_or_a_folder_that_is_removed_while_it_is_written_is_said(
    name: str, fault: str, shared: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is removed, as by a clean-up, before the files written get their layer's name."""
    write, written = loading.write_whole, itertools.count()

    def failing(path: Path, data: bytes) -> None:
        number = next(written)
        if fault == "No space left" and number > 1:
            raise OSError(28, "No space left on device")
        write(path, data)
        if fault == "No such file" and number == 2:
            for folder in (tmp_path / "store", tmp_path / "encoded"):
                shutil.rmtree(folder, ignore_errors=True)

    monkeypatch.setattr(loading, "write_whole", failing)
    words = rf"store='disk': the model cannot be loaded.*{fault}"
    with pytest.raises(ValueError, match=words) as caught:
        load(WAYS[name], shared, tmp_path)
    assert not list(tmp_path.glob("*/*/layer-*"))
    message = str(caught.value)
    assert fault == "No such file" or ("are written to" in message and str(tmp_path) in message)
