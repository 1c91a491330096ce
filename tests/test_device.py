"""One device for a run: what is asked for, what lm-eval asks for by itself, and what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import lm_eval_moecache
from lm_eval_moecache.harness.preflight import check_arguments, resolve_device
from lm_eval_moecache.sweep.spec import Cell
from lm_eval_moecache.sweep.validation import check_cell


def has(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    """Let torch have so many devices of a kind."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    found = torch.device(kind) if count else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "cuda", 0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize("asked", [None, "cuda", "cuda:0", "cpu"])
def test_without_an_accelerator_what_lm_eval_asks_for_is_the_cpu(asked: str | None) -> None:
    assert resolve_device({"device": asked}) == "cpu"


@pytest.mark.parametrize("asked", ["cuda:1", "mps", "mps:0", "xpu", "privateuseone"])
def test_a_device_that_is_not_here_is_refused_and_not_the_cpu(asked: str) -> None:
    with pytest.raises(ValueError, match=f"device='{asked}'.*no such device.*Allowed here: cpu."):
        resolve_device({"device": asked})


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps", "privateuseone"])
def test_of_two_devices_the_one_that_is_asked_for_is_taken(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # An out-of-tree device has the name that a test of this process may have registered it under.
    kind = torch.device(kind).type
    has(monkeypatch, kind, 2)
    assert resolve_device({"device": None}) == kind
    for asked in ("cpu", kind, f"{kind}:1"):
        assert resolve_device({"device": asked}) == asked
    with pytest.raises(ValueError, match=f"Allowed here: cpu, {kind}, {kind}:0, {kind}:1."):
        resolve_device({"device": f"{kind}:2"})


def test_lm_evals_own_default_is_the_accelerator_that_is_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has(monkeypatch, "xpu", 1)
    assert resolve_device({"device": "cuda:0"}) == "xpu"
    assert "device='cuda:0' is not here; the run uses xpu" in caplog.text


def test_of_several_processes_the_type_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "cuda", 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert resolve_device({"device": "cuda:0"}) == "cuda"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert resolve_device({"device": "cuda:0"}) == "cpu"


def test_what_names_no_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device='gpu' is not the name of a device. Allowed here"):
        resolve_device({"device": "gpu"})


def test_one_module_knows_a_vendor() -> None:
    """Devices are torch's generic interface; what CUDA alone has is in `model/device.py`."""
    root = Path(lm_eval_moecache.__file__).parent
    vendor = re.compile(
        r"torch\.(cuda|xpu|mps|npu)|is_cuda|cudart|(type|device) [!=]= .cuda|_on_cuda"
    )
    found = [
        f"{path.relative_to(root.parent)}: {line.strip()}"
        for folder in (root, root.parent / "benchmarks")
        for path in sorted(folder.rglob("*.py"))
        for line in path.read_text().splitlines()
        if vendor.search(line) and path != root / "model" / "device.py"
    ]
    assert not found


@pytest.mark.parametrize("device", ["cuda:0", None])
def test_a_precision_and_a_draft_are_checked_for_the_device_of_the_run(device: str | None) -> None:
    given = {} if device is None else {"device": device}
    _, theirs = check_arguments("tiny", {"precision": "int8", **given})
    assert theirs["device"] == "cpu"
    _, theirs = check_arguments("tiny", given, speculative=True)
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
    has(monkeypatch, "cuda", 1)
    assert identity() == here != asked
    assert identity(device="cpu") == asked
