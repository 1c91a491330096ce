"""Hazards of a device, shown on scripted streams; windows of slots; locked memory.

Each hazard of the path to a device is a mutation here, run under the script that exposes it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_eval_moecache.engine.wall.engine import WallEngine
from lm_eval_moecache.engine.wall.link import Transfer, WallLink, Worker
from lm_eval_moecache.model import device
from lm_eval_moecache.model import hook as wrapping
from lm_eval_moecache.model.wall import pools, store
from lm_eval_moecache.model.wall.pools import DeviceMover, LadderPools, RamTier, SlotPools
from lm_eval_moecache.model.wall.store import KERNELS
from lm_eval_moecache.records.errors import TransferError
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.testing.streams import make_geometry
from tests.model.wall.on_device import (
    SIZES,
    assert_exact,
    assert_levels_exact,
    assert_plain,
    logits,
    plain_logits,
    wrap,
    wrap_files,
)
from tests.model.wall.scripted import NAME, SCRIPTS, Device, Misuse, Stream, scripted
from tests.model.wrapped import logits_of, of_tokens, wrap_wall
from tests.models import random_model

TOKENS = 12


def slots(
    script: str,
    folder: Path | None = None,
    policy: str = "on_demand",
    capacity: str = "2/layer",
    **changes: Any,
) -> Device:
    with scripted(script) as scripted_device:
        assert_plain(NAME, policy, capacity, 1, TOKENS, **changes)
        return scripted_device


def levels(script: str, folder: Path) -> None:
    with scripted(script):
        assert_levels_exact(NAME, "hqq8:hqq4:hqq2", "2/layer", 1, TOKENS)


def staged(script: str, folder: Path) -> None:
    with scripted(script):
        expected = plain_logits(NAME, TOKENS)
        model = random_model("olmoe", **SIZES)
        wrapped = wrap_files(model, NAME, folder, "on_demand", "2/layer")
        assert_exact(wrapped, expected, 1, TOKENS)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("policy", "capacity", "changes"),
    [
        ("on_demand", "1/layer", {}),
        ("specmd", "2/layer", {}),
        ("mixtral_offloading", "25%", {}),
        ("on_demand", "1/layer", {"kernel": "batched_mm"}),
        ("specmd", "25%", {"miss": "fetch_cached_first"}),
        ("specmd", "25%", {"miss": "host"}),
    ],
)
def test_streams_that_run_ahead_or_behind_change_no_bit(
    policy: str, capacity: str, changes: dict[str, Any], script: str
) -> None:
    device = slots(script, None, policy, capacity, **changes)
    assert device.pending or script != "compute_late", "no copy had to wait for a kernel"


@pytest.mark.parametrize("script", SCRIPTS)
def test_levels_and_staging_buffers_on_streams(script: str, tmp_path: Path) -> None:
    levels(script, tmp_path)
    staged(script, tmp_path)


def test_a_cache_that_is_filled_anew_waits_for_what_a_pass_left_behind() -> None:
    """`cache_reset` with `warm`: after a pass that broke off nothing has waited for the device."""
    with scripted("compute_late"):
        expected = plain_logits(NAME, TOKENS)
        wrapped = wrap(random_model("olmoe", **SIZES), NAME, "on_demand", "25%")
        outputs = logits(wrapped.model, tokens=TOKENS)
        engine = wrapped.engine
        assert isinstance(engine, WallEngine)
        engine.restart()
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
        wrapped.unwrap()


def test_a_device_without_streams_copies_in_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on MPS: blocking copies, and one queue that everything goes through in order."""
    monkeypatch.setattr(pools, "copy_stream", lambda device: None)
    assert not slots("drawn", policy="specmd").streams


def test_a_device_whose_events_tell_no_time_is_timed_by_the_host() -> None:
    with scripted("drawn"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "can_time", lambda device: False)
        assert_plain(NAME, "on_demand", "25%", 1, TOKENS)


def test_a_copy_is_timed_by_the_device() -> None:
    """Busy time is the transfer's: 0.25 ms by the device's own events, no wait for the fence."""

    geometry = make_geometry(num_layers=1, num_experts=2, top_k=1)
    with scripted("compute_late"):
        rows = [{"w": torch.ones(2, 3)}]
        tier = RamTier(rows)
        tier.pin()
        arguments = rows, geometry, parse_capacity("100%", geometry), tier, torch.device(NAME)
        slot_pools = SlotPools(*arguments)
        fence = slot_pools.fence()
        assert slot_pools.finish(
            slot_pools.begin(Transfer(1, 0, 12, after=fence))
        ) == pytest.approx(0.25e-3)
        worker = Worker(slot_pools)
        worker.put(Transfer(1, 0, 12, after=fence), demanded=True)
        worker.wait_for({1})
        worker.close()
        assert worker.busy_s <= 0.25e-3 + 1e-9
        assert slot_pools.target_of(Transfer(1, 0, 12))["w"].tolist() == [1, 1, 1]


