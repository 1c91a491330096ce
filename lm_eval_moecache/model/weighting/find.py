"""Finds the weighting rule of a router: the one that gives its own weights again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lm_eval_moecache.model.gate import Gate
from lm_eval_moecache.model.weighting.rules import RULES, WeightingRule
from lm_eval_moecache.records.arrays import FloatArray, IntArray, Weigh

NUM_TOKENS = 32
LEAST_SPREAD = 0.1
"""Below this standard deviation of the logits all rules give nearly constant weights."""
ENOUGH = 0.9
"""The share of tokens that a router's own rule explains; another rule explains next to none."""


def find_rule(gate: Gate) -> WeightingRule | None:
    """Find the rule that reproduces this router's weights on random input, or None."""
    if gate.missing:
        return None
    choice = gate.probe(NUM_TOKENS)
    logits_TE, weights_TK, experts_TK = (t.float() for t in choice)
    if gate.skips or float(logits_TE.std()) < LEAST_SPREAD:
        return None
    experts_TK = experts_TK.long()
    for each in RULES:
        rule = each.of(gate.router)
        if rule is None:
            continue
        ratio = weights_TK / rule.raw(logits_TE, experts_TK)
        scale = float(ratio.median())
        # bf16 keeps 8 bits of a weight, hence the tolerance, and a rule with a threshold may find
        # a token on its other side.
        close = torch.isclose(ratio, torch.full_like(ratio, scale), rtol=0.02)
        if close.all(-1).float().mean() >= ENOUGH:
            rule.scale = _exact_scale(gate.router, scale)
            return rule
    return None


def find_rules(gates: Sequence[Gate]) -> list[WeightingRule | None]:
    """Find how each router weighs a selection. Raises ValueError where one's rule is not known."""
    found = [find_rule(gate) for gate in gates]
    if None in found:
        raise _unknown_rule(gates[found.index(None)])
    return found


def check_rules(gates: Sequence[Gate]) -> None:
    """Raise the error of `find_rules` for routers that have no weights yet."""
    for gate in {type(gate.router): gate for gate in gates}.values():
        if find_rule(gate.stand_in() if gate.is_empty else gate) is None:
            raise _unknown_rule(gate)


def in_numpy(rule: WeightingRule) -> Weigh:
    """Return a family's rule as algorithms see it."""

    def weigh(logits: FloatArray, experts: IntArray) -> FloatArray:
        weights = rule(torch.from_numpy(logits), torch.from_numpy(experts), torch.float32)
        found: FloatArray = weights.numpy()
        return found

    return weigh


def _unknown_rule(gate: Gate) -> ValueError:
    needs = f" and needs {', '.join(gate.missing)} beside hidden states" if gate.missing else ""
    return ValueError(
        f"routing, miss: the router {gate.name} weighs its experts by a rule that is not known"
        f"{needs}, so a changed selection cannot be weighted. Allowed for this model: "
        "routing=standard with miss=fetch."
    )


def _exact_scale(router: nn.Module, seen: float) -> float:
    """Return the router's own scaling factor where that explains what was seen, else this."""
    own = getattr(router, "routed_scaling_factor", None)
    if isinstance(own, int | float) and abs(seen / own - 1) < 0.02:
        return float(own)
    return 1.0 if abs(seen - 1) < 0.02 else float(f"{seen:.4g}")
