"""The plain records that travel between the parts of the core.

An expert key is the integer `layer * num_experts + expert`, so that keys sort by layer, then by
expert; "layer" counts MoE layers only. Times are seconds, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Weigh = Callable[[FloatArray, IntArray], FloatArray]
"""(logits [tokens, experts], chosen experts [tokens, top_k]) -> their weights [tokens, top_k]."""

PREFILL, DECODE, VERIFY = "prefill", "decode", "verify"
PHASES = (PREFILL, DECODE, VERIFY)
DROPPED = -1
"""Stands in `Event.experts` for an expert that is left out."""


def softmax(logits: FloatArray) -> FloatArray:
    """Row-wise softmax of [tokens, experts]."""
    # The methods `max` and `sum` are these, behind a wrapper that costs as much for one token.
    scores = np.exp(logits - np.maximum.reduce(logits, axis=-1, keepdims=True))
    scores /= np.add.reduce(scores, axis=-1, keepdims=True)
    return np.asarray(scores, dtype=np.float32)


def softmax_weights(logits: FloatArray, experts: IntArray) -> FloatArray:
    """Return the softmax scores of the chosen experts: the rule of CommitMoE eq. 1 and 2."""
    return np.take_along_axis(softmax(logits), experts, axis=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The sizes of one MoE model: all that the core knows of it.

    `expert_bytes[layer][rung]` is the size of one expert at each stored precision, best first.
    `dense_bytes[layer]` are the other weights a pass reads on its way to that layer's experts
    (what follows the last MoE layer counts to the last). `element_bytes` is the size of one
    weight at the compute dtype, by which bytes turn into multiply-adds; `compute_bytes[layer]` is
    an expert's size at that dtype, empty where the first rung is stored so.
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
    (`experts` also where the pass has one token: `keys` says it all). Once a selection was changed
    they are the changed ones: a dropped expert is DROPPED, and where logits are there, an expert
    that the router did not choose has its softmax score as weight.
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
    """Target layer -> [tokens, experts] logits that it is expected to have: of its gate on this
    layer's input, or of a trained predictor. A layer at or before this one is the next pass's."""
    weigh: Weigh = softmax_weights
    """The model family's own rule for the weights of chosen experts."""
    rungs: dict[int, int] | None = None
    """Key -> rung at which it was executed; None where the store has one precision."""

    def of_token(self, token: int, pass_index: int, base: int) -> Event:
        """Return what one token's event would be in a pass of its own; a key is `base` + expert."""
        assert self.experts is not None, "a token's experts are unknown"
        row = slice(token, token + 1)
        keys: list[int] = (self.experts[token] + base).tolist()
        return Event(
            pass_index=pass_index,
            layer=self.layer,
            phase=DECODE,
            num_tokens=1,
            keys=keys,
            experts=self.experts[row],
            weights=None if self.weights is None else self.weights[row],
            logits=None if self.logits is None else self.logits[row],
        )


@dataclass(frozen=True, slots=True)
class Selection:
    """A changed choice of experts, [tokens, top_k], weighted from the unmodified logits.

    `keep` is False where an expert is dropped: the others keep their weights, unless `renormalize`
    makes them share what it had. `weigh_as` names the experts whose weights are used, where
    those are not the ones executed. `weights` are given where an algorithm has a rule of its own,
    on the scale of the router's; NaN leaves an entry to the family's rule.
    """

    experts: IntArray
    keep: BoolArray | None = None
    renormalize: bool = False
    weigh_as: IntArray | None = None
    weights: FloatArray | None = None

    @staticmethod
    def join(experts: IntArray, rows: Sequence[Selection | None]) -> Selection | None:
        """Stack the selections of single tokens; None stands for the router's own `experts`."""
        changed = [row for row in rows if row is not None]
        if not changed:
            return None
        chosen, keep, weigh_as = experts.copy(), np.ones(experts.shape, dtype=bool), experts.copy()
        weights = np.full(experts.shape, np.nan, dtype=np.float32)
        for token, row in enumerate(rows):
            if row is not None:
                chosen[token] = row.experts[0]
                weigh_as[token] = row.experts[0] if row.weigh_as is None else row.weigh_as[0]
                if row.keep is not None:
                    keep[token] = row.keep[0]
                if row.weights is not None:
                    weights[token] = row.weights[0]
        given = weights if any(row.weights is not None for row in changed) else None
        return Selection(chosen, keep, any(row.renormalize for row in changed), weigh_as, given)

    def after(self, earlier: Selection) -> Selection:
        """Return this later change on top of an earlier one, whose dropped entries stand."""
        weights = self.weights
        if weights is None and earlier.weights is not None:
            # Where an expert was replaced, its weight goes with it unless it is taken over.
            source = self.experts if self.weigh_as is None else self.weigh_as
            own = (source == earlier.experts) | (source == DROPPED)
            weights = np.where(own, earlier.weights, np.nan).astype(np.float32)
        if earlier.keep is None:
            return self if weights is None else replace(self, weights=weights)
        weigh_as = self.weigh_as
        if weigh_as is not None:
            weigh_as = np.where(earlier.keep, weigh_as, earlier.experts)
        return Selection(
            experts=np.where(earlier.keep, self.experts, earlier.experts),
            keep=earlier.keep if self.keep is None else earlier.keep & self.keep,
            renormalize=earlier.renormalize or self.renormalize,
            weigh_as=weigh_as,
            weights=weights,
        )


@dataclass(frozen=True, slots=True)
class Fetch:
    """One expert to bring near, at one rung of the precision ladder (0 is the best)."""

    key: int
    rung: int = 0


def unique_in_order(layer: int, num_experts: int, experts: IntArray) -> list[int]:
    """Return the keys of [tokens, top_k] experts, each once, in order of first need."""
    base = layer * num_experts
    return list(dict.fromkeys((experts + base).ravel().tolist()))


def num_assignments(event: Event, keys: Sequence[int], num_experts: int) -> int:
    """Count the (token, expert) pairs that these of an event's keys serve."""
    if event.experts is None:
        return len(keys)
    if len(keys) == len(event.keys):
        return int((event.experts >= 0).sum())
    own = np.asarray(keys) - event.layer * num_experts
    return int(np.isin(event.experts, own).sum())


def token_miss_count(experts: IntArray | None, num_experts: int, absent: Sequence[int]) -> int:
    """Count the [tokens, top_k] entries whose expert is among the absent keys of one layer."""
    if experts is None or not absent:
        return len(absent)
    missing = np.zeros(num_experts, dtype=bool)
    missing[np.asarray(absent) % num_experts] = True
    return int((missing[experts] & (experts != DROPPED)).sum())


def spell_out(event: Event, num_experts: int) -> IntArray:
    """Return the event's [tokens, top_k] experts, filled in where one token's keys say it all."""
    if event.experts is None:
        event.experts = np.array([event.keys], dtype=np.int64) - event.layer * num_experts
    return event.experts


def near_mask(layer: int, num_experts: int, resident: Container[int]) -> BoolArray:
    """Mark which of a layer's experts [experts] are resident."""
    base = layer * num_experts
    return np.array([base + expert in resident for expert in range(num_experts)], dtype=bool)
