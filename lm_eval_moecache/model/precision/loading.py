"""Encodes a model's experts while it loads, and keeps them in a folder for later loads.

One layer at a time is at full precision. With `encoded_dir=`, and with `store=disk`, experts are
encoded once: a folder for each (checkpoint, compute dtype, codec, version of its library) has a
safetensors file for each layer, which gets its name once it is complete. The run that writes holds
a lock: others wait, then use its files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import nn
from tqdm import tqdm

from lm_eval_moecache.model.checkpoint import leaving_out
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.precision.codecs import (
    Codec,
    Encoded,
    encode,
    expert_matrices,
    is_matrices,
    shape_without_memory,
    takes_no_memory,
)
from lm_eval_moecache.records.files import PART, replace, write_whole

logger = logging.getLogger(__name__)
FORMAT = 1
"""Version of the files' contents."""
_PENDING = "pending-"
_LOCK = ".lock"


class EncodedExpertStore:
    """The encoded experts of one run's ladder: a folder per level, a file per layer."""

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
        self._folders: list[Path] = []
        for codec in codecs:
            release = version(codec.library) if codec.library else torch.__version__
            inputs = [FORMAT, identity, str(dtype), codec.kind, codec.group_size, release]
            digest = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
            self._folders.append(folder / digest[:32])
        self._count = itertools.count()

    @contextmanager
    def claimed(self, num_layers: int) -> Iterator[bool]:
        """Yield whether every layer is stored; if not, no other run writes until the block ends.

        Raises OSError where too little space is free, or the folder cannot be written.
        """
        levels = range(len(self._folders))
        files = [self.file(level, layer) for level in levels for layer in range(num_layers)]
        with ExitStack() as stack:
            if not all(map(_is_sound, files)):
                for folder in sorted(set(self._folders)):
                    folder.mkdir(parents=True, exist_ok=True)
                    lock = FileLock(folder / _LOCK)
                    try:
                        lock.acquire(timeout=0)
                    except Timeout:
                        logger.info("%s: another run stores experts there; waiting.", folder)
                        lock.acquire()
                    stack.callback(lock.release)
            # Another run may have written them meanwhile.
            is_stored = all(map(_is_sound, files))
            if not is_stored:
                for path in [path for folder in self._folders for path in folder.iterdir()]:
                    # Left by runs that were killed while they held the lock.
                    if path.name.startswith(_PENDING) or path.name.endswith(PART):
                        path.unlink(missing_ok=True)
                free = shutil.disk_usage(self.parent).free
                if free < self._needed:
                    raise OSError(
                        f"{self.parent} has {free} bytes free, the experts take {self._needed}."
                    )
            yield is_stored

    def file(self, level: int, layer: int) -> Path:
        """Return the file of a layer at a level, which need not exist."""
        return self._folders[level] / f"layer-{layer:03d}.safetensors"

    def read(self, layer: int) -> Encoded:
        """Return a layer's encoded matrices, from files that exist."""
        return [load_file(self.file(level, layer)) for level in range(len(self.codecs))]

    def write(self, stored: Encoded) -> list[Path]:
        """Write a layer's matrices to pending files, one per level. OSError, as on a full disk."""
        pending = f"{_PENDING}{os.getpid()}-{next(self._count)}.safetensors"
        for folder, parts in zip(self._folders, stored, strict=True):
            write_whole(folder / pending, save({n: t.contiguous() for n, t in parts.items()}))
        return [folder / pending for folder in self._folders]

    def place(self, layer: int, files: Sequence[Path]) -> None:
        """Rename pending files to their layer's names, under which `file` finds them."""
        for level, file in enumerate(files):
            replace(file, self.file(level, layer))


