"""Encoded experts kept in a folder, so that they are made once (`encoded_dir=`).

One folder for each (checkpoint, compute dtype, codec, version of its library), one safetensors file
for each layer. A file is written under another name and renamed when whole, and carries a checksum
that is compared before it is believed; what does not fit is encoded again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from lm_eval_moecache.model.precision.base import Codec
from lm_eval_moecache.model.precision.stored import Encoded, expert_matrices, matrix_shape
from lm_eval_moecache.records.files import write_whole

logger = logging.getLogger(__name__)
FORMAT = 1
"""Counts changes of what the files hold."""


class KeptEncodings:
    """The files of one run's ladder, level by level."""

    def __init__(
        self, folder: Path, identity: str, dtype: torch.dtype, codecs: Sequence[Codec]
    ) -> None:
        self._codecs = codecs
        self._folders = [folder / _digest(identity, dtype, codec) for codec in codecs]

    def has_all(self, num_layers: int) -> bool:
        """Whether every layer is there at every level, whole."""
        return all(
            _is_whole(folder / _name(layer))
            for folder in self._folders
            for layer in range(num_layers)
        )

    def read(self, layer: int, experts: nn.Module) -> dict[str, Encoded]:
        """Return a layer's encoded matrices, of files that `has_all` has found whole."""
        found: dict[str, Encoded] = {name: [] for name in expert_matrices(experts)}
        for folder, codec in zip(self._folders, self._codecs, strict=True):
            path = folder / _name(layer)
            with safe_open(path, framework="pt") as file:
                for name, stacked in expert_matrices(experts).items():
                    count = len(codec.layout(matrix_shape(experts, stacked)))
                    parts = tuple(file.get_tensor(f"{name}.{i}") for i in range(count))
                    found[name].append(parts)
        return found

    def write(self, layer: int, stored: Mapping[str, Encoded]) -> None:
        """Keep a layer's matrices; a full disk costs the next load its time and fails none."""
        for level, folder in enumerate(self._folders):
            tensors: dict[str, Tensor] = {
                f"{name}.{i}": tensor.contiguous()
                for name, levels in stored.items()
                for i, tensor in enumerate(levels[level])
            }
            try:
                _write(folder / _name(layer), tensors)
            except OSError as error:
                logger.warning("encoded_dir: %s; these experts are encoded again.", error)
                return


def _digest(identity: str, dtype: torch.dtype, codec: Codec) -> str:
    made_by = version(codec.library) if codec.library else torch.__version__
    named = [FORMAT, identity, str(dtype), type(codec).__name__, codec.group_size, made_by]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]


def _name(layer: int) -> str:
    return f"layer-{layer:03d}.safetensors"


def _sum_of(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = save(tensors)
    # The checksum goes first: a file without one is not believed, nor one with another's.
    write_whole(_sum_of(path), hashlib.sha256(data).hexdigest().encode())
    write_whole(path, data)


def _is_whole(path: Path) -> bool:
    try:
        expected = _sum_of(path).read_text()
        with path.open("rb") as file:
            found = _digest_of(file)
        if found != expected:
            logger.warning("encoded_dir: %s has other bytes than were written.", path)
            return False
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError, UnicodeDecodeError):
        return False


def _digest_of(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while data := file.read(1 << 24):
        digest.update(data)
    return digest.hexdigest()
