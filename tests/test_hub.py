"""A hub that does not answer is found out at once, and named in one line with the ways round it."""

from __future__ import annotations

import errno
import socket
import time
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pytest

from lm_eval_moecache.harness import hub
from tests.conftest import Moecache


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may ask the hub, at an address where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", address)
    for proxy in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    hub._is_there.cache_clear()
    yield
    hub._is_there.cache_clear()


@pytest.mark.usefixtures("online")
def test_a_hub_that_does_not_answer_is_told_to_the_libraries() -> None:
    assert hub.answers(["tiny_arc", "tiny_bbh"]), "shipped tasks are not asked for"
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    begin = time.perf_counter()
    assert not hub.answers(["tiny_arc", "gsm8k"])
    assert time.perf_counter() - begin < 2 * hub._PATIENCE_S
    assert huggingface_hub.constants.is_offline_mode() and datasets.config.HF_HUB_OFFLINE
    with pytest.raises(ValueError, match=r"'no/such' on the Hub.*HF_HOME"), hub.naming_data_sets():
        datasets.load_dataset("no/such")


def test_a_closed_pipe_is_not_taken_for_a_silent_hub() -> None:
    with pytest.raises(BrokenPipeError), hub.naming_data_sets():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_hub_that_answers_leaves_the_libraries_alone(
    online: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}/mirror")
        assert hub.answers(["gsm8k"]) and not huggingface_hub.constants.HF_HUB_OFFLINE


TASK = "task: far\ndataset_path: no/such\noutput_type: multiple_choice\n"


def test_a_sweep_names_the_data_set_before_it_runs(tmp_path: Path, moecache: Moecache) -> None:
    fields = "doc_to_text: x\ndoc_to_choice: [a, b]\ndoc_to_target: 0\ntest_split: test\n"
    (tmp_path / "far.yaml").write_text(TASK + fields)
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(f"tasks: far\ninclude_path: {tmp_path}\nbase: {{capacity: 50%}}\n")
    for words in ([], ["--dry-run"]):
        said = moecache("sweep", sweep, *words, code=2)
        assert "'no/such' on the Hub" in said and "laid out like the hub" in said
        assert said.count("\n") == 1
    assert not list((tmp_path / "runs").glob("*"))