# --- hazards ------------------------------------------------------------------------------------


def on_the_copies_stream(self: DeviceMover) -> object:
    event = torch.Event(self._device)
    assert self._stream is not None
    event.record(self._stream)
    return event


def without_a_turn(self: DeviceMover, *args: Any, stage: Any = DeviceMover._stage) -> Any:
    self._turn = 0
    return stage(self, *args)


def on_this_threads_stream(self: LadderPools, shapes: Any) -> Any:
    layouts = shapes.items()
    return {name: torch.empty(s, dtype=kind, device=self._device) for name, (s, kind) in layouts}


HAZARDS: dict[str, tuple[Any, str, Any]] = {
    "no wait for the fence": (Stream, "wait_event", lambda *_: None),
    "a fence that is not renewed": (WallLink, "launched", lambda _: None),
    "a fence on the wrong stream": (DeviceMover, "fence", on_the_copies_stream),
    "finish does not wait": (DeviceMover, "finish", lambda *_: None),
    "a staging buffer is not turned": (DeviceMover, "_stage", without_a_turn),
    "memory of another stream": (LadderPools, "_make", on_this_threads_stream),
    "pageable memory": (RamTier, "pin", lambda _: None),
    "a look at the device's memory": (
        wrapping,
        "copy_to_host",
        lambda ts: [t.numpy() for t in ts],
    ),
    "a table left on the CPU": (store, "copy_to_device", lambda values, *_: values),
}
SHOWN: list[tuple[str, str, Callable[[str, Path], Any]]] = [
    ("no wait for the fence", "compute_late", slots),
    ("no wait for the fence", "compute_late", levels),
    ("a fence that is not renewed", "compute_late", slots),
    ("a fence on the wrong stream", "compute_late", slots),
    ("finish does not wait", "copies_late", slots),
    ("finish does not wait", "copies_late", levels),
    ("a staging buffer is not turned", "copies_late", staged),
    ("memory of another stream", "drawn", levels),
    ("pageable memory", "drawn", slots),
    ("a look at the device's memory", "drawn", slots),
    ("a table left on the CPU", "drawn", slots),
]


@pytest.mark.parametrize(("hazard", "script", "run"), SHOWN)
def test_a_hazard_that_is_there_is_found(
    hazard: str,
    script: str,
    run: Callable[[str, Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(*HAZARDS[hazard])
    with pytest.raises((AssertionError, TransferError)) as caught:
        run(script, tmp_path)
    message = f"{caught.value} {caught.value.__cause__}"
    is_misuse = isinstance(caught.value.__cause__ or caught.value, Misuse)
    assert is_misuse or "repetition" in message or "equal" in message, message


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_slots_than_a_product_takes_are_served_by_windows(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of five slots, on the CPU, by transformers' kernels on the pool.

    The rows of a grouped product depend on their number there, and so on the window.
    """
    monkeypatch.setattr(store, "MAX_GROUPS", 5)
    monkeypatch.setattr(store, "MOST", 5)
    model = random_model("olmoe").float()
    model.set_experts_implementation(kernel)
    expected = logits_of(model)
    for capacity in ("60%", "25%", "100%"):
        wrapped = wrap_wall(model, "specmd", capacity)
        monkeypatch.setattr(wrapped.store, "on_cpu", False)
        pairs = zip(*map(of_tokens, (expected, logits_of(model, wrapped))), strict=True)
        most = 0.0 if kernel == "batched_mm" else 1e-4
        assert all(torch.allclose(a, b, atol=most, rtol=most) for a, b in pairs), capacity


def test_locked_memory_has_the_size_of_what_lies_there(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[int, int] = {}

    class Runtime:
        limit = 10**6

        def cudaHostRegister(self, place: int, nbytes: int, flags: int) -> int:
            registered[place] = nbytes
            return 0 if nbytes < self.limit else 2

        def cudaHostUnregister(self, place: int) -> int:
            del registered[place]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime())
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    monkeypatch.setattr(pools, "can_lock", lambda: True)
    source = torch.randn(3, 700)
    copy = device.locked_copy(source)
    assert torch.equal(copy, source) and copy.data_ptr() != source.data_ptr()
    assert list(registered.values()) == [3 * 700 * 4]
    # A page that two tensors share could not be locked for both.
    assert all(place % mmap.PAGESIZE == 0 for place in registered)
    del copy
    assert not registered
    tier = RamTier([{"w": torch.randn(2, 5)}, {"w": torch.randn(2, 9)}])
    tier.pin()
    assert sorted(registered.values()) == [40, 72]
    Runtime.limit = 50
    with pytest.raises(OSError, match="store=disk"):
        RamTier([{"w": torch.randn(9, 9)}]).pin()
