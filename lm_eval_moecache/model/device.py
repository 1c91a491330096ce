"""Accelerators through torch's generic interface: devices, memory and streams; and host memory.

The only vendor-specific module: what CUDA alone has (locking host memory in place) is here
next to its plain fallback, and nothing else in the package asks which accelerator it runs on.
"""

from __future__ import annotations

import math
import mmap
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

CPU = torch.device("cpu")
_UNSUPPORTED = (RuntimeError, NotImplementedError, AttributeError, TypeError, AssertionError)
"""Raised by backends for parts of the generic interface that they lack."""


def accelerator() -> str | None:
    """Return the type of this machine's accelerator (`cuda`, `xpu`, `mps` ...), or None."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def best_device() -> str:
    """Return the accelerator's type, or `cpu` where there is none."""
    return accelerator() or "cpu"


def devices() -> list[str]:
    """Return the names of the devices that torch has here."""
    kind = accelerator()
    if kind is None:
        return ["cpu"]
    return ["cpu", kind, *(f"{kind}:{i}" for i in range(torch.accelerator.device_count()))]


def device_of(model: Any) -> torch.device:
    """Return the device that computes a model, to which its tokens go.

    `model.device` is where its first parameter lies: on no device, or on the host, where accelerate
    fetches weights for each call (`parallelize=True`).
    """
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        if (device := getattr(hook, "execution_device", None)) is not None:
            return torch.device(device)
    own: torch.device = model.device
    return own


def name_of(device: torch.device) -> str:
    """Return a device's display name: the vendor's where the backend reports one."""
    if device.type == "cpu":
        return f"CPU with {torch.get_num_threads()} threads"
    try:
        return str(torch.get_device_module(device).get_device_name(device))
    except _UNSUPPORTED:
        return str(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has executed all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(work: Callable[[], object], device: torch.device, times: int) -> list[float]:
    """Return the seconds of some calls, after one that also allocates and compiles."""
    seconds = []
    for _ in range(1 + times):
        synchronize(device)
        start_s = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - start_s)
    return seconds[1:]


def total_memory(device: torch.device) -> int | None:
    """Return the bytes of a device's memory (the machine's for a CPU); None where unknown."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().total)
    module: Any = torch.get_device_module(device)
    for query in (
        lambda: torch.accelerator.get_memory_info(device)[1],  # type: ignore[attr-defined,unused-ignore]
        lambda: module.mem_get_info(device)[1],
        lambda: module.recommended_max_memory(),  # MPS: what it may take of the machine's
    ):
        try:
            return int(query())
        except _UNSUPPORTED:
            continue
    return None


# --- streams ----------------------------------------------------------------------------------


def copy_stream(device: torch.device) -> torch.Stream | None:
    """Return a stream for copies that overlap compute; None where the device has no streams.

    A CPU has none. MPS has a single in-order queue: there copies are blocking calls, exact but
    without overlap.
    """
    if device.type in ("cpu", "mps"):
        return None
    return torch.Stream(device)


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Run this thread's calls on a stream; None leaves the current one."""
    if stream is None:
        yield
        return
    previous = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(previous)


@cache
def can_time(device: torch.device) -> bool:
    """Whether the device's events can measure elapsed time."""
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


def copy_to_host(tensors: Sequence[Tensor]) -> list[Any]:
    """Return each [..., n] tensor as an array [T, n].

    Device tensors arrive in a single transfer as float32, exact for integers below 2^24 such as
    expert indices. Host tensors are viewed in place.
    """
    if all([values.is_cpu for values in tensors]):
        return [rows_of(_plain(values)).numpy() for values in tensors]
    rows = [rows_of(values.detach()) for values in tensors]
    packed = torch.cat([row.float().ravel() for row in rows]).cpu()
    parts = torch.split(packed, [row.numel() for row in rows])
    return [part.view(row.shape).numpy() for part, row in zip(parts, rows, strict=True)]


