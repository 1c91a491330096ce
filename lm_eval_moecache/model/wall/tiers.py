"""Where absent experts lie: in host memory, or in files that are read when needed."""

from __future__ import annotations

import json
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Row = Mapping[str, Tensor]
"""Parameter name -> one expert's part of it."""
_DTYPES = {
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32},
    # What codecs store.
    **{"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32},
}


class Tier(ABC):
    """Gives the weights of any expert, to any thread."""

    @abstractmethod
    def fill(self, layer: int, expert: int, target: Row) -> None:
        """Copy an expert's weights into host memory. Raises OSError where they cannot be read."""

    def source(self, layer: int, expert: int) -> Row | None:
        """Return an expert's weights where they lie in memory that a device can copy from."""
        return None


class RamTier(Tier):
    """Experts in host memory: layer -> parameter name -> [experts, ...]."""

    def __init__(self, parameters: Sequence[dict[str, Tensor]]) -> None:
        self._parameters = parameters

    def fill(self, layer: int, expert: int, target: Row) -> None:
        for name, tensor in target.items():
            tensor.copy_(self._parameters[layer][name][expert])

    def source(self, layer: int, expert: int) -> Row:
        return {name: stacked[expert] for name, stacked in self._parameters[layer].items()}

    def pin(self) -> None:
        """Lock the memory, so that a device can copy from it at full speed; one tensor at a time.

        Copies, because a map of a file and small tensors that share a page cannot be locked where
        they are. Registered at their exact sizes: torch's own pinned memory comes in powers of
        two, 77 GB for 58. Raises OSError where the system does not lock so much.
        """
        for row in self._parameters:
            for name in row:
                row[name] = locked_copy(row[name])


def locked_copy(tensor: Tensor) -> Tensor:
    """Return a copy in memory that is locked for a CUDA device, no larger than it has to be.

    It stays locked as long as the memory is held.
    """
    copied = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    copied.copy_(tensor)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    storage = copied.untyped_storage()
    code = int(runtime.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
    if code:
        raise OSError(
            f"{storage.nbytes()} bytes of host memory cannot be locked for the GPU (CUDA error "
            f"{code}). Allowed: more memory, a higher limit of locked memory, or store=disk."
        )
    weakref.finalize(storage, runtime.cudaHostUnregister, storage.data_ptr())
    return copied


@dataclass(frozen=True, slots=True)
class Stored:
    """One layer's parameter in a safetensors file: [experts, ...] from `offset` on."""

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class DiskTier(Tier):
    """Experts in files. They are read, not mapped: a bad file is an error and no bus error."""

    def __init__(self, parameters: Sequence[Mapping[str, Stored]]) -> None:
        self._parameters = parameters
        files = {stored.file for row in parameters for stored in row.values()}
        self._descriptors = {file: os.open(file, os.O_RDONLY) for file in sorted(files)}

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_descriptors", {}).values():
            os.close(descriptor)

    def fill(self, layer: int, expert: int, target: Row) -> None:
        for name, tensor in target.items():
            stored = self._parameters[layer][name]
            data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            view = memoryview(data)
            offset = stored.offset + expert * len(view)
            while view:
                count = os.preadv(self._descriptors[stored.file], [view], offset)
                if not count:
                    raise OSError(
                        f"{stored.file} ends at byte {offset}, inside {name} of MoE layer {layer}, "
                        f"expert {expert}: the file is truncated."
                    )
                view, offset = view[count:], offset + count


def find_stored(file: Path | str, name: str) -> Stored:
    """Find a parameter in a safetensors file. Raises ValueError where the file is not sound."""
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > os.path.getsize(file):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        entry = header[name]
        start, end = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), _DTYPES[entry["dtype"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"store='disk': {file} is not a sound safetensors file with {name!r}: {error!r}"
        ) from error
    offset = 8 + length + start
    if 8 + length + end > os.path.getsize(file):
        raise ValueError(f"store='disk': {file} is truncated: {name!r} goes beyond its end.")
    return Stored(str(file), offset, shape, dtype)
