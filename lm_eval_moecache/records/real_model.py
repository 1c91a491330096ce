"""A real model as runs emulate it: its sizes, and the bits of a stored weight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lm_eval_moecache.records.geometry import DTYPES, Geometry

DTYPE_BYTES = 2
"""Models compute in bf16, whatever precision their weights are stored in."""


class Stored(NamedTuple):
    """Bits per weight, scales included, of the experts, the other layers and the vocabulary."""

    name: str
    expert_bits: float
    dense_bits: float = 16
    vocab_bits: float = 16
    """Bits per weight of the embedding and the output layer."""


BF16 = Stored("bf16", 16)


class LayerCaches(NamedTuple):
    """The KV caches of those of a model's layers that keep the same amount per token."""

    num_layers: int
    bytes_per_token: float
    multiply_adds: int
    """Multiply-adds of one query token with one cached token, in one layer."""
    window: int | None = None
    """Tokens that such a layer attends to; None for the whole context."""
    is_shared: bool = False
    """Whether all heads share what is cached (MLA, or a single key-value head)."""

    def tokens(self, context: int) -> int:
        """Return the cached tokens that a layer attends to in a context of this length."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True, kw_only=True, slots=True)
class RealModel:
    """One real Mixture-of-Experts model, in numbers of weights; what concerns layers is per layer.

    `layer_weights` are those a pass reads in one MoE layer besides its experts (attention, router,
    shared experts), averaged over layers of several kinds; `read_once` those it reads outside the
    MoE layers (output layer, dense layers); `embedding` is held in memory, but looked up rather
    than read. Multi-token prediction layers (MTP) and image encoders are left out.
    """

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    expert_weights: int
    stored: Stored = BF16
    """Bits per weight of the checkpoint."""
    layer_weights: int
    read_once: int
    output: int = 0
    """Weights of the output layer, a part of `read_once`."""
    embedding: int
    caches: tuple[LayerCaches, ...] = ()
    state_bytes: int = 0
    """Bytes that linear-attention layers keep per sequence, whatever its length."""
    source: str = ""
    is_as_stored: bool = False
    """Whether `stored` is what somebody's files have, or asks for, so that no other is tried."""

    @property
    def expert_bytes(self) -> int:
        """Stored bytes of one expert."""
        return round(self.expert_weights * self.stored.expert_bits / 8)

    @property
    def all_expert_bytes(self) -> int:
        """Stored bytes of all experts of all layers."""
        return self.num_layers * self.num_experts * self.expert_bytes

    @property
    def num_weights(self) -> int:
        """Weights of the whole model."""
        experts = self.num_layers * self.num_experts * self.expert_weights
        return experts + self.num_layers * self.layer_weights + self.read_once + self.embedding

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything but the experts."""
        vocabulary = self.embedding + self.output
        dense = self.num_layers * self.layer_weights + self.read_once - self.output
        return round((dense * self.stored.dense_bits + vocabulary * self.stored.vocab_bits) / 8)

    @property
    def layer_dense_bytes(self) -> int:
        """Dense bytes that a pass reads per MoE layer, with the layer's share of `read_once`."""
        output = self.output // self.num_layers
        dense = self.layer_weights + self.read_once // self.num_layers - output
        return int((dense * self.stored.dense_bits + output * self.stored.vocab_bits) / 8)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes by which the KV cache grows with each token of a short context."""
        return round(sum(cache.num_layers * cache.bytes_per_token for cache in self.caches))

    def kv_bytes(self, context: int) -> int:
        """Return the bytes of the KV cache at a context length, windows and states considered."""
        sizes = (c.num_layers * c.bytes_per_token * c.tokens(context) for c in self.caches)
        return round(sum(sizes)) + self.state_bytes

    def with_cache_bits(self, bits: float) -> RealModel:
        """Return the model with its KV cache in so many bits an element, states as they are."""
        share = bits / (8 * DTYPE_BYTES)
        caches = (c._replace(bytes_per_token=share * c.bytes_per_token) for c in self.caches)
        return replace(self, caches=tuple(caches))

    def attention_flops(self, context: int, *, shared: bool = False) -> float:
        """Return the FLOP of one token's attention to a context, over all layers, or those whose
        heads share what is cached."""
        caches = [cache for cache in self.caches if cache.is_shared or not shared]
        return 2.0 * sum(c.num_layers * c.multiply_adds * c.tokens(context) for c in caches)

    def prompt_flops(self, num_tokens: int) -> float:
        """Return the FLOP of a prompt's pass, whose last token alone goes through the output."""
        weights = self.num_layers * (self.layer_weights + self.top_k * self.expert_weights)
        flops = 2.0 * num_tokens * (weights + self.read_once - self.output) + 2.0 * self.output
        return flops + num_tokens * self.attention_flops(num_tokens) / 2

    def record(self) -> dict[str, Any]:
        """Return the figures that charges follow from, for a run's record and identity."""
        sizes = ("name", "num_layers", "num_experts", "top_k", "expert_weights")
        others = ("layer_weights", "read_once", "embedding", "kv_bytes_per_token", "source")
        return {
            **{name: getattr(self, name) for name in sizes},
            "expert_bits": float(self.stored.expert_bits),
            **{name: getattr(self, name) for name in others},
        }

    def geometry(self) -> Geometry:
        """Return the geometry of the model itself, all layers alike."""
        unsized = Geometry(
            model=self.name,
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_bytes=((self.expert_bytes,),) * self.num_layers,
            dense_bytes=(0,) * self.num_layers,
        )
        return self.emulated_by(unsized)

    def emulated_by(self, own: Geometry) -> Geometry:
        """Return `own` with every layer of this model's sizes.

        Layers, experts and top-k stay, as they determine the routing. So do capacities given as a
        share or as a number of experts; those in bytes are in this model's bytes. An expert stored
        encoded (`precision=int4`) keeps its bits per weight, scales included; one stored at a dtype
        gets this model's. Lower levels keep their ratio to the first.
        """
        bf16_bytes = DTYPE_BYTES * self.expert_weights
        if own.compute_bytes and own.precision[0] not in DTYPES:
            first = [
                bf16_bytes * levels[0] / compute_bytes
                for levels, compute_bytes in zip(own.expert_bytes, own.compute_bytes, strict=True)
            ]
        else:
            first = [float(self.expert_bytes)] * own.num_layers
        sizes = tuple(
            tuple(max(1, round(best * size / levels[0])) for size in levels)
            for best, levels in zip(first, own.expert_bytes, strict=True)
        )
        return replace(
            own,
            expert_bytes=sizes,
            dense_bytes=(self.layer_dense_bytes,) * own.num_layers,
            element_bytes=float(DTYPE_BYTES),
            compute_bytes=(bf16_bytes,) * own.num_layers,
            emulates=self.name,
        )