def copy_to_device(values: Any, device: torch.device) -> Tensor:
    """Return a host array or tensor on a device, without waiting for it.

    Pageable memory is read before this returns, so the source may be freed or changed at once.
    """
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    return tensor.to(device=device, non_blocking=True)


def copies_on_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return host arrays on a device, without waiting for it.

    They travel in a single transfer as float32, exact for integers below 2^24, and keep their
    types. For a CPU they are viewed in place.
    """
    tensors = [torch.from_numpy(values) for values in arrays]
    if device.type == "cpu":
        return tensors
    packed = copy_to_device(torch.cat([values.ravel().float() for values in tensors]), device)
    parts = torch.split(packed, [values.numel() for values in tensors])
    return [part.view(t.shape).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]


def rows_of(values: Tensor) -> Tensor:
    """Return [..., n] values as [T, n]."""
    return values if values.dim() == 2 else values.reshape(-1, values.shape[-1])


def _plain(values: Tensor) -> Tensor:
    return values.detach() if values.requires_grad else values


def as_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `values.to(dtype)`; to ask torch for what is there takes 30 times as long."""
    return values if values.dtype == dtype else values.to(dtype)


# --- host memory that a device copies from ----------------------------------------------------

PORTABLE = 1
"""cudaHostRegisterPortable: locked for every device, not only the thread's current one."""


@cache
def can_lock() -> bool:
    """Whether host memory can be page-locked, so that the accelerator copies from it faster."""
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except _UNSUPPORTED:
        return False


def locked_copy(tensor: Tensor) -> Tensor:
    """Return a copy in `locked_empty` memory."""
    locked = locked_empty(tuple(tensor.shape), tensor.dtype)
    locked.copy_(tensor)
    return locked


def locked_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return host memory that the accelerator copies from at full speed.

    On CUDA it takes exactly the pages it needs: torch's pinned allocator rounds up to powers of
    two, 77 GB for 58. It stays locked while referenced. Elsewhere it is torch's pinned memory, or
    plain memory where a backend has none. Raises OSError where the system will not lock that much.
    """
    if accelerator() != "cuda":
        return torch.empty(shape, dtype=dtype, pin_memory=can_lock())
    nbytes = math.prod(shape) * dtype.itemsize
    # An anonymous mapping starts on a page of its own: a page shared by two tensors could not be
    # locked for both. Private, like all other memory of this process.
    private = getattr(mmap, "MAP_PRIVATE", None)
    flags = {} if private is None else {"flags": private | mmap.MAP_ANONYMOUS}
    buffer = mmap.mmap(-1, nbytes, **flags)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes).view(dtype).reshape(shape)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    storage = tensor.untyped_storage()
    code = int(runtime.cudaHostRegister(storage.data_ptr(), storage.nbytes(), PORTABLE))
    if code:
        raise OSError(
            f"{storage.nbytes()} bytes of host memory cannot be locked for the GPU (CUDA error "
            f"{code}). Allowed: more memory, a higher limit of locked memory, or store=disk."
        )
    weakref.finalize(storage, runtime.cudaHostUnregister, storage.data_ptr())
    return tensor


# --- host memory that is available --------------------------------------------------------------

_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Controller in a line of /proc/self/cgroup (empty: version 2) -> files of its limit and use."""


def available_host_bytes() -> int:
    """Return the bytes that can be allocated without swapping or exceeding a cgroup's limit."""
    rooms = [int(psutil.virtual_memory().available)]
    for line in _text(_OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        for kind in _FILES.keys() & {*controllers.split(",")}:
            rooms += _rooms(kind, path)
    return min(rooms)


def _rooms(kind: str, path: str) -> Iterator[int]:
    """Yield the bytes left in a control group and its parents; cached files count as free."""
    group = Path(path.lstrip("/"))
    for place in (group, *group.parents):
        # A container may see its own group as the root.
        folder = _GROUPS / kind / place
        limit, used = (_number(folder / name) for name in _FILES[kind])
        if limit is not None and used is not None:
            stat = _text(folder / "memory.stat")
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.M)
            yield max(0, limit - used + (int(cached[1]) if cached else 0))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
