"""Reads and writes users' files safely: regular files only, of bounded size, written atomically.

Also finds the folders that ship with the package, and checks the names of models.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import errno
import gzip
import json
import os
import stat
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from lm_eval_moecache.records.numbers import nearest, plain_number, shown

# ruamel.yaml reads about 50 kB/s; the longest file of this repository has 10 kB.
MOST_YAML_BYTES = 1 << 18
MOST_JSON_BYTES = 1 << 30
PART = ".part"
"""Suffix of a file being written, which a killed process leaves behind."""
_BLOCK = 4096
"""A full file system still has room for names, but not for a block of this size (bytes)."""
MOST_NODES = 100_000
"""Values that a YAML document may hold once its aliases are written out."""
TINY = "tiny"
"""Name of the shipped model in `pretrained=`."""
TINY_DRAFT = "tiny-draft"
"""Name of the dense draft model shipped with it, in `draft=`."""
_LONGEST_ID = 96
"""Most characters of a model's name on the hub."""
_PACKAGE = Path(__file__).resolve().parent.parent
is_file, exists = os.path.isfile, os.path.exists
"""Unlike pathlib's, False also for names that no file system allows."""


def open_file(path: str | Path, what: str, most: int | None = None) -> BinaryIO:
    """Open a file for reading. Raises ValueError beginning with `what` where it cannot be read.

    Pipes and devices are refused: a pipe would wait for a writer, a device may have no end. So are
    files of more than `most` bytes.
    """
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode) and (most is None or status.st_size <= most):
            return open(path, "rb")
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte in it
        if getattr(error, "errno", None) in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise ValueError(f"{what}: there is no such file.") from None
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{what} cannot be read: {reason}.") from error
    if stat.S_ISREG(status.st_mode):
        raise ValueError(f"{what} has {status.st_size} bytes, more than the {most} that are read.")
    raise ValueError(
        f"{what} is not a regular file. Allowed: a file on a disk, not a pipe or a device."
    )


def check_file(path: str | Path, what: str, most: int | None = None) -> None:
    """As `open_file`, for a file that a library opens by name."""
    open_file(path, what, most).close()


def read_text(path: str | Path, what: str, most: int = MOST_JSON_BYTES) -> str:
    """Return the text of a UTF-8 file as `as_text` does. ValueError begins with `what`."""
    try:
        with open_file(path, what, most) as file:
            return as_text(file.read(), what)
    except OSError as error:
        raise ValueError(f"{what} cannot be read: {error.strerror or error}.") from error


def as_text(data: bytes, what: str) -> str:
    """Decode UTF-8, with a byte-order mark or without; every line ends with a single newline."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not text in UTF-8: {error}.") from error


def lines_of(text: str) -> list[str]:
    """Return the lines of `as_text`. Unlike `splitlines`, it leaves Unicode's separators alone."""
    return text.removesuffix("\n").split("\n") if text else []


def read_csv(path: str | Path, what: str) -> csv.DictReader[str]:
    """Return the rows of a CSV with a header, without lines that begin with `#`."""
    lines = lines_of(read_text(path, what))
    return csv.DictReader(f"{line}\n" for line in lines if not line.startswith("#"))


def read_head(path: str | Path, what: str, size: int, most: int | None = None) -> bytes:
    """Return a file's first bytes, by which its format is told, without a byte-order mark."""
    with open_file(path, what, most) as file:
        return file.read(size).removeprefix(codecs.BOM_UTF8)


@contextlib.contextmanager
def opened_gguf(path: Path, what: str) -> Iterator[Any]:
    """Yield the library's reader of a GGUF; ValueError for a damaged one begins with `what`."""
    from gguf import GGUFReader

    if read_head(path, what, 4) != b"GGUF":
        raise ValueError(f"{what} is not a GGUF file: it does not begin with the letters GGUF.")
    try:
        yield GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError, TypeError) as error:
        reason = str(error).split("\n")[0][:200]
        raise ValueError(
            f"{what}: {path.name} is not a whole GGUF file, or of a newer kind than the package "
            f"`gguf` reads: {reason}."
        ) from None


def read_yaml(path: str | Path, what: str) -> Any:
    """Read a YAML file. ValueError begins with `what`, which names the file."""
    return parse_yaml(read_text(path, what, MOST_YAML_BYTES), what)


def parse_yaml(text: str, what: str) -> Any:
    """Parse YAML 1.2 safely: no tags, duplicate keys, exploding aliases, cycles, half characters.

    `no`, `on` and `1:30` are texts, and `010` is ten: YAML 1.1 took them for something else.
    """
    # Imported late: commands that read no YAML need not wait for it.
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        data = deepcopy(_parsed(text))
        _check_characters(text, data)
        return data
    except (YAMLError, ValueError, RecursionError, OverflowError, KeyError) as error:
        reason: object = error
        if isinstance(error, RecursionError):
            reason = "nested too deeply, or an alias refers to a value that contains it"
        elif isinstance(error, KeyError):  # ruamel.yaml, of !!bool and its text
            reason = f"a tag that does not fit its text {error}"
        elif isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
            reason = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise ValueError(f"{what} is not readable YAML: {reason}") from error


@lru_cache(maxsize=256)  # a sweep's check reads the same policies and profiles for every cell
def _parsed(text: str) -> Any:
    from ruamel.yaml import YAML

    data = YAML(typ="safe", pure=True).load(text)
    _count(data, {})
    return data


def read_json(path: str | Path, what: str) -> Any:
    """Read a JSON file. ValueError begins with `what`; NaN and infinities are read as null."""
    return parse_json(read_text(path, what), what)


