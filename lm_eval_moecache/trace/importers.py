"""Detects the format of a trace from its content, and reads it."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lm_eval_moecache.records import plugins
from lm_eval_moecache.records.errors import MoECacheError
from lm_eval_moecache.records.files import is_file, read_head
from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.trace import formats
from lm_eval_moecache.trace.formats.base import Options, TraceFormat, reading
from lm_eval_moecache.trace.trace import Trace

if TYPE_CHECKING:
    from lm_eval_moecache.trace.file import StreamedTrace

MOST_BYTES = 1 << 40
"""Largest trace file that is read."""
HEAD_BYTES = 1 << 20
"""Size of the file head from which its format is detected."""


@cache
def trace_formats() -> dict[str, type[TraceFormat]]:
    """Return all formats by name: those in `formats`, the registry, then what packages add."""
    formats_by_name = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(formats.__path__)):
        # Imported late: pyarrow is slow to import, and most runs read no trace.
        try:
            module = importlib.import_module(f"{formats.__name__}.{name}")
        except Exception as error:  # whatever a third party's module raises
            raise ValueError(
                f"the trace format {name!r} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        for kind in vars(module).values():
            is_own = inspect.isclass(kind) and kind.__module__ == module.__name__
            if is_own and issubclass(kind, TraceFormat) and not inspect.isabstract(kind):
                formats_by_name[name] = kind
    for name, point in plugins.added("formats", formats_by_name.keys()).items():
        kind = plugins.load(point)
        if not (inspect.isclass(kind) and issubclass(kind, TraceFormat)):
            raise MoECacheError(f"{plugins.described(point)} is not a subclass of TraceFormat.")
        if inspect.isabstract(kind):
            lacking = ", ".join(sorted(kind.__abstractmethods__))
            raise MoECacheError(f"{plugins.described(point)} is abstract: it lacks {lacking}.")
        formats_by_name[name] = kind
    return formats_by_name


def find_format(file: str) -> str:
    """Return the name of the format of a file, or of a folder of files.

    The content decides. Failing that, the only format with the file's suffix is taken, so that its
    reader reports the error; ValueError where there is no such format.
    """
    path = head_of = Path(file)
    formats_by_name = trace_formats()
    suffixes = {suffix for kind in formats_by_name.values() for suffix in kind.suffixes}
    is_folder = os.path.isdir(file)  # False for a name that no file can have
    if is_folder:
        files = sorted(path.glob("*.json"))
        if not files:
            raise ValueError(f"trace {file!r}: a folder of responses has .json files in it.")
        head_of = files[0]
    elif path.suffix not in suffixes:
        raise unknown_name_error(f"trace {file!r}: the suffix", path.suffix, suffixes)
    head = read_head(head_of, f"trace {file!r}", HEAD_BYTES, MOST_BYTES)
    for name, kind in formats_by_name.items():
        with _naming_the_importer(kind, head_of.name):
            if (kind.reads_folders or not is_folder) and kind.sniff(head):
                return name
    by_suffix = [name for name, kind in formats_by_name.items() if head_of.suffix in kind.suffixes]
    if len(by_suffix) == 1 and not is_folder:
        return by_suffix[0]
    if not head.strip():
        raise ValueError(f"trace {file!r} has no rows.")
    lines = head[:60].decode("utf-8", "replace").splitlines()
    raise ValueError(
        f"trace {file!r} begins with {(lines or [''])[0]!r}, which no format of {head_of.suffix} "
        f"files does ({', '.join(by_suffix)}). `moecache trace formats` shows them."
    )


def load_trace(
    file: str,
    *,
    logits: bool = False,
    predicted: bool = False,
    expert_bytes: int | None = None,
    top_k: int | None = None,
) -> Trace:
    """Read a trace of any known format, detected from its content.

    `expert_bytes` is the size of one expert for formats without sizes; the default is one byte.
    Raises ValueError for a file that is missing or does not fit.
    """
    kind = trace_formats()[find_format(file)]
    path = Path(file)
    if expert_bytes is not None and kind.says_sizes:
        raise ValueError(
            f"expert_bytes={expert_bytes}: trace {path.name} says itself how large experts are."
        )
    options = Options(expert_bytes=expert_bytes, top_k=top_k, logits=logits, predicted=predicted)
    with _naming_the_importer(kind, path.name):
        read = kind.read(path, options)
        if not isinstance(read, Trace):
            raise TypeError(
                f"read returned {type(read).__name__}. Expected: a Trace, as of `build`"
            )
        return read


@contextmanager
def _naming_the_importer(kind: type[TraceFormat], name: str) -> Iterator[None]:
    """Turn whatever an importer raises into a ValueError that names the trace and the importer.

    With the line of the trace that it was reading, where it reads by `numbered` or `objects`, and
    the importer's own line. A refusal that names the trace itself passes as it is.
    """
    reading.set(None)
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # whatever an importer's own code raises
        line = reading.get()
        if isinstance(error, ValueError) and name in str(error):
            raise
        source = inspect.getfile(kind)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame.lineno for frame in frames if frame.filename == source]
        place = f"{source}, line {own[-1]}" if own else source
        raise ValueError(
            f"trace {name}{'' if line is None else f': line {line}'}: the importer "
            f"{kind.__name__} failed: {type(error).__name__}: {error} ({place})."
        ) from error


def open_any(
    file: str, *, logits: bool = False, predicted: bool = False, expert_bytes: int | None = None
) -> Trace | StreamedTrace:
    """As `load_trace`, but a large Parquet trace is opened and read during its replay."""
    from lm_eval_moecache.trace.file import open_trace

    path = Path(file)
    if path.suffix == ".parquet" and is_file(path) and expert_bytes is None:
        return open_trace(path, logits=logits, predicted=predicted)
    return load_trace(file, logits=logits, predicted=predicted, expert_bytes=expert_bytes)
