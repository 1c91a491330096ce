"""The plain records that travel between the parts of the core.

An expert key is the integer `layer * num_experts + expert`, so that keys sort by layer, then by
expert; "layer" counts MoE layers only. Times are seconds, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

PREFILL, DECODE, VERIFY = "prefill", "decode", "verify"
PHASES = (PREFILL, DECODE, VERIFY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The sizes of one MoE model: all that the core knows of it.

    `expert_bytes[layer][rung]` is the size of one expert at each stored precision, best first.
    `dense_bytes[layer]` are the other weights a pass reads on its way to that layer's experts
    (what follows the last MoE layer counts to the last). `element_bytes` is the size of one
    weight at the compute dtype, by which bytes turn into multiply-adds.
    """

    model: str
    num_layers: int
    num_experts: int
    top_k: int
    expert_bytes: tuple[tuple[int, ...], ...]
    dense_bytes: tuple[int, ...]
    precision: tuple[str, ...] = ("bf16",)
    element_bytes: float = 2.0

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_experts, self.top_k) < 1 or self.top_k > self.num_experts:
            raise ValueError(
                f"geometry: num_layers={self.num_layers}, num_experts={self.num_experts}, "
                f"top_k={self.top_k} must be positive, and top_k at most num_experts."
            )
        for name, values in (
            ("expert_bytes", self.expert_bytes),
            ("dense_bytes", self.dense_bytes),
        ):
            if len(values) != self.num_layers:
                raise ValueError(
                    f"geometry: {name} has {len(values)} entries for num_layers={self.num_layers}."
                )

    @property
    def total_expert_bytes(self) -> int:
        """Bytes of all experts at the first precision: what `capacity=5%` is a share of."""
        return sum(rungs[0] for rungs in self.expert_bytes) * self.num_experts

    @property
    def max_expert_bytes(self) -> int:
        return max(rungs[0] for rungs in self.expert_bytes)

    def key(self, layer: int, expert: int) -> int:
        return layer * self.num_experts + expert

    def split(self, key: int) -> tuple[int, int]:
        return divmod(key, self.num_experts)


@dataclass(slots=True)
class Event:
    """One (pass, MoE layer): the unique experts its tokens need, in order of first need.

    `experts` and `weights` are [tokens, top_k] in router order, heaviest first; `logits` are
    [tokens, experts], unmodified. They are None where no algorithm of the policy asked for them
    (`experts` also where the pass has one token: `keys` says it all).
    """

    pass_index: int
    layer: int
    phase: str
    num_tokens: int
    keys: list[int]
    experts: IntArray | None = None
    weights: FloatArray | None = None
    logits: FloatArray | None = None
    predicted: dict[int, FloatArray] = field(default_factory=dict)
    """Target layer -> [tokens, experts] logits of that layer's gate on this layer's input."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A changed choice of experts, [tokens, top_k]; `keep` is False where one is dropped."""

    experts: IntArray
    keep: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Fetch:
    """One expert to bring near, at one rung of the precision ladder (0 is the best)."""

    key: int
    rung: int = 0


def unique_in_order(layer: int, num_experts: int, experts: IntArray) -> list[int]:
    """Return the keys of [tokens, top_k] experts, each once, in order of first need."""
    base = layer * num_experts
    return list(dict.fromkeys((experts + base).ravel().tolist()))


def token_miss_count(experts: IntArray | None, num_experts: int, absent: Sequence[int]) -> int:
    """Count the [tokens, top_k] entries whose expert is among the absent keys of one layer."""
    if experts is None or not absent:
        return len(absent)
    missing = np.zeros(num_experts, dtype=bool)
    missing[np.asarray(absent) % num_experts] = True
    return int(missing[experts].sum())
