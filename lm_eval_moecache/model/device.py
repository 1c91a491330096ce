"""Accelerators as torch's generic interface has them: which are here, their memory, their streams.

The one module that knows a vendor. What CUDA alone has (locking host memory where it lies) stands
here beside its plain fallback; nothing else in the package asks which accelerator it is. And the
host: what memory this process takes for itself, and what there is to take.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CPU = torch.device("cpu")
_UNSUPPORTED = (RuntimeError, NotImplementedError, AttributeError, TypeError, AssertionError)
"""What backends raise for a part of the generic interface that they do not have."""


def accelerator() -> str | None:
    """Return the type of this machine's accelerator (`cuda`, `xpu`, `mps` ...), if it has one."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def best_device() -> str:
    """Return the accelerator's type, or `cpu` where there is none."""
    return accelerator() or "cpu"


def devices() -> list[str]:
    """Return the names of the devices that torch has here."""
    kind = accelerator()
    if kind is None:
        return ["cpu"]
    return ["cpu", kind, *(f"{kind}:{i}" for i in range(torch.accelerator.device_count()))]


def name_of(device: torch.device) -> str:
    """Name a device as its maker does where the backend says so."""
    if device.type == "cpu":
        return f"CPU with {torch.get_num_threads()} threads"
    try:
        return str(torch.get_device_module(device).get_device_name(device))
    except _UNSUPPORTED:
        return str(device)


def synchronize(device: torch.device) -> None:
    """Return once the device has executed all it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def total_memory(device: torch.device) -> int | None:
    """Return the bytes of a device's memory, the machine's for a CPU; None where it is not told."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    module: Any = torch.get_device_module(device)
    for ask in (
        lambda: torch.accelerator.get_memory_info(device)[1],  # type: ignore[attr-defined,unused-ignore]
        lambda: module.mem_get_info(device)[1],
        lambda: module.recommended_max_memory(),  # MPS: what it may take of the machine's
    ):
        try:
            return int(ask())
        except _UNSUPPORTED:
            continue
    return None


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes that torch has taken on an accelerator; None where it is not told."""
    try:
        return int(torch.get_device_module(device).max_memory_allocated(device))
    except _UNSUPPORTED:
        return None


# --- streams ----------------------------------------------------------------------------------


def copy_stream(device: torch.device) -> torch.Stream | None:
    """Return a stream for copies beside the device's compute; None where it has no streams.

    A CPU has none. MPS has one queue, which everything goes through in order: there copies are
    made by blocking calls, exact but beside no compute.
    """
    if device.type in ("cpu", "mps"):
        return None
    return torch.Stream(device)


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Let this thread's calls go to a stream; None for the one they go to anyway."""
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@cache
def can_time(device: torch.device) -> bool:
    """Whether the device's events tell the time between them."""
    try:
        start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        stream = torch.accelerator.current_stream(device)
        start.record(stream)
        end.record(stream)
        end.synchronize()
        return start.elapsed_time(end) >= 0
    except _UNSUPPORTED:
        return False


# --- numbers of a layer, or a pass --------------------------------------------------------------


def copy_to_host(tensors: Sequence[Tensor], valid: NDArray[np.bool_] | None) -> list[Any]:
    """Return each [..., n] tensor as an array [T, n], of the `valid` tokens where some are not.

    From a device in a single transfer, as float32, which holds whole numbers below 2^24 exactly:
    experts' numbers, too. In host memory they are looked at where they lie.
    """
    if all([values.is_cpu for values in tensors]):
        arrays = [_rows(values.detach().numpy()) for values in tensors]
    else:
        rows = [_rows(values.detach()) for values in tensors]
        packed = torch.cat([row.float().ravel() for row in rows]).cpu().numpy()
        arrays, start = [], 0
        for row in rows:
            arrays.append(packed[start : start + row.numel()].reshape(row.shape))
            start += row.numel()
    return arrays if valid is None else [array[valid] for array in arrays]


