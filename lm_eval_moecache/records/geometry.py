"""The sizes of an MoE model and of its draft: layers, experts, and what each weighs in bytes."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("bf16", "fp16", "fp32")
"""Names of precisions at which weights are stored as they are computed with, not encoded."""

MOST_DRAFTED = 1024
"""Tokens drafted for one pass, at most: far beyond the length at which any draft has been wrong."""
NO_TARGET = -1
"""Stands in `Draft.targets` for a layer of the draft that foretells none of the model's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The sizes of one MoE model: all that the core knows of it.

    `expert_bytes[layer][level]` is the size of one expert at each stored precision, best first.
    `dense_bytes[layer]` are the other weights a pass reads on its way to that layer's experts
    (what follows the last MoE layer counts to the last). `element_bytes` is the size of one
    weight at the compute dtype, by which bytes turn into multiply-adds; `compute_bytes[layer]` is
    an expert's size at that dtype, empty where the first level is stored so. `hidden_size` is the
    width of what an expert reads and gives; 0 where it is not known (a trace need not say it).
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
        """Bytes of all experts at the first precision: what `capacity=5%` is a share of."""
        return sum(levels[0] for levels in self.expert_bytes) * self.num_experts

    @property
    def max_expert_bytes(self) -> int:
        return max(levels[0] for levels in self.expert_bytes)

    def key(self, layer: int, expert: int) -> int:
        return layer * self.num_experts + expert

    def split(self, key: int) -> tuple[int, int]:
        return divmod(key, self.num_experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The sizes of a draft model.

    Its `geometry` counts the draft's own layers; a dense feed-forward block is a single expert.
    """

    geometry: Geometry
    level: int = 0
    """The precision that its experts are stored in and read at."""
    nbytes: int = 0
    """What it takes beside the target: all of it is resident."""
    tokens: int = 1
    """Tokens drafted for each verify pass."""
    targets: tuple[int, ...] = ()
    """For each of its layers, the model's MoE layer at the same place, whose gate can be asked
    about the draft's states; NO_TARGET for none. Empty where no gate can."""
