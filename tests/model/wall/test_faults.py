"""What goes wrong under a run ends it with a message, or does it no harm; nothing hangs."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.model.precision import encoded_store
from tests.harness import answers
from tests.model.wall.models import on_disk
from tests.models import save_model

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


@pytest.mark.parametrize("given", [{"precision": "int8:int4"}, {"dtype": "float32"}], ids=str)
def test_a_full_disk_is_said_while_experts_are_written(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = save_model(tmp_path / "model", "olmoe", hidden_size=64), tmp_path / "store"
    write, calls = encoded_store.write_whole, []

    def full(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(encoded_store, "write_whole", full)
    with pytest.raises(ValueError, match=r"store='disk'.*No space left.*files are written to"):
        within_the_limit(lambda: on_disk(path, folder, policy="on_demand", **given))
    assert not list(folder.glob("*/layer-*"))
