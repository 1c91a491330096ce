"""An accelerator for every machine: memory of its own, and streams that a script schedules.

It is a torch backend in Python (`PrivateUse1`, named `scripted`) whose tensors keep CPU tensors out
of reach: whatever brings their numbers to the host goes through `_to_copy` or `item`, which wait
for the stream. A launched call is queued on its thread's stream and executed later:

- `compute_late`: copies run as soon as their fences allow, kernels only when waited for: exposes
  writes before the readers are done.
- `copies_late`: kernels run at once, copies only when waited for: exposes reads before arrival, and
  staging buffers filled too early.
- `drawn`: streams run a few of their calls at a time, drawn by a seed.

Float memory holds NaN until it is written. Calls that a device would refuse, or that would silently
be slow or a race there, raise `Misuse`.
"""

from __future__ import annotations

import functools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

NAME = "scripted"
SCRIPTS = ("compute_late", "copies_late", "drawn")
_WAITING = ("nonzero", "unique", "bincount", "equal", "masked_select", "is_nonzero", "item")
_LOOK = "_local_scalar_dense"


class Misuse(AssertionError):
    """A call that is wrong on a device, whatever it gives on a CPU."""


class Event:
    """A mark in a stream."""

    def __init__(self, device: Any = None, enable_timing: bool = False) -> None:
        self.timed, self.reached = enable_timing, True
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream, self.reached = stream, False
        DEVICE.launch(stream, self._reach)

    def _reach(self) -> None:
        self.reached = True

    def synchronize(self) -> None:
        with DEVICE.lock:
            if self.stream is not None:
                self.stream.run_until(self)

    def elapsed_time(self, other: Event) -> float:
        if not (self.timed and other.timed and self.reached and other.reached):
            raise Misuse("time between events that tell none, or are not reached")
        return 0.25


class Stream:
    """Calls in order, executed as the script schedules them."""

    def __init__(self, device: Any = None, name: str = "copies") -> None:
        self.name = name
        self.calls: deque[Callable[[], object] | Event] = deque()
        self.free: dict[int, list[Any]] = {}
        """Size in bytes -> storages that were taken on this stream and are free again."""
        if device is not None:
            DEVICE.streams.append(self)

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, Event):
            raise Misuse(f"waits for {event!r}")
        DEVICE.launch(self, event)

    def synchronize(self) -> None:
        with DEVICE.lock:
            self.run_until(None)

    def run_until(self, event: Event | None) -> None:
        """Run until an event is reached, or all; run other streams as far as this one waits."""
        while self.calls and not (event is not None and event.reached):
            head = self.calls[0]
            if isinstance(head, Event) and not head.reached:
                assert head.stream is not None
                head.stream.run_until(head)
            self.step()

    def can_step(self) -> bool:
        return bool(self.calls) and getattr(self.calls[0], "reached", True)

    def step(self) -> None:
        call = self.calls.popleft()
        if not isinstance(call, Event):
            call()


class Device:
    """The device's one state: its streams, the script, each thread's stream."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.on = False
        self.begin("copies_late", 0)

    def begin(self, script: str, seed: int = 0) -> None:
        self.script, self.drawn = script, random.Random(seed)
        self._own = threading.local()
        self.compute, self.streams = Stream(name="compute"), list[Stream]()
        self.locked = dict[int, Tensor]()
        self.owners = dict[int, Stream]()
        self.waits = 0
        self.pending = 0
        """How many waits were launched for events that were not reached yet."""

    @property
    def stream(self) -> Stream:
        return getattr(self._own, "stream", None) or self.compute

    def set_stream(self, stream: Stream) -> None:
        self._own.stream = stream

    def launch(self, stream: Stream, call: Callable[[], object] | Event) -> None:
        with self.lock:
            self.pending += isinstance(call, Event) and not call.reached
            stream.calls.append(call)
            all_streams = [self.compute, *self.streams]
            if self.script == "drawn":
                for _ in range(self.drawn.randrange(4)):
                    picked = self.drawn.choice(all_streams)
                    if picked.can_step():
                        picked.step()
                return
            early = [
                s for s in all_streams if (s is self.compute) == (self.script == "copies_late")
            ]
            while ready := [s for s in early if s.can_step()]:
                for runnable in ready:
                    runnable.step()

    def wait(self) -> None:
        """Make the host wait for this thread's stream.

        Some copies bypass `_dispatch` and its lock, as torch.tensor's do. Two threads that step
        one stream would begin a call before the one it reads from has ended.
        """
        with self.lock:
            self.waits += 1
            self.stream.run_until(None)

    def empty(self, size: Any, stride: Any, dtype: torch.dtype | None) -> DeviceTensor:
        dtype = dtype or torch.get_default_dtype()
        inner = torch.empty_strided(size, stride, dtype=dtype)
        stream = self.stream
        free = stream.free.get(inner.untyped_storage().nbytes())
        if free:
            # Not cleared: a late reader still sees the old numbers, until they are overwritten.
            inner = torch.empty(0, dtype=dtype).set_(free.pop(), 0, size, stride)
        else:
            _poison(inner)
        address = inner.untyped_storage().data_ptr()
        self.owners[address] = stream
        tensor = DeviceTensor(inner)
        if stream is not self.compute:
            weakref.finalize(tensor, self._free, stream, inner.untyped_storage())
        return tensor

    def _free(self, stream: Stream, storage: Any) -> None:
        """Return memory as torch does: at once, to the stream that took it.

        Views are not tracked: slots are dropped whole.
        """
        if stream in self.streams:
            stream.free.setdefault(storage.nbytes(), []).append(storage)

    def lock_memory(self, shape: Any, dtype: torch.dtype) -> Tensor:
        memory = torch.empty(shape, dtype=dtype)
        self.locked[memory.untyped_storage().data_ptr()] = memory
        return memory

    def is_locked(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.locked


def _poison(inner: Tensor) -> None:
    """Fill memory with bytes that are NaN in every float type, or 1 elsewhere."""
    whole = torch.empty(0, dtype=torch.uint8).set_(inner.untyped_storage())
    whole.fill_(255 if inner.is_floating_point() else 1)


class DeviceTensor(torch.Tensor):
    """A tensor of the device; `inner` holds its numbers, which only the device reads."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.inner = inner
        return tensor

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise Misuse("numpy() of the device's memory")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DEVICE.lock:
            return _dispatch(func, args, kwargs or {})


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, DeviceTensor) else value


