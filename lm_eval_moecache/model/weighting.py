"""The weights that model families give to a chosen set of experts.

A table of rules, a test of which one a router follows, and the router's output for a changed
selection. Shapes: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lm_eval_moecache.model.device import as_dtype, copies_on_device, rows_of
from lm_eval_moecache.model.gate import Choice, Gate, value_of
from lm_eval_moecache.records.arrays import BoolArray, FloatArray, IntArray
from lm_eval_moecache.records.selection import Selection

Raw = Callable[..., Tensor]
"""Returns float32 weights [T, K] of logits [T, E] and chosen experts [T, K], before a family's
constant scale. A third argument is a parameter of the router (`RULES`)."""


@dataclass(frozen=True, slots=True)
class WeightingRule:
    """Turns logits [T, E] and chosen experts [T, K] into weights [T, K]."""

    raw: Raw
    parameters: tuple[Any, ...] = ()
    scale: float = 1.0

    def __call__(self, logits_TE: Tensor, experts_TK: Tensor, dtype: torch.dtype) -> Tensor:
        weights = self.raw(as_dtype(logits_TE, torch.float32), experts_TK, *self.parameters)
        return as_dtype(weights if self.scale == 1 else weights * self.scale, dtype)

    def in_numpy(self, logits: FloatArray, experts: IntArray) -> FloatArray:
        """Return float32 weights of arrays, as algorithms ask for them."""
        given = torch.from_numpy(logits), torch.from_numpy(experts)
        weights: FloatArray = self(*given, torch.float32).numpy()
        return weights


def sigmoid(logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Sigmoid of each chosen logit, not renormalised; a correction bias only selects."""
    return logits_TE.gather(-1, experts_TK).sigmoid()


