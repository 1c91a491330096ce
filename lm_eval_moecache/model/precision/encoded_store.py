"""Encoded experts kept in a folder, so that they are made once: `encoded_dir=`, and `store=disk`.

One folder for each (checkpoint, compute dtype, codec, version of its library), one safetensors file
for each layer. A file is written under another name and renamed when whole, and carries a checksum
that is compared before it is believed; what does not fit is encoded again. Who makes the files
holds a lock meanwhile: others wait, and use them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from lm_eval_moecache.model.precision.base import Codec
from lm_eval_moecache.model.precision.stored import Encoded, expert_matrices, matrix_shape
from lm_eval_moecache.model.precision.whole import WholeFile
from lm_eval_moecache.records.files import PART, lock, write_whole

logger = logging.getLogger(__name__)
FORMAT = 1
"""Counts changes of what the files hold."""
ABOUT = "about.json"
"""Says what a folder's files were made of."""
_PENDING = "pending-"
_HASHERS = 4


class EncodedExpertStore:
    """The files of one run's ladder, level by level."""

    def __init__(
        self,
        folder: Path,
        identity: str,
        dtype: torch.dtype,
        codecs: Sequence[Codec],
        *,
        thorough: bool = True,
        needed: int = 0,
    ) -> None:
        """`thorough`: checksums are compared even of files that are as old as when they were.

        Where not, size and time of a file say whether it has to be read for that: a store on disk
        is believed in the time that it takes to look, as a checkpoint is. `needed`: bytes that have
        to be free before anything is written.
        """
        self.parent, self._identity, self.codecs = folder, identity, codecs
        self._thorough, self._needed = thorough, needed
        self._folders = [folder / _digest(identity, dtype, codec) for codec in codecs]
        self._count = itertools.count()

    @contextmanager
    def claimed(self, num_layers: int) -> Iterator[bool]:
        """Hold the files: for reading where `has_all` (which is yielded), and else for writing.

        Raises OSError where too little is free, or nothing may be written.
        """
        with ExitStack() as held:
            for shared in (True, False):
                stack = held.enter_context(ExitStack())
                for folder in sorted(set(self._folders)):
                    stack.enter_context(_locked(folder, shared))
                if self.has_all(num_layers):
                    yield True
                    return
                if shared:
                    stack.close()
            for folder in self._folders:
                self._begin(folder)
            free = shutil.disk_usage(self.parent).free
            if free < self._needed:
                raise OSError(
                    f"{self.parent} has {free} bytes free, the experts take {self._needed}."
                )
            yield False

    def has_all(self, num_layers: int) -> bool:
        """Whether every layer is there at every level, whole."""
        files = [
            self.file(level, layer)
            for level in range(len(self._folders))
            for layer in range(num_layers)
        ]
        if not all(file.path.exists() for file in files):
            return False
        with ThreadPoolExecutor(_HASHERS) as pool:
            return all(pool.map(lambda file: file.is_sound(self._thorough), files))

    def file(self, level: int, layer: int) -> WholeFile:
        """Return the file of a layer at a level, which may not be there."""
        return WholeFile(self._folders[level] / f"layer-{layer:03d}.safetensors")

    def read(self, layer: int, experts: nn.Module) -> dict[str, Encoded]:
        """Return a layer's encoded matrices, of files that `has_all` has found whole."""
        found: dict[str, Encoded] = {name: [] for name in expert_matrices(experts)}
        for level, codec in enumerate(self.codecs):
            with safe_open(self.file(level, layer).path, framework="pt") as file:
                for name, stacked in expert_matrices(experts).items():
                    count = len(codec.layout(matrix_shape(experts, stacked)))
                    parts = tuple(file.get_tensor(f"{name}.{i}") for i in range(count))
                    found[name].append(parts)
        return found

    def write(self, stored: Mapping[str, Encoded]) -> list[WholeFile]:
        """Write matrices of a layer to files of no layer yet. Raises OSError, as of a full disk."""
        pending = f"{_PENDING}{os.getpid()}-{next(self._count)}.safetensors"
        found = []
        for level, folder in enumerate(self._folders):
            tensors: dict[str, Tensor] = {
                f"{name}.{i}": tensor.contiguous()
                for name, levels in stored.items()
                for i, tensor in enumerate(levels[level])
            }
            found.append(WholeFile(folder / pending))
            found[-1].write(save(tensors))
        return found

    def place(self, layer: int, files: Sequence[WholeFile]) -> None:
        """Give written files the names of their layer, under which they are found."""
        for level, file in enumerate(files):
            file.move(self.file(level, layer))

    def _begin(self, folder: Path) -> None:
        """Clear what was left by those that were killed, or was made of what is no more."""
        for path in folder.iterdir():
            if path.name.startswith(_PENDING) or path.name.endswith(PART):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # A full disk is told by what has to be written.
            write_whole(folder / ABOUT, json.dumps({"identity": self._identity}).encode())
        for other in sorted(self.parent.glob(f"*/{ABOUT}")):
            if other.parent not in self._folders and _is_former(other, self._identity):
                with _locked(other.parent, shared=False, wait=False) as is_ours:
                    if is_ours:
                        shutil.rmtree(other.parent, ignore_errors=True)
                        logger.warning("removed %s: the checkpoint has changed.", other.parent)


@contextmanager
def _locked(folder: Path, shared: bool, wait: bool = True) -> Iterator[bool]:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        is_ours = lock(descriptor, shared=shared)
        if wait and not is_ours:
            logger.info("%s: waiting for another run that stores experts there.", folder)
            is_ours = lock(descriptor, wait=True, shared=shared)
        yield is_ours
    finally:
        os.close(descriptor)


def _is_former(about: Path, identity: str) -> bool:
    """Whether files were made of weights in the same place that were other ones."""
    try:
        found = json.loads(about.read_text())["identity"]
        place, revision, _ = json.loads(found)
        return bool(found != identity and [place, revision] == json.loads(identity)[:2])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(identity: str, dtype: torch.dtype, codec: Codec) -> str:
    made_by = version(codec.library) if codec.library else torch.__version__
    named = [FORMAT, identity, str(dtype), type(codec).__name__, codec.group_size, made_by]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]
