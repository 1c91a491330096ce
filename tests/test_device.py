"""One device for a run: what is asked for, what lm-eval asks for by itself, and what there is."""

from __future__ import annotations

import pytest
import torch

from lm_eval_moecache.harness.device import resolve_device
from lm_eval_moecache.harness.lm import check_arguments
from lm_eval_moecache.harness.spec_lm import check_arguments as check_spec
from lm_eval_moecache.sweep.spec import Cell
from lm_eval_moecache.sweep.validation import check_cell


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize("asked", [None, "cuda", "cuda:0", "cuda:3", "mps:0", "cpu"])
def test_without_an_accelerator_every_device_is_the_cpu(
    asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device({"device": asked}) == "cpu"


@pytest.mark.parametrize(
    ("asked", "found"), [(None, "cuda"), ("cuda:1", "cuda:1"), ("cuda:2", "cuda"), ("cpu", "cpu")]
)
def test_with_two_gpus_a_device_that_is_there_is_taken(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device({"device": asked}) == found


def test_of_several_processes_the_type_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert resolve_device({"device": "cuda:0"}) == "cuda"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert resolve_device({"device": "cuda:0"}) == "cpu"


def test_what_names_no_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device='gpu' is not the name of a device. Allowed: cpu"):
        resolve_device({"device": "gpu"})


@pytest.mark.parametrize("device", ["cuda:0", None])
def test_a_precision_and_a_draft_are_checked_for_the_device_of_the_run(device: str | None) -> None:
    given = {} if device is None else {"device": device}
    _, theirs = check_arguments("tiny", {"precision": "int8", **given})
    assert theirs["device"] == "cpu"
    _, theirs = check_spec("tiny", given)
    assert theirs["device"] == "cpu"


def test_a_cell_is_the_same_on_a_machine_with_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def identity(**arguments: str) -> str:
        cell = Cell(
            model="moecache", model_args=arguments, tasks=("tiny_arc",), options={}, include_path=()
        )
        return check_cell(cell).configuration_hash

    here, asked = identity(), identity(device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert identity() == here != asked
    assert identity(device="cpu") == asked