def _is_sound(file: Path) -> bool:
    try:
        # Opening compares the header with the file's size and reads no tensor.
        with safe_open(file, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


_HELD, _WRITTEN, _IS_STORED = "moecache_encoded", "moecache_written", "moecache_is_stored"
# transformers reads ahead in threads, as fast as the disk is, unless this is set.
_IN_ORDER = "HF_DEACTIVATE_ASYNC_LOAD"


@contextmanager
def encoding(
    skeleton: Sequence[MoELayer],
    codecs: Sequence[Codec],
    encoded_store: EncodedExpertStore | None = None,
    *,
    release: bool = False,
) -> Iterator[None]:
    """Encode each expert matrix as `from_pretrained` sets it.

    Within the block, setting a matrix on a module of the skeleton's experts classes leaves a shape
    without memory there. `take` collects the encoded matrices before the block ends. If the store
    has all of them, nothing is encoded and the matrices are not read. With `release` a layer is
    written to its files once it is complete, so that memory holds one at a time.
    """
    store = encoded_store if release else None
    classes = {type(layer.experts) for layer in skeleton}
    with ExitStack() as stack:
        is_stored = encoded_store is not None and stack.enter_context(
            encoded_store.claimed(len(skeleton))
        )
        matrices = [expert_matrices(layer.experts) for layer in skeleton]
        bar = tqdm(
            desc=f"storing experts at {':'.join(codec.name for codec in codecs)}",
            total=sum(len(m) for by_name in matrices for m in by_name.values()) * len(codecs),
            unit=" matrices",
            delay=2,
            disable=is_stored,
        )
        stack.callback(bar.close)

        def encode_parameter(module: Any, name: str, value: nn.Parameter) -> None:
            pending: dict[str, Encoded] = module.__dict__.setdefault(_HELD, {})
            pending[name] = encode(module, name, value, codecs, bar.update)
            if store is not None and set(pending) == set(expert_matrices(module)):
                module.__dict__[_WRITTEN] = store.write(_joined(module.__dict__.pop(_HELD)))

        def setter(original: Any) -> Callable[[Any, str, Any], None]:
            def set_attribute(module: Any, name: str, value: Any) -> None:
                is_parameter = isinstance(value, nn.Parameter) and name in module._parameters
                if is_parameter and not value.is_meta and is_matrices(module, value):
                    if is_stored:
                        module.__dict__[_IS_STORED] = True
                    elif not takes_no_memory(value):
                        encode_parameter(module, name, value)
                    value = shape_without_memory(value)
                    # Else transformers would initialise it as a missing parameter.
                    value._is_hf_initialized = True
                original(module, name, value)

            return set_attribute

        previous = os.environ.get(_IN_ORDER)
        os.environ[_IN_ORDER] = "1"
        for cls in classes:
            cls.__setattr__ = setter(cls.__setattr__)  # type: ignore[assignment]
        try:
            if is_stored:
                names = {
                    f"{layer.path}.{name}"
                    for layer, by_name in zip(skeleton, matrices, strict=True)
                    for name in by_name
                }
                stack.enter_context(leaving_out(names))
            yield
        finally:
            for cls in classes:
                del cls.__setattr__
            os.environ.pop(_IN_ORDER)
            if previous is not None:
                os.environ[_IN_ORDER] = previous


def take(
    layers: Sequence[MoELayer],
    codecs: Sequence[Codec],
    encoded_store: EncodedExpertStore | None = None,
) -> list[Encoded]:
    """Return each layer's encoded matrices, encoding those that were set in another way.

    Newly encoded ones are kept for the next load; where the disk is full, that one encodes again
    and no load fails.
    """
    layers_encoded = []
    for index, layer in enumerate(layers):
        if vars(layer.experts).pop(_IS_STORED, False):
            assert encoded_store is not None, "skipped without a place to read from"
            layers_encoded.append(encoded_store.read(index))
            continue
        layers_encoded.append(_rest(layer, codecs))
        if encoded_store is not None:
            try:
                encoded_store.place(index, encoded_store.write(layers_encoded[-1]))
            except OSError as error:
                logger.warning("encoded_dir: %s; these experts are encoded again.", error)
    return layers_encoded


def store_layer(index: int, layer: MoELayer, encoded_store: EncodedExpertStore) -> None:
    """Put one layer into its files, unless it is there already. Raises OSError."""
    if not vars(layer.experts).pop(_IS_STORED, False):
        written = vars(layer.experts).pop(_WRITTEN, None)
        encoded_store.place(
            index, written or encoded_store.write(_rest(layer, encoded_store.codecs))
        )


def _rest(layer: MoELayer, codecs: Sequence[Codec]) -> Encoded:
    """Return a layer's matrices encoded while it loaded, and encode the rest."""
    encoded: dict[str, Encoded] = vars(layer.experts).pop(_HELD, {})
    for name, stacked in expert_matrices(layer.experts).items():
        if name not in encoded:
            encoded[name] = encode(layer.experts, name, stacked, codecs)
            setattr(layer.experts, name, shape_without_memory(stacked))
    return _joined(encoded)


def _joined(encoded: Mapping[str, Encoded]) -> Encoded:
    """Return a layer's parts level by level, given those of each of its matrices."""
    levels = zip(*encoded.values(), strict=True)
    return [{name: part for parts in level for name, part in parts.items()} for level in levels]
