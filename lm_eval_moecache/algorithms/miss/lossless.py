"""Rules that load every absent expert, or have the host execute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from lm_eval_moecache.algorithms.miss.base import LosslessMiss
from lm_eval_moecache.records.ranges import Range


class FetchMiss(LosslessMiss):
    """Loads every absent expert at the best stored precision while compute waits."""

    name: ClassVar[str] = "fetch"
    source: ClassVar[str] = "SpecMD section 3.1.2 (basic fetch)"


class FetchCachedFirst(LosslessMiss):
    """Loads every absent expert, as `fetch` does, and executes the resident ones meanwhile.

    SP-MoE section 4.3, after ProMoE and Klotski: "experts already cached in GPU memory are
    prioritized for immediate token processing, while the remaining experts [...] are loaded on
    demand". The results are those of `fetch`; an event with absent experts launches the experts'
    kernels twice. Cost: none of its own.
    """

    name: ClassVar[str] = "fetch_cached_first"
    source: ClassVar[str] = "SP-MoE section 4.3"
    cached_first: ClassVar[bool] = True


HostRule = Literal["always", "first", "balanced"]


@dataclass(eq=False, kw_only=True)
class Host(LosslessMiss):
    """Executes absent experts on the host, always or where that is faster than loading them.

    The activations go over the link and back, once for all experts of an event; the weights are
    read from the host's memory. The host is a second server next to the link: while both work, the
    resident experts run on the device, and prefetches use the link's gaps. Experts executed on the
    host do not become resident. The results are those of `fetch`.

    - `always`: every absent expert (llama.cpp's expert offload, ktransformers). The cache then
      holds only experts loaded by `warm=` or a prefetcher.
    - `first`: each absent expert goes where it alone would finish sooner: host, or transfer and
      device (Fiddler, Kamahori et al. 2024, its latency model).
    - `balanced`: host and link share the event, the host starting with the experts of few tokens,
      the link with those of many (HybriMoE, Zhong et al. 2025, intra-layer scheduling; its moving
      of resident experts to an idle host is left out). Implemented from the abstracts.

    Needs a hardware profile with `host_flops` and `host_memory_bytes_per_s`.
    Parameters: rule, how an event's absent experts are divided between host and link (first).
    """

    name: ClassVar[str] = "host"
    source: ClassVar[str] = "Fiddler; HybriMoE; llama.cpp and ktransformers (by rule)"
    cached_first: ClassVar[bool] = True
    uses_host: ClassVar[bool] = True

    rule: HostRule = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.host_rule = self.rule


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

    name: ClassVar[str] = "bounded_insertion"
    source: ClassVar[str] = "llama.cpp#27861 (--moe-expert-cache, --moe-expert-cache-inserts)"
    cached_first: ClassVar[bool] = True
    uses_host: ClassVar[bool] = True
    host_rule = "always"

    uploads: Uploads = 2