def _wrapped(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) else value


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.partition("::")[2]
    if name == "copy_":
        return _copy(*args, **kwargs)
    if name == "_to_copy":
        return _to_copy(*args, **kwargs)
    flat = tree_flatten((args, kwargs))[0]
    for value in flat:
        if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) and value.dim():
            raise Misuse(f"{name}: a tensor of the CPU among the device's")
    kwargs.pop("device", None), kwargs.pop("pin_memory", None)
    inner_args, inner_kwargs = tree_map(_inner, args), tree_map(_inner, kwargs)
    if name == "histc":  # The CPU's does not count integers.
        return _launch(_count, inner_args, inner_kwargs)
    results = func._schema.returns
    if results and all(r.alias_info and not r.alias_info.is_write for r in results):
        return tree_map(_wrapped, func(*inner_args, **inner_kwargs))  # a view: nothing is computed
    has_mask = any(isinstance(v, DeviceTensor) and v.dtype == torch.bool for v in flat)
    if name in _WAITING or name.startswith("_unique") or (has_mask and name.startswith("index")):
        DEVICE.wait()
        return tree_map(_wrapped, func(*inner_args, **inner_kwargs))
    if name == _LOOK:
        DEVICE.wait()
        return func(*inner_args)
    written = [a for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    if written:
        DEVICE.launch(DEVICE.stream, functools.partial(func, *inner_args, **inner_kwargs))
        return _first_written(func, args, kwargs, written)
    return _launch(func, inner_args, inner_kwargs)


def _count(values: Tensor, *given: Any, **named: Any) -> Tensor:
    return torch.histc(values.float(), *given, **named).to(values.dtype)


def _first_written(func: Any, args: Any, kwargs: Any, written: Any) -> Any:
    positions = {a.name: i for i, a in enumerate(func._schema.arguments)}
    targets = [kwargs[a.name] if a.name in kwargs else args[positions[a.name]] for a in written]
    return targets[0] if len(targets) == 1 else tuple(targets)


_SHAPES: dict[tuple[Any, ...], Any] = {}
"""A call's results on the meta device, cached: the query takes longer than the call."""


def _shape(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and value.dim() else value


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dim() and (value.shape, value.stride(), value.dtype)
    return tuple(map(_key, value)) if isinstance(value, (list, tuple)) else value


def _launch(func: Any, args: Any, kwargs: Any) -> Any:
    """Queue a call on the stream; its results are allocated at once."""
    key = (func, _key(args), _key(sorted(kwargs.items())))
    if key not in _SHAPES:
        try:
            _SHAPES[key] = func(*tree_map(_shape, args), **tree_map(_shape, kwargs))
        except (NotImplementedError, RuntimeError):
            DEVICE.wait()
            return tree_map(_wrapped, func(*args, **kwargs))
    shapes = _SHAPES[key]
    templates = (shapes,) if isinstance(shapes, Tensor) else shapes
    results = [DEVICE.empty(m.size(), m.stride(), m.dtype) for m in templates]

    def run() -> None:
        with torch.no_grad():
            computed = func(*args, **kwargs)
        for target, value in zip(
            results, (computed,) if len(templates) == 1 else computed, strict=True
        ):
            target.inner.copy_(value)

    DEVICE.launch(DEVICE.stream, run)
    return results[0] if isinstance(shapes, Tensor) else type(shapes)(results)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    stream = DEVICE.stream
    if not isinstance(target, DeviceTensor):
        assert isinstance(source, DeviceTensor)
        DEVICE.wait()
        return target.copy_(source.inner)
    if not isinstance(source, DeviceTensor):
        if stream is not DEVICE.compute:
            if not (non_blocking and DEVICE.is_locked(source)):
                raise Misuse("a copy during the compute that is pageable, or that blocks")
            owner = DEVICE.owners.get(target.inner.untyped_storage().data_ptr())
            if owner is not stream and target.inner.untyped_storage().data_ptr() not in KEPT:
                raise Misuse("a copy into memory of another stream, which may give it away")
        else:
            source = source.clone()  # pageable memory is read before the call returns
    launched, numbers = target.inner, _inner(source)
    DEVICE.launch(stream, lambda: launched.copy_(numbers))
    if not non_blocking and not isinstance(source, DeviceTensor):
        DEVICE.wait()
    return target


def _to_copy(source: Tensor, **given: Any) -> Any:
    device = given.get("device")
    if device is not None and torch.device(device).type == "cpu":
        DEVICE.wait()
        return _inner(source).to(dtype=given.get("dtype") or source.dtype, copy=True)
    assert isinstance(source, DeviceTensor)
    given = {k: v for k, v in given.items() if k in ("dtype", "memory_format") and v is not None}
    return _launch(torch.ops.aten._to_copy.default, (source.inner,), given)


KEPT: set[int] = set()
"""Memory that lives as long as the streams: pools of slots."""
DEVICE = Device()


# --- the backend ------------------------------------------------------------------------------


@functools.cache
def _register() -> bool:
    """Register the backend with torch, switched off; False where torch cannot have one."""
    try:
        from torch.utils import backend_registration as registration

        hooks: Any = registration._DummyPrivateUse1Hook  # type: ignore[attr-defined]
        modules: Any = registration._DummyBackendModule  # type: ignore[attr-defined]
        setup: Any = registration._setup_privateuseone_for_python_backend
    except (ImportError, AttributeError):
        return False

    class Hook(hooks):  # type: ignore[misc]
        def is_available(self) -> bool:
            return DEVICE.on

    class Module(modules):  # type: ignore[misc]
        def is_available(self) -> bool:
            return DEVICE.on

        def get_device_name(self, device: Any = None) -> str:
            return "scripted streams on a CPU"

    _register.held = hook = Hook()  # type: ignore[attr-defined]
    setup(NAME, backend_module=Module(), hook=hook)
    library = torch.library.Library("aten", "IMPL")
    _register.library = library  # type: ignore[attr-defined]

    def empty(size: Any, dtype: Any = None, *rest: Any, **more: Any) -> DeviceTensor:
        return DEVICE.empty(size, torch.empty(size, device="meta").stride(), dtype)

    def empty_strided(size: Any, stride: Any, dtype: Any = None, **more: Any) -> DeviceTensor:
        return DEVICE.empty(size, stride, dtype)

    def arange(*bounds: Any, dtype: Any = None, **more: Any) -> Any:
        return torch.arange(*bounds, dtype=dtype).to(NAME)

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        return _copy(target, source, non_blocking)

    library.impl("_copy_from", copy_from, "PrivateUse1")
    for overload in ("arange", "arange.start", "arange.start_step"):
        library.impl(overload, arange, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    return True


@contextmanager
def scripted(script: str, seed: int = 0) -> Iterator[Device]:
    """Give this machine the device within a block. Skips where torch cannot have one."""
    if not _register():
        pytest.skip("this torch has no backends in Python")
    from lm_eval_moecache.model import device
    from lm_eval_moecache.model.wall import pools

    DEVICE.begin(script, seed)
    KEPT.clear()
    make_pools = pools.SlotPools.__init__

    def kept(self: Any, *args: Any, **given: Any) -> None:
        make_pools(self, *args, **given)
        for pool in self._pools:
            KEPT.update(t.inner.untyped_storage().data_ptr() for t in pool.values())

    def lock_copy(tensor: Tensor) -> Tensor:
        return DEVICE.lock_memory(tensor.shape, tensor.dtype).copy_(tensor)

    with ExitStack() as stack:
        for owner, name, value in (
            (torch, "Stream", Stream),
            (torch, "Event", Event),
            (torch.accelerator, "current_stream", lambda device=None: DEVICE.stream),
            (torch.accelerator, "set_stream", DEVICE.set_stream),
            (torch.accelerator, "synchronize", lambda device=None: DEVICE.compute.synchronize()),
            (device, "can_lock", lambda: True),
            (pools, "can_lock", lambda: True),
            (pools, "locked_copy", lock_copy),
            (pools, "locked_empty", DEVICE.lock_memory),
            (pools, "can_time", lambda device: True),
            (pools.SlotPools, "__init__", kept),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        DEVICE.on = True
        try:
            yield DEVICE
        finally:
            DEVICE.on = False
            DEVICE.compute.synchronize()
