"""The order of a device's calls, written down by scripted streams: no slot is reused too early."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lm_eval_moecache.engine.wall.link import WallLink
from lm_eval_moecache.engine.wall.worker import Transfer, Worker
from lm_eval_moecache.harness.lm import check_arguments
from lm_eval_moecache.model.wall import assemble, kernels
from lm_eval_moecache.model.wall.ladder import LadderPools
from lm_eval_moecache.model.wall.mover import DeviceMover
from lm_eval_moecache.model.wall.pools import SlotPools
from lm_eval_moecache.model.wall.tiers import RamTier, locked_copy
from tests.conftest import Checkpoint
from tests.model.wall import models
from tests.model.wall.models import wrap_ladder, wrap_wall
from tests.model.wall.test_equality import assert_same
from tests.models import random_model
from tests.test_equality import logits_of

Entry = tuple[Any, ...]


class Stream:
    """Writes down what is put on it."""

    def __init__(self, log: list[Entry], name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: Event) -> None:
        self.log.append(("wait", self.name, event))

    def synchronize(self) -> None:
        self.log.append(("synchronize", self.name))


class Event:
    def __init__(self, log: list[Entry], enable_timing: bool = False) -> None:
        self.log, self.timed = log, enable_timing

    def record(self, stream: Stream) -> None:
        self.log.append(("record", stream.name, self))

    def synchronize(self) -> None:
        self.log.append(("awaited", self))

    def elapsed_time(self, other: Event) -> float:
        assert self.timed and other.timed
        return 0.25


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Entry]]:
    """Stand in for CUDA's streams and events; memory is the CPU's."""
    entries: list[Entry] = []
    compute = Stream(entries, "compute")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(entries, "copies"))
    monkeypatch.setattr(torch.cuda, "Event", lambda **given: Event(entries, **given))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    yield entries


class OnStreams(SlotPools):
    """Slots in the CPU's memory, filled by the calls that fill a device's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._on_cuda, self.depth = True, 2
        self._staging = [{}, {}]
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def begin(self, transfer: Transfer) -> object:
        stream: Any = self._stream
        token = super().begin(transfer)
        stream.log.append(("copied", transfer.slot, transfer.after))
        return token


def early(log: list[Entry]) -> tuple[dict[str, list[int]], int]:
    """Divide the copies by whether what read their memory is done; and count the fences.

    Memory is a slot's, and where slots are made as they are needed, that of all dropped before.
    """
    places = {id(e[2]): i for i, e in enumerate(log) if e[0] == "record" and e[1] == "compute"}
    found: dict[str, list[int]] = {"early": [], "in time": []}
    for place, entry in enumerate(log):
        if entry[0] != "copied":
            continue
        _, slot, fence = entry
        before = log[:place]
        dropped = {e[1] for e in before if e[0] == "dropped"}
        reads = [i for i, e in enumerate(before) if e[0] == "reads" and {slot, *dropped} & e[1]]
        last = reads[-1] if reads else -1
        waits = [i for i, e in enumerate(before) if e == ("wait", "copies", fence)]
        # The fence was marked after the last kernel that reads the memory was launched, and the
        # copies' stream waits for it before this copy.
        in_time = places[id(fence)] > last and bool(waits) and waits[-1] > last
        found["in time" if in_time else "early"].append(place)
    return found, len(places)


