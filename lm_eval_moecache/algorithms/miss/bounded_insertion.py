"""Bounded insertion: the host executes absent experts, and a few of them are uploaded meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from lm_eval_moecache.algorithms.miss.base import LosslessMiss
from lm_eval_moecache.records.ranges import Range

Uploads = Annotated[int, Range(least=1, why=": none is miss=host")]


@dataclass(eq=False, kw_only=True)
class BoundedInsertion(LosslessMiss):
    """Executes absent experts on the host and loads at most `uploads` per event into the cache.

    llama.cpp#27861 (`--moe-expert-cache-inserts`): hits run on the device, misses on the host, and
    uploads are not waited for: they serve the next step. The source does not say which misses are
    uploaded: here those needed first, in a decode step the heaviest. Uploads follow the event's
    activations over the link, in order; an expert needed before it has arrived is waited for. Room
    is made as for any load. The results are those of `fetch`.

    Needs a hardware profile with `host_flops` and `host_memory_bytes_per_s`, and clock=virtual.
    Parameters: uploads, per layer and pass, 1 or more (2, the setting of the source's figures).
    """

    source: ClassVar[str] = "llama.cpp#27861 (--moe-expert-cache, --moe-expert-cache-inserts)"
    cached_first: ClassVar[bool] = True
    uses_host: ClassVar[bool] = True
    host_rule = "always"

    uploads: Uploads = 2
