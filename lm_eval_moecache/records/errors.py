"""The errors of this package: one base, and what a caller may want to distinguish."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MoECacheError(ValueError):
    """The base of every error that the public functions raise for what they were given.

    The message names the key, the value and what is allowed.
    """


class ArgumentsError(MoECacheError):
    """A setting that cannot run: the message names the key, the value and what is allowed."""


class AlgorithmError(MoECacheError, RuntimeError):
    """A user's algorithm failed while running: the message names it, its file and the layer."""


class TransferError(MoECacheError, RuntimeError):
    """Moving experts failed, or was requested of a closed link."""


@contextmanager
def as_moecache_error() -> Iterator[None]:
    """Turn a ValueError, or a file that cannot be read, into a `MoECacheError`."""
    try:
        yield
    except MoECacheError:
        raise
    except (ValueError, OSError) as error:
        raise MoECacheError(str(error)) from error
