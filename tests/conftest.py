"""Fixtures that several test files share: small random checkpoints, each built once."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before lm-eval, datasets or transformers are imported; read by the subprocesses of tests, too.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# On models of a few kilobytes a second thread only waits, and for long on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# So do bitsandbytes' functions for odd shapes: a C++ compiler would take as long for one.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

# An example that takes long on a busy machine is no fault.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

Checkpoint = Callable[[str], Path]
HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Skip what fails for want of bitsandbytes, 60 MB that a machine without an index may lack."""
    try:
        return (yield)
    except Exception as error:
        if not HAS_BITSANDBYTES and "bitsandbytes" in str(error):
            pytest.skip("needs bitsandbytes")
        raise


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return a function that maps a family of `tests/models.py` to a folder of a random model."""
    root = tmp_path_factory.mktemp("checkpoints")

    def build(family: str) -> Path:
        # Imported here, so that tests of the core start without torch.
        from tests.models import save_model

        folder = root / family
        return folder if folder.is_dir() else save_model(folder, family)

    return build


class Moecache:
    """Runs `moecache` commands, or those of another `main`, in this process."""

    def __init__(
        self, capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int] | None = None
    ) -> None:
        self._capsys, self._main = capsys, main

    def __call__(self, *words: object, code: int = 0) -> str:
        """Return a command's stdout, or its stderr where `code` is that of a failure."""
        from lm_eval_moecache.cli.main import main

        self._capsys.readouterr()
        try:
            exit_code: Any = (self._main or main)([str(word) for word in words])
        except SystemExit as ended:
            exit_code = ended.code
        captured = self._capsys.readouterr()
        assert exit_code == code, captured.err
        return captured.err if code else captured.out

    def json(self, *words: object) -> Any:
        """Return the JSON that a command prints with `--json`."""
        return json.loads(self(*words, *(["--json"] if "--json" not in words else [])))


@pytest.fixture
def moecache(capsys: pytest.CaptureFixture[str]) -> Moecache:
    return Moecache(capsys)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A recorded trace of a few generated requests."""
    from tests.engine import traces

    return traces.record(tmp_path)