def sigmoid_normed(logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Sigmoid of the chosen logits, renormalised to sum to one (DeepSeek-V3, GLM)."""
    chosen = logits_TE.gather(-1, experts_TK).sigmoid()
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


def softmax_all(logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Softmax over all experts, not renormalised (OLMoE, DeepSeek-V2, Qwen2-MoE)."""
    return logits_TE.softmax(-1).gather(-1, experts_TK)


def softmax_chosen(logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Softmax over the chosen experts (GPT-OSS, Granite; Mixtral and Qwen3-MoE renormalise
    softmax-then-top-k, which is the same)."""
    return logits_TE.gather(-1, experts_TK).softmax(-1)


def softmax_chosen_scaled(logits_TE: Tensor, experts_TK: Tensor, scale_E: Tensor) -> Tensor:
    """Softmax over the chosen experts, each times its own scale (Gemma 4)."""
    return softmax_chosen(logits_TE, experts_TK) * scale_E.to(logits_TE.device)[experts_TK]


def sparse_mixer(logits_TE: Tensor, experts_TK: Tensor, jitter_eps: float) -> Tensor:
    """Phi-MoE: each expert in turn against those not yet taken that come close to it."""
    remaining = logits_TE.clone()
    weights = []
    for chosen in torch.split(experts_TK, 1, dim=-1):
        chosen_logit = remaining.gather(-1, chosen)
        factor = torch.maximum(logits_TE.abs(), chosen_logit)
        far = ((chosen_logit - logits_TE) / factor) > 2 * jitter_eps
        weights.append(remaining.masked_fill(far, float("-inf")).softmax(-1).gather(-1, chosen))
        remaining = remaining.scatter(-1, chosen, float("-inf"))
    return torch.cat(weights, -1)


def sqrt_softplus_normed(logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Square root of softplus of the chosen logits, renormalised to sum to one (DeepSeek-V4)."""
    chosen = nn.functional.softplus(logits_TE.gather(-1, experts_TK)).sqrt()
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


RULES: dict[Raw, str] = {
    sigmoid: "",
    sigmoid_normed: "",
    softmax_all: "",
    softmax_chosen: "",
    softmax_chosen_scaled: "per_expert_scale",
    sparse_mixer: "router_jitter_noise",
    sqrt_softplus_normed: "",
}
"""Tried in this order: rule -> the attribute of a router that it takes, if any.

To add one, write its function here and enter it. Which rule a router follows is found by probing
it, so that no list of model names has to be kept."""


NUM_TOKENS = 32
LEAST_SPREAD = 0.1
"""Below this standard deviation of the logits all rules give nearly constant weights."""
ENOUGH = 0.9
"""Least share of tokens that a router's own rule explains; any other explains next to none."""


def find_rule(gate: Gate) -> WeightingRule | None:
    """Find the rule that reproduces this router's weights on random input, or None."""
    if gate.missing:
        return None
    choice = gate.probe(NUM_TOKENS)
    logits_TE, weights_TK, experts_TK = (t.float() for t in choice)
    if gate.skips or float(logits_TE.std()) < LEAST_SPREAD:
        return None
    experts_TK = experts_TK.long()
    for raw, attribute in RULES.items():
        parameters = _parameters(gate.router, attribute)
        if parameters is None:
            continue
        ratio = weights_TK / raw(logits_TE, experts_TK, *parameters)
        scale = float(ratio.median())
        # bf16 keeps 8 bits of a weight, hence the tolerance; a rule with a threshold may put a
        # token on its other side.
        close = torch.isclose(ratio, torch.full_like(ratio, scale), rtol=0.02)
        if close.all(-1).float().mean() >= ENOUGH:
            return WeightingRule(raw, parameters, _exact_scale(gate.router, scale))
    return None


def _parameters(router: nn.Module, attribute: str) -> tuple[Any, ...] | None:
    """Return what a rule takes besides logits; None where the router does not have it."""
    if not attribute:
        return ()
    value = getattr(router, attribute, None)
    if isinstance(value, Tensor):
        value = value_of(router, attribute).detach().float()
    return None if value is None else (value,)


def find_rules(gates: Sequence[Gate]) -> list[WeightingRule | None]:
    """Return each router's weighting rule. Raises ValueError where one is not known."""
    rules = [find_rule(gate) for gate in gates]
    if None in rules:
        raise _unknown_rule_error(gates[rules.index(None)])
    return rules


def check_rules(gates: Sequence[Gate]) -> None:
    """Raise the error of `find_rules` for routers that have no weights yet."""
    for gate in {type(gate.router): gate for gate in gates}.values():
        if find_rule(gate.stand_in() if gate.is_empty else gate) is None:
            raise _unknown_rule_error(gate)


def _unknown_rule_error(gate: Gate) -> ValueError:
    needs = f" and needs {', '.join(gate.missing)} besides hidden states" if gate.missing else ""
    return ValueError(
        f"routing, miss: the router {gate.name} weighs its experts by a rule that is not known"
        f"{needs}, so a changed selection cannot be weighted. Allowed for this model: "
        "routing=standard with miss=fetch."
    )


def _exact_scale(router: nn.Module, seen: float) -> float:
    """Return the router's own scaling factor where it matches the one seen, else that, rounded."""
    factor = getattr(router, "routed_scaling_factor", None)
    if isinstance(factor, int | float) and abs(seen / factor - 1) < 0.02:
        return float(factor)
    return 1.0 if abs(seen - 1) < 0.02 else float(f"{seen:.4g}")


def changed_output(
    output: Any,
    choice: Choice,
    selection: Selection,
    rule: WeightingRule,
    valid: BoolArray | None,
    own: IntArray,
) -> Any:
    """Return a router's output with this selection for its `valid` tokens (None: for all).

    Tokens that keep the router's experts keep its weights untouched. `own` holds the router's
    experts of the valid tokens, in any order.
    """
    weights_TK, experts_TK = choice.weights, choice.experts
    told = _changed_tokens(selection, own)
    if True not in told:
        return output
    # All tokens are weighed in one call, also those that change nothing.
    arrays: dict[str, Any] = {"chosen": selection.experts}
    given = {"weigh_as": selection.weigh_as, "explicit": selection.weights, "keep": selection.keep}
    arrays |= {name: values for name, values in given.items() if values is not None}
    if False in told:
        arrays["changed"] = np.array(told)[:, None]
    if valid is not None:
        arrays["rows"] = valid.nonzero()[0]
    if selection.renormalize is not False:
        arrays["shares"] = np.broadcast_to(selection.renormalize, len(told))[:, None].copy()
    sent = dict(zip(arrays, copies_on_device([*arrays.values()], experts_TK.device), strict=True))
    logits = _of_tokens(choice.logits, sent.get("rows"))
    weigh_as = as_dtype(sent.get("weigh_as", sent["chosen"]), torch.int64)
    weighted = rule(logits, weigh_as, torch.float32)
    if "explicit" in sent:
        explicit = sent["explicit"].to(weighted.dtype)
        weighted = torch.where(explicit.isnan(), weighted, explicit)
    kept_weights = weighted * sent["keep"] if "keep" in sent else weighted
    if "shares" in sent:
        # The kept experts share the token's total weight; a token may keep none.
        ratio = weighted.sum(-1, keepdim=True)
        ratio = ratio / kept_weights.sum(-1, keepdim=True).clamp_min(1e-20)
        kept_weights = kept_weights * torch.where(sent["shares"], ratio, 1.0)
    experts = as_dtype(sent["chosen"], experts_TK.dtype)
    weights = as_dtype(kept_weights, weights_TK.dtype)
    if "changed" in sent:
        was = [_of_tokens(values, sent.get("rows")) for values in (experts_TK, weights_TK)]
        experts = torch.where(sent["changed"], experts, was[0])
        weights = torch.where(sent["changed"], weights, was[1])
    if valid is not None:
        kept = torch.contiguous_format
        every = [whole.clone(memory_format=kept) for whole in (experts_TK, weights_TK)]
        for whole, new in zip(every, (experts, weights), strict=True):
            whole.flatten(0, -2)[sent["rows"]] = new
        experts, weights = every
    return (output[0], weights.view_as(weights_TK), experts.view_as(experts_TK), *output[3:])


def _of_tokens(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return values [..., n] as [tokens, n], of these rows if given."""
    return rows_of(values) if rows is None else rows_of(values)[rows]


def _changed_tokens(selection: Selection, own: IntArray) -> list[bool]:
    """Return for each token whether others than its `own` experts are executed or weighed."""
    chosen, keep, weigh_as = selection.experts, selection.keep, selection.weigh_as
    if len(own) == 1 and keep is None and weigh_as is None and selection.weights is None:
        # A fifth of the time for the commonest case, a decoded token.
        return [sorted(chosen[0].tolist()) != sorted(own[0].tolist())]
    changed: BoolArray = (np.sort(chosen) != np.sort(own)).any(axis=-1)
    if keep is not None:
        changed |= ~keep.all(-1)
    if weigh_as is not None:
        changed |= (weigh_as != chosen).any(-1)
    if selection.weights is not None:
        changed |= ~np.isnan(selection.weights).all(-1)
    told: list[bool] = changed.tolist()
    return told
