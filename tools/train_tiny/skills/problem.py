"""A generated problem and the rule that assigns it to the train or the test split."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Split = Literal["train", "test"]
Field = str | int | list[str] | Mapping[str, list[str] | list[int]]
TEST_SHARE_PERCENT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt as lm-eval prints it, its answer without the leading space, and the task's row.

    `key` is what the split hashes: two problems with one key always land on the same side.
    """

    skill: str
    kind: str
    prompt: str
    target: str
    key: str
    row: Mapping[str, Field] = field(default_factory=dict)

    @property
    def split(self) -> Split:
        return split_of(f"{self.skill}/{self.key}")


def split_of(key: str) -> Split:
    return "test" if hash_percent(key) < TEST_SHARE_PERCENT else "train"


def hash_percent(key: str) -> int:
    """A number below 100 from a fixed hash, so that no seed or interpreter changes the split."""
    digest = hashlib.blake2b(key.encode("utf-8"), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 100