@pytest.fixture
def reading(log: list[Entry], monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """Write down as well which slots are read."""
    execute = kernels.WorkInGroups.execute

    def noted(self: Any, slot_of: Any, is_all: bool) -> None:
        log.append(("reads", set(slot_of.values())))
        execute(self, slot_of, is_all)

    monkeypatch.setattr(kernels.WorkInGroups, "execute", noted)
    return log


class LevelsOnStreams(LadderPools):
    """Slots that are made as they are needed, filled by the calls that fill a device's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._on_cuda, self.depth = True, 2
        self._staging = [{}, {}]
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def place(self, transfer: Transfer) -> None:
        stream: Any = self._stream
        stream.log.extend(("dropped", slot) for slot in transfer.drops)
        super().place(transfer)

    def begin(self, transfer: Transfer) -> object:
        stream: Any = self._stream
        token = super().begin(transfer)
        stream.log.append(("copied", transfer.slot, transfer.after))
        return token


@pytest.mark.parametrize("changes", [{}, {"prefetch": "next_gate"}], ids=str)
def test_no_memory_of_a_dropped_slot_is_written_before_what_reads_it_is_done(
    reading: list[Entry], monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    monkeypatch.setattr(models, "LateLadder", LevelsOnStreams)
    model = random_model("olmoe", hidden_size=64, intermediate_size=64)
    given = {"miss": "fetch_priority", **changes}
    wrapped = wrap_ladder(model, "int8:int4:int2", "on_demand", "20%", given)
    logits_of(model)
    wrapped.unwrap()
    copies, _ = early(reading)
    assert any(entry[0] == "dropped" for entry in reading)
    assert copies["in time"] and not copies["early"]


@pytest.mark.parametrize("policy", ["on_demand", "specmd"])
def test_a_cache_that_is_filled_anew_waits_for_what_a_pass_left_behind(
    reading: list[Entry], policy: str
) -> None:
    """`cache_reset` with `warm`: after a pass that broke off nothing has waited for the device."""
    model = random_model("olmoe")
    wrapped = wrap_wall(model, policy, "25%", OnStreams)
    logits_of(model)
    wrapped.engine.executor.settle()
    wrapped.engine.executor.fill()
    wrapped.unwrap()
    copies, _ = early(reading)
    assert copies["in time"] and not copies["early"]


@pytest.mark.parametrize("policy", ["on_demand", "specmd"])
def test_a_fence_that_is_not_renewed_is_noticed(
    reading: list[Entry], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """What the tests above stand on, taken away."""
    monkeypatch.setattr(WallLink, "launched", lambda link: None)
    wrapped = wrap_wall(random_model("olmoe"), policy, "25%", OnStreams)
    logits_of(wrapped.model)
    wrapped.unwrap()
    assert early(reading)[0]["early"]


@pytest.mark.parametrize("policy", ["on_demand", "specmd"])
@pytest.mark.parametrize("capacity", ["25%", "1"])
def test_no_slot_is_written_before_what_reads_it_is_done(
    reading: list[Entry], policy: str, capacity: str
) -> None:
    model = random_model("olmoe")
    expected = logits_of(model)
    wrapped = wrap_wall(model, policy, capacity, OnStreams)
    found = logits_of(model)
    wrapped.unwrap()
    assert_same(expected, found)
    copies, fences = early(reading)
    assert not copies["early"] and copies["in time"]
    # One fence serves all transfers that an event gives to the link.
    assert fences < len(copies["in time"]) or capacity == "1"


def test_a_copy_waits_then_is_timed_then_is_awaited(log: list[Entry]) -> None:
    """Busy is what moved: 0.25 ms by the device's own events, not the wait for the fence."""

    class One(DeviceMover):
        def target_of(self, transfer: Transfer) -> Any:
            return {"w": torch.zeros(3)}

        def tier_of(self, level: int) -> Any:
            return RamTier([{"w": torch.ones(2, 3)}])

    mover = One(2, torch.device("cuda"))
    fence = mover.fence()
    token = mover.begin(Transfer(1, 0, 12, after=fence))
    assert mover.finish(token) == pytest.approx(0.25e-3)
    assert [entry[0] for entry in log] == ["record", "wait", "record", "record", "awaited"]
    assert [entry[1] for entry in log[:4]] == ["compute", "copies", "copies", "copies"]
    worker = Worker(mover)
    worker.put(Transfer(1, 0, 12, after=fence), demanded=True)
    worker.wait_for({1})
    worker.close()
    assert worker.busy_s <= 0.25e-3 + 1e-9


def test_more_slots_than_a_grouped_product_takes_are_served_by_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With windows of five slots instead of 1,023, on the CPU, by the kernel for a pool."""
    monkeypatch.setattr(kernels, "MAX_GROUPS", 5)
    model = random_model("olmoe").float()
    expected = logits_of(model)
    wrapped = wrap_wall(model, "on_demand", "60%")
    monkeypatch.setattr(wrapped._store, "on_cpu", False)
    found = logits_of(model)
    wrapped.unwrap()
    pairs = zip(expected, found, strict=True)
    assert all(torch.allclose(a[0], b[0], atol=1e-4, rtol=1e-3) for a, b in pairs)


def test_windows_give_the_bits_of_one_product_where_rows_are_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the kernel whose rows do not depend on each other on a CPU, either."""
    monkeypatch.setattr(kernels, "MOST", 5)
    model = random_model("olmoe")
    model.set_experts_implementation("batched_mm")
    expected = logits_of(model)
    for capacity in ("60%", "25%", "100%"):
        wrapped = wrap_wall(model, "specmd", capacity)
        found = logits_of(model)
        wrapped.unwrap()
        assert_same(expected, found, capacity)


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
    source = torch.randn(3, 700)
    copied = locked_copy(source)
    assert torch.equal(copied, source) and copied.data_ptr() != source.data_ptr()
    assert list(registered.values()) == [3 * 700 * 4]
    # A page that two tensors share could not be locked for both.
    assert all(place % mmap.PAGESIZE == 0 for place in registered)
    del copied
    assert not registered
    tier = RamTier([{"w": torch.randn(2, 5)}, {"w": torch.randn(2, 9)}])
    tier.pin()
    assert sorted(registered.values()) == [40, 72]
    Runtime.limit = 50
    with pytest.raises(OSError, match="store=disk"):
        RamTier([{"w": torch.randn(9, 9)}]).pin()


def test_more_experts_than_the_host_can_lock_are_refused_before_loading(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    monkeypatch.setattr(assemble, "available_host_bytes", lambda: 60_000)
    path, given = str(checkpoint("olmoe")), {"clock": "wall", "policy": "on_demand"}
    with pytest.raises(ValueError, match=r"store='ram': \d+ bytes.*has 60000 bytes.*store=disk"):
        check_arguments(path, {**given, "device": "cuda:0"})
    check_arguments(path, {**given, "device": "cuda:0", "store": "disk"})
    # On a CPU the slots and the rest lie there, too.
    words = r"store='ram': \d+ bytes of experts and \d+ bytes of slots and \d+ bytes of the model's"
    with pytest.raises(ValueError, match=words):
        check_arguments(path, {**given, "device": "cpu"})
    words = r"store='disk': \d+ bytes of slots and .* has 60000 bytes.*a smaller capacity"
    with pytest.raises(ValueError, match=words):
        check_arguments(path, {**given, "device": "cpu", "store": "disk"})
    monkeypatch.setattr(assemble, "available_host_bytes", lambda: None)
    check_arguments(path, {**given, "device": "cpu"})
