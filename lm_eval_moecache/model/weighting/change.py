"""Puts a changed selection into a router's output, weighted by the family's own rule.

Shapes: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm_eval_moecache.model.device import copy_to_device
from lm_eval_moecache.model.gate import Choice
from lm_eval_moecache.model.store import BoolArray
from lm_eval_moecache.model.weighting.rules import WeightingRule
from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.selection import Selection


def changed_output(
    output: Any,
    choice: Choice,
    selection: Selection,
    rule: WeightingRule,
    valid: BoolArray | None,
    own: IntArray,
) -> Any:
    """Return a router's output with this selection for its `valid` tokens (None: for all).

    Tokens whose experts are the router's own keep its weights untouched. `own` are these experts of
    the valid tokens, in any order.
    """
    logits_TE, weights_TK, experts_TK = choice
    if valid is None and _is_plain(selection):
        return _of_one_token(output, choice, selection.experts, rule, own)
    weigh_as = selection.experts if selection.weigh_as is None else selection.weigh_as
    keep = np.ones(weigh_as.shape, bool) if selection.keep is None else selection.keep
    changed = _which_change(selection, own, weigh_as, keep)
    if not changed.any():
        return output
    served = np.arange(len(keep)) if valid is None else valid.nonzero()[0]
    rows = copy_to_device(served[changed], experts_TK.device)
    weighted = rule(
        logits_TE.reshape(-1, logits_TE.shape[-1])[rows],
        copy_to_device(weigh_as[changed], experts_TK.device, torch.int64),
        torch.float32,
    )
    kept = _kept(selection, weighted, changed, keep)
    if len(keep) == 1 and valid is None:
        chosen = copy_to_device(selection.experts, experts_TK.device, experts_TK.dtype)
        new_weights = kept.to(weights_TK.dtype).reshape(weights_TK.shape)
        return (output[0], new_weights, chosen.reshape(experts_TK.shape), *output[3:])
    experts, weights = experts_TK.clone(), weights_TK.clone()
    experts[rows] = copy_to_device(selection.experts[changed], experts.device, experts.dtype)
    weights[rows] = kept.to(weights.dtype)
    return (output[0], weights, experts, *output[3:])


def _of_one_token(
    output: Any, choice: Choice, experts: IntArray, rule: WeightingRule, own: IntArray
) -> Any:
    """Return the output with these experts [1, K] in place of the router's `own`."""
    if sorted(experts.tolist()[0]) == sorted(own.tolist()[0]):
        return output
    logits_TE, weights_TK, experts_TK = choice
    if logits_TE.dim() != 2:
        logits_TE = logits_TE.reshape(1, -1)
    chosen = copy_to_device(experts, experts_TK.device)
    weights, chosen = rule(logits_TE, chosen, weights_TK.dtype), chosen.to(experts_TK.dtype)
    if experts_TK.dim() != 2:
        weights, chosen = weights.reshape(weights_TK.shape), chosen.reshape(experts_TK.shape)
    return (output[0], weights, chosen, *output[3:])


def _is_plain(selection: Selection) -> bool:
    """Whether it is one token's, and says nothing but which experts."""
    return (
        len(selection.experts) == 1
        and selection.keep is None
        and selection.weigh_as is None
        and selection.weights is None
        and not selection.renormalize
    )


def _kept(selection: Selection, weighted: Tensor, changed: BoolArray, keep: BoolArray) -> Tensor:
    """Return the weights of the changed tokens' experts, 0 where one is dropped."""
    if selection.weights is not None:
        given = copy_to_device(selection.weights[changed], weighted.device, weighted.dtype)
        weighted = torch.where(given.isnan(), weighted, given)
    kept = weighted * copy_to_device(keep[changed], weighted.device)
    if selection.renormalize:
        # What a token gave to all its experts, the kept ones share; a token may have kept none.
        kept *= weighted.sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp_min(1e-20)
    return kept


def _which_change(selection: Selection, own: Any, weigh_as: Any, keep: Any) -> BoolArray:
    changed: BoolArray = (np.sort(selection.experts) != np.sort(own)).any(-1) | ~keep.all(-1)
    if selection.weigh_as is not None:
        changed |= (weigh_as != selection.experts).any(-1)
    if selection.weights is not None:
        changed |= ~np.isnan(selection.weights).all(-1)
    return changed
