"""What goes wrong under a run ends it with a message, or does it no harm; nothing hangs."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.engine.wall.worker import TransferError
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.harness.spec_lm import MoECacheSpecLM
from lm_eval_moecache.model.precision import whole
from lm_eval_moecache.model.wall import assemble
from tests.harness import answers
from tests.model.wall.models import BrokenPools
from tests.models import save_model

HOST: dict[str, Any] = {"device": "cpu", "max_length": 48, "clock": "wall", "capacity": "25%"}
LIMIT_S = 120


def within_the_limit(work: Callable[[], Any]) -> Any:
    """Run in a thread of its own, which must end: with what it returns, or with what it raises."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(work())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it hangs"
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]


def on_disk(path: Path, folder: Path, **given: Any) -> MoECacheLM:
    store = {"store": "disk", "store_dir": str(folder)}
    return MoECacheLM(pretrained=str(path), **HOST, **store, **{"policy": "specmd", **given})


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
@pytest.mark.parametrize("precision", [None, "int8"])
def test_a_removed_store_folder_does_a_run_no_harm(
    family: str, precision: str | None, tmp_path: Path
) -> None:
    """Converted, encoded or in the checkpoint: files are open as long as the run lasts."""
    path, folder = save_model(tmp_path / "model", family), tmp_path / "store"
    given = {} if precision is None else {"precision": precision, "policy": "on_demand"}
    lm = on_disk(path, folder, **given)
    expected = within_the_limit(lambda: answers(lm))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(path)
    lm.reset()
    assert within_the_limit(lambda: answers(lm)) == expected
    lm.wrapped.unwrap()


@pytest.mark.parametrize("scoring", ["parallel", "scan"])
def test_a_file_that_is_cut_while_it_is_read_is_named(scoring: str, tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "olmoe")
    given = {"policy": "on_demand", "scoring": scoring, "capacity": "2/layer", "dtype": "float32"}
    lm = MoECacheLM(
        pretrained=str(path), **{**HOST, **given}, store="disk", store_dir=str(tmp_path / "store")
    )
    tier: Any = lm.loader._experts.tiers[0]  # type: ignore[union-attr]
    for file, descriptor in tier._reader._files.items():
        # The model's other weights are a map of the checkpoint: that file stays whole.
        assert not file.startswith(str(path))
        opened = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY)
        os.ftruncate(opened, 2000)
        os.close(opened)
    with pytest.raises(TransferError, match="the file is truncated"):
        within_the_limit(lambda: answers(lm))
    lm.wrapped.unwrap()


ERRORS = [OSError(28, "No space left on device"), MemoryError("no memory"), ValueError("odd")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("speculative", [False, True])
def test_a_workers_exception_ends_the_run_with_it(
    error: BaseException, speculative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a prefill, a decode step, a draft or a verify pass, wherever it is noticed."""

    class Broken(BrokenPools):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, error=error, at=40)

    monkeypatch.setattr(assemble, "SlotPools", Broken)
    kind = MoECacheSpecLM if speculative else MoECacheLM
    given = {"draft": "tiny", "policy": "sp_moe"} if speculative else {"policy": "specmd"}
    if speculative:
        given["prefetch.cutoff"] = 8  # type: ignore[assignment]
    with pytest.raises(TransferError, match=type(error).__name__):
        within_the_limit(lambda: answers(kind(pretrained="tiny", **HOST, **given)))


@pytest.mark.parametrize("precision", ["int8", "int8:int4"])
def test_a_full_disk_is_said_while_experts_are_encoded(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is only converted `test_loading.py` says the same."""
    path, folder = save_model(tmp_path / "model", "olmoe", hidden_size=64), tmp_path / "store"
    write, calls = whole.write_whole, []

    def full(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(whole, "write_whole", full)
    with pytest.raises(ValueError, match=r"store='disk'.*No space left.*files are written to"):
        within_the_limit(lambda: on_disk(path, folder, precision=precision, policy="on_demand"))
    assert not list(folder.glob("*/layer-*"))
