"""Host: absent experts are executed on the host, where their weights are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lm_eval_moecache.algorithms.miss.base import LosslessMiss

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

    source: ClassVar[str] = "Fiddler; HybriMoE; llama.cpp and ktransformers (by rule)"
    cached_first: ClassVar[bool] = True
    uses_host: ClassVar[bool] = True

    rule: HostRule = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.host_rule = self.rule
