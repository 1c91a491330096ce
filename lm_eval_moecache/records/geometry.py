"""The sizes of an MoE model and of its draft: layers, experts, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("bf16", "fp16", "fp32")
"""Precisions at which weights are stored unencoded, as they are computed with."""

MOST_DRAFTED = 1024
"""Most tokens drafted for one pass: long before that many, every draft has gone wrong."""
NO_TARGET = -1
"""In `Draft.targets`: a draft layer that predicts for none of the model's layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The sizes of one MoE model: all that the engine needs of it.

    `expert_bytes[layer][level]` is the size of one expert at each stored precision, best first.
    `dense_bytes[layer]` are the other weights a pass reads before that layer's experts (those after
    the last MoE layer count to the last). `element_bytes` is the size of one weight at the compute
    dtype, by which bytes convert to multiply-adds; `compute_bytes[layer]` is an expert's size at
    that dtype, empty where the first level is stored at it. `hidden_size` is the width of an
    expert's input and output; 0 where unknown (traces may omit it).
    """

    model: str
    num_layers: int
    num_experts: int
    top_k: int
    expert_bytes: tuple[tuple[int, ...], ...]
    dense_bytes: tuple[int, ...]
    precision: tuple[str, ...] = ("bf16",)
    element_bytes: float = 2.0
    compute_bytes: tuple[int, ...] = ()
    emulates: str = ""
    """The real model whose sizes these are; empty where they are the model's own."""
    hidden_size: int = 0

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_experts, self.top_k) < 1 or self.top_k > self.num_experts:
            raise ValueError(
                f"geometry: num_layers={self.num_layers}, num_experts={self.num_experts}, "
                f"top_k={self.top_k} must be positive, and top_k at most num_experts."
            )
        for name, values in (
            ("expert_bytes", self.expert_bytes),
            ("dense_bytes", self.dense_bytes),
            ("compute_bytes", self.compute_bytes or self.dense_bytes),
        ):
            if len(values) != self.num_layers:
                raise ValueError(
                    f"geometry: {name} has {len(values)} entries for num_layers={self.num_layers}."
                )

    @property
    def total_expert_bytes(self) -> int:
        """Bytes of all experts at the first precision, of which `capacity=5%` is a share."""
        return sum(levels[0] for levels in self.expert_bytes) * self.num_experts

    @property
    def max_expert_bytes(self) -> int:
        """Bytes of the largest expert at the first precision."""
        return max(levels[0] for levels in self.expert_bytes)

    def key(self, layer: int, expert: int) -> int:
        """Return the expert key of (layer, expert)."""
        return layer * self.num_experts + expert

    def split(self, key: int) -> tuple[int, int]:
        """Return the (layer, expert) of an expert key."""
        return divmod(key, self.num_experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The sizes of a draft model.

    Its `geometry` counts the draft's own layers; a dense feed-forward block is a single expert.
    """

    geometry: Geometry
    level: int = 0
    """Precision level at which its experts are stored and read."""
    nbytes: int = 0
    """Bytes it takes in addition to the target's; all of it stays resident."""
    tokens: int = 1
    """Tokens drafted for each verify pass."""
    targets: tuple[int, ...] = ()
    """Draft layer -> the model's MoE layer at the same place, whose gate can score the draft's
    states; NO_TARGET for none. Empty where no gate can."""