def copy_to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return host numbers, an array or a tensor, on a device, without a wait for it.

    They are copied out of pageable memory before this returns, so they may go or change at once.
    """
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    return tensor.to(device=device, dtype=dtype or tensor.dtype, non_blocking=True)


def _rows(values: Any) -> Any:
    return values if values.ndim == 2 else values.reshape(-1, values.shape[-1])


# --- host memory that a device copies from ----------------------------------------------------

PORTABLE = 1
"""cudaHostRegisterPortable: locked for every device, whichever is the thread's own."""


@cache
def can_lock() -> bool:
    """Whether the accelerator copies faster from host memory that is locked."""
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except _UNSUPPORTED:
        return False


def locked_copy(tensor: Tensor) -> Tensor:
    """Return a copy in `locked_empty`."""
    locked = locked_empty(tuple(tensor.shape), tensor.dtype)
    locked.copy_(tensor)
    return locked


def locked_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return host memory that the accelerator copies from at full speed.

    For CUDA whole pages of its own, so many and no more: torch's own pinned memory comes in powers
    of two, 77 GB for 58. It stays locked as long as it is held. Elsewhere torch's, and plain memory
    where a backend has none. Raises OSError where the system does not lock so much.
    """
    if accelerator() != "cuda":
        return torch.empty(shape, dtype=dtype, pin_memory=can_lock())
    nbytes = math.prod(shape) * dtype.itemsize
    # Anonymous memory begins with a page, and a page that two tensors shared could not be locked
    # for both; private, as all that is this process' own.
    private = getattr(mmap, "MAP_PRIVATE", None)
    given = {} if private is None else {"flags": private | mmap.MAP_ANONYMOUS}
    buffer = mmap.mmap(-1, nbytes, **given)
    made = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes).view(dtype).reshape(shape)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    storage = made.untyped_storage()
    code = int(runtime.cudaHostRegister(storage.data_ptr(), storage.nbytes(), PORTABLE))
    if code:
        raise OSError(
            f"{storage.nbytes()} bytes of host memory cannot be locked for the GPU (CUDA error "
            f"{code}). Allowed: more memory, a higher limit of locked memory, or store=disk."
        )
    weakref.finalize(storage, runtime.cudaHostUnregister, storage.data_ptr())
    return made


# --- host memory that there is, and that this process has ---------------------------------------

_EVERY_S = 0.02
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_LIMIT = {"": "memory.max", "memory": "memory.limit_in_bytes"}
_USE = {"": "memory.current", "memory": "memory.usage_in_bytes"}
"""Controller in a line of /proc/self/cgroup (none: version 2) -> file of its figure."""


def own_bytes() -> int | None:
    """Return the memory that is this process' alone or shared by it; None where it is not told.

    Maps of files do not count: the system takes their pages back when it needs them.
    """
    found = re.findall(r"(?:RssAnon|RssShmem):\s+(\d+) kB", _text(_PROC / "self/status"))
    return sum(map(int, found)) * 1024 if found else None


@contextmanager
def watched() -> Iterator[list[int]]:
    """Look at `own_bytes` every few milliseconds of a block; yield what was the most, if told."""
    peak: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while (now := own_bytes()) is not None:
            peak[:] = [max([now, *peak])]
            if done.wait(_EVERY_S):
                return

    thread = threading.Thread(target=watch, name="moecache-memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def available_host_bytes() -> int | None:
    """Return what can be taken without swapping, or beyond a control group's limit.

    None where the system does not say.
    """
    found = re.search(r"MemAvailable:\s+(\d+) kB", _text(_PROC / "meminfo"))
    rooms = [int(found[1]) * 1024] if found else []
    for line in _text(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for kind in _LIMIT:
            if kind in controllers.split(","):
                rooms += _rooms(kind, path)
    return min(rooms, default=None)


def _rooms(kind: str, path: str) -> Iterator[int]:
    """Return what a control group and those above it leave, cached files not counted as used."""
    group = Path(path.lstrip("/"))
    for place in (group, *group.parents):
        # A container may see its own group as the root.
        folder = _GROUPS / kind / place
        limit, used = _number(folder / _LIMIT[kind]), _number(folder / _USE[kind])
        if limit is not None and used is not None:
            cached = re.search(
                r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat"), re.M
            )
            yield max(0, limit - used + (int(cached[1]) if cached else 0))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