def read_gzip(path: str | Path, what: str) -> bytes:
    """Return the decompressed bytes of a file; ValueError above `MOST_JSON_BYTES` of them."""
    try:
        with open_file(path, what, MOST_JSON_BYTES) as raw, gzip.open(raw, "rb") as file:
            data = bytes(file.read(MOST_JSON_BYTES + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{what} is not readable: {error}") from error
    if len(data) > MOST_JSON_BYTES:
        raise ValueError(f"{what} holds more than the {MOST_JSON_BYTES} bytes that are read.")
    return data


def parse_json(text: str | bytes, what: str) -> Any:
    """Parse JSON, refusing duplicate keys.

    Foreign files may hold NaN or Infinity, which are not JSON, or integers beyond every float: all
    of these are read as None. Half a surrogate pair, which is no character, is refused.
    """
    try:
        data = json.loads(
            text,
            parse_constant=lambda _: None,
            parse_float=lambda digits: plain_number(float(digits)),
            parse_int=lambda digits: plain_number(int(digits)),
            object_pairs_hook=_unique,
        )
        _check_characters(text, data)
        return data
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{what} is not readable JSON: {reason}") from error


def write_whole(path: Path, data: bytes | str) -> None:
    """Write next to `path`, then rename: readers see, and a kill leaves, the old file or the new.

    OSError names the file, which the error of a write to a full disk does not.
    """
    # Part of the name only: with the additions it must still be a valid one.
    temporary = path.with_name(f".{path.name[:100]}.{os.getpid()}{PART}")
    check_replaceable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = str(path)
        raise


def replace(written: Path, path: Path) -> None:
    """Give a finished file its name. OSError where that would replace a device, pipe or link."""
    check_replaceable(path)
    os.replace(written, path)


def check_replaceable(path: Path) -> None:
    """Raise OSError unless `path` is a regular file or a new name.

    Renaming over a device, a pipe or a symbolic link would replace the node itself.
    """
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    except ValueError as error:  # a null byte
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder is refused by the rename
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "a device or a pipe"
        reason = f"it is {kind}, which is not replaced. Allowed: a regular file, or a new name"
        raise OSError(errno.EINVAL, reason, str(path))


def check_writable(path: Path) -> None:
    """Raise OSError naming this path where nothing can be written at it.

    Tries the nearest existing folder and leaves nothing behind; for checks before long work.
    """
    if not path.is_dir():  # files are made in a folder, and in one behind a link
        check_replaceable(path)
    try:
        ancestor = next(place for place in (path, *path.absolute().parents) if place.exists())
        if not ancestor.is_dir() and ancestor != path:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        # Where a folder is not there yet, nothing else would ask about the names in it.
        longest = max(len(os.fsencode(part)) for part in path.parts)
        if hasattr(os, "pathconf") and longest > os.pathconf(ancestor, "PC_NAME_MAX"):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        with tempfile.TemporaryFile(dir=ancestor if ancestor.is_dir() else ancestor.parent) as file:
            file.write(bytes(_BLOCK))
            file.flush()
            os.fsync(file.fileno())
    except ValueError as error:  # a null byte
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    except OSError as error:
        error.filename = str(path)
        raise


def shipped_dir(name: str) -> Path:
    """Return the folder `name` inside the package (a wheel), or else at the repository root."""
    candidates = (_PACKAGE / name, _PACKAGE.parent / name)
    for folder in candidates:
        if folder.is_dir():
            return folder
    places = " and ".join(str(folder) for folder in candidates)
    raise FileNotFoundError(f"the folder {name!r} of lm-eval-moecache is missing: tried {places}")


policies_dir = partial(shipped_dir, "policies")
"""The folder of composition YAMLs."""
recipes_dir = partial(shipped_dir, "recipes")
"""The folder of the papers' tables and figures, one YAML each."""
task_configs_dir = partial(shipped_dir, "task_configs")
"""The folder to give to lm-eval's `--include_path`."""
traces_dir = partial(shipped_dir, "traces")
"""The folder of routing traces of real models."""


def check_include_path(folders: Sequence[str]) -> None:
    """Raise ValueError for a folder of tasks that is not there, which lm-eval takes for empty."""
    for folder in folders:
        if not os.path.isdir(folder):
            raise ValueError(
                f"include_path={shown(folder)}: there is no such folder. Allowed: folders with "
                "lm-eval's task YAMLs."
            )


def check_place(key: str, name: str) -> None:
    """Raise ValueError for a model's name that is neither a folder nor possible on the hub."""
    if name in (TINY, TINY_DRAFT) or (name.strip() and exists(name)):
        return
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith("/")
    if is_path or not name.strip() or set(name) & {"\0", "\\"} or len(name) > _LONGEST_ID:
        raise ValueError(
            f"{key}={shown(name)}: there is no such folder, nor can the hub have a model of that "
            f"name.{nearest(name, (TINY, TINY_DRAFT))} Allowed: a folder, a hub id, or {TINY!r}."
        )


def _check_characters(text: str | bytes, data: Any) -> None:
    """Raise ValueError where an escape (backslash, u, d800 to dfff) is no character by itself."""
    escape: Any = b"\\ud" if isinstance(text, bytes) else "\\ud"
    if escape in text.lower():
        try:
            json.dumps(data, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start : error.end]
            raise ValueError(f"{half!r} is half of a surrogate pair, not a character") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {twice!r} in one object")
    return mapping


def _count(data: Any, sizes: dict[int, int]) -> int:
    """Return the number of values at and below one, with its aliases written out."""
    if id(data) not in sizes:
        inside = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
        total = 1 + sum(_count(value, sizes) for value in inside)
        if total > MOST_NODES:
            raise ValueError(f"it holds more than {MOST_NODES} values, aliases written out")
        sizes[id(data)] = total
    return sizes[id(data)]
