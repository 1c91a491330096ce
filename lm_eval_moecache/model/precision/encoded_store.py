"""Encoded experts kept in a folder, so that they are made once: `encoded_dir=`, and `store=disk`.

One folder for each (checkpoint, compute dtype, codec, version of its library), one safetensors file
for each layer, which has its name when it is whole. Who makes the files holds a lock meanwhile:
others wait, and use them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from lm_eval_moecache.model.precision.codecs import Codec
from lm_eval_moecache.model.precision.stored import Encoded, expert_matrices, matrix_shape
from lm_eval_moecache.records.files import PART, lock, write_whole

logger = logging.getLogger(__name__)
FORMAT = 1
"""Counts changes of what the files hold."""
_PENDING = "pending-"


class EncodedExpertStore:
    """The files of one run's ladder, level by level."""

    def __init__(
        self,
        folder: Path,
        identity: str,
        dtype: torch.dtype,
        codecs: Sequence[Codec],
        needed: int = 0,
    ) -> None:
        """`needed`: bytes that have to be free before anything is written."""
        self.parent, self.codecs, self._needed = folder, codecs, needed
        self._folders = [folder / _digest(identity, dtype, codec) for codec in codecs]
        self._count = itertools.count()

    @contextmanager
    def claimed(self, num_layers: int) -> Iterator[bool]:
        """Yield whether every layer is there; where not, nobody else writes until the block ends.

        Raises OSError where too little is free, or nothing may be written.
        """
        levels = range(len(self._folders))
        files = [self.file(level, layer) for level in levels for layer in range(num_layers)]
        with ExitStack() as stack:
            if not all(map(_is_sound, files)):
                for folder in sorted(set(self._folders)):
                    stack.enter_context(_locked(folder))
            # Another may have made them meanwhile.
            is_kept = all(map(_is_sound, files))
            if not is_kept:
                for path in [path for folder in self._folders for path in folder.iterdir()]:
                    # Left by those that were killed while they held the lock.
                    if path.name.startswith(_PENDING) or path.name.endswith(PART):
                        path.unlink(missing_ok=True)
                free = shutil.disk_usage(self.parent).free
                if free < self._needed:
                    raise OSError(
                        f"{self.parent} has {free} bytes free, the experts take {self._needed}."
                    )
            yield is_kept

    def file(self, level: int, layer: int) -> Path:
        """Return the file of a layer at a level, which may not be there."""
        return self._folders[level] / f"layer-{layer:03d}.safetensors"

    def read(self, layer: int, experts: nn.Module) -> dict[str, Encoded]:
        """Return a layer's encoded matrices, of files that are there."""
        found: dict[str, Encoded] = {name: [] for name in expert_matrices(experts)}
        for level, codec in enumerate(self.codecs):
            with safe_open(self.file(level, layer), framework="pt") as file:
                for name, stacked in expert_matrices(experts).items():
                    count = len(codec.layout(matrix_shape(experts, stacked)))
                    parts = tuple(file.get_tensor(f"{name}.{i}") for i in range(count))
                    found[name].append(parts)
        return found

    def write(self, stored: Mapping[str, Encoded]) -> list[Path]:
        """Write matrices of a layer to files of no layer yet. Raises OSError, as of a full disk."""
        pending = f"{_PENDING}{os.getpid()}-{next(self._count)}.safetensors"
        for level, folder in enumerate(self._folders):
            parts = {
                f"{name}.{i}": tensor.contiguous()
                for name, levels in stored.items()
                for i, tensor in enumerate(levels[level])
            }
            write_whole(folder / pending, save(parts))
        return [folder / pending for folder in self._folders]

    def place(self, layer: int, files: Sequence[Path]) -> None:
        """Give written files the names of their layer, under which they are found."""
        for level, file in enumerate(files):
            os.replace(file, self.file(level, layer))


def _is_sound(file: Path) -> bool:
    try:
        # Compares its header with the file's size, and reads no tensor.
        with safe_open(file, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock(descriptor):
            logger.info("%s: waiting for another run that stores experts there.", folder)
            lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def _digest(identity: str, dtype: torch.dtype, codec: Codec) -> str:
    made_by = version(codec.library) if codec.library else torch.__version__
    named = [FORMAT, identity, str(dtype), codec.kind, codec.group_size, made_by]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]
