"""What can be wrong with a draft, found before any weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers.utils import cached_file

from lm_eval_moecache.engine.setting import PROMPT_LOOKUP, SELF
from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.harness.preflight import model_name
from lm_eval_moecache.model.checkpoint import check_weights, model_path, skeleton
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.precision.ladder import codecs_of
from lm_eval_moecache.model.precision.stored import expert_bytes
from lm_eval_moecache.model.speculative.draft_model import matching_layers, measure


def check_draft(config: Config, pretrained: Any, theirs: Mapping[str, Any]) -> None:
    """Refuse a draft that cannot draft for this model, or whose layers the prefetch cannot use."""
    assert config.draft is not None
    check_fit(config.draft, pretrained, theirs, config.policy.prefetch.algorithm.needs_draft)


def check_fit(draft: str, pretrained: Any, theirs: Mapping[str, Any], needs_layers: bool) -> None:
    """Refuse a draft that does not fit a model; ValueError names both values.

    Any layers and sizes can draft; `prefetch=draft` needs the target's hidden size and number of
    layers.
    """
    if draft == PROMPT_LOOKUP:
        return
    target = skeleton(pretrained, theirs)
    if draft.startswith(SELF):
        _check_precision(draft, target, str(theirs.get("device", "cpu")))
        return
    try:
        model = skeleton(draft, {})
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"draft={draft!r} is not a model that can be read: {reason} Allowed: a folder, a hub "
            f"id, {SELF}int4 or {PROMPT_LOOKUP}."
        ) from error
    _check_vocabulary(draft, pretrained, model, target)
    blocks, _ = measure(model, draft)
    if needs_layers:
        _check_layers(draft, model, target)
        layers = find_moe_layers(target)
        if len(matching_layers(blocks, layers)) < len(layers):
            raise ValueError(
                f"draft={draft!r} has no feed-forward block at the place of each of the "
                f"{len(layers)} MoE layers, which prefetch='draft' predicts layer by layer. "
                "Allowed: another draft, or another prefetch."
            )
    check_weights("draft", model_path(draft), {})


def _check_precision(draft: str, target: Any, device: str) -> None:
    """Refuse a codec that does not exist, does not work here, or cannot store these matrices."""
    try:
        codecs = codecs_of((draft.removeprefix(SELF),), device.partition(":")[0])
        for layer in find_moe_layers(target):
            expert_bytes(layer.experts, codecs)
    except ValueError as error:
        raise ValueError(f"draft={draft!r}: {error}") from error


def _check_vocabulary(draft: str, pretrained: Any, model: Any, target: Any) -> None:
    sizes = [m.config.get_text_config().vocab_size for m in (model, target)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"draft={draft!r} has a vocabulary of {sizes[0]} tokens and the model one of "
            f"{sizes[1]}: its tokens mean something else. Allowed: a draft with the model's "
            "tokenizer, or prompt_lookup."
        )
    ours, theirs = _vocabulary(model_name(pretrained)), _vocabulary(draft)
    # A draft may come without a tokenizer of its own.
    if theirs is not None and ours is not None and theirs != ours:
        raise ValueError(
            f"draft={draft!r} has a tokenizer whose tokens are not the model's, though there are "
            f"{sizes[0]} of both. Allowed: a draft with the model's tokenizer, or prompt_lookup."
        )


def _vocabulary(name: str) -> dict[str, int] | None:
    """Return token -> id of a model's tokenizer, or None where the model comes without one."""
    path = model_path(name)
    try:
        # Without this file transformers makes up a tokenizer of hardly any tokens.
        cached_file(path, "tokenizer_config.json")
        found: dict[str, int] = transformers.AutoTokenizer.from_pretrained(path).get_vocab()
    except (OSError, ValueError):
        return None
    return found


def _check_layers(draft: str, model: Any, target: Any) -> None:
    ours, theirs = (m.config.get_text_config() for m in (target, model))
    for key, what in (("num_hidden_layers", "layers"), ("hidden_size", "hidden size")):
        if getattr(theirs, key) != getattr(ours, key):
            raise ValueError(
                f"draft={draft!r} has {key}={getattr(theirs, key)} and the model "
                f"{getattr(ours, key)}: prefetch='draft' hands the output of each draft layer to "
                f"the gate of the model's same layer, so the {what} must be equal. Allowed: "
                "another prefetch with this draft, or another draft."
            )
