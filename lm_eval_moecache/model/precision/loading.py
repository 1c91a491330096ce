"""Loads a model whose experts are encoded as they come: one layer at full precision at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from tqdm import tqdm

from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.precision.base import Codec
from lm_eval_moecache.model.precision.encoding import Noted, encode
from lm_eval_moecache.model.precision.kept import KeptEncodings
from lm_eval_moecache.model.precision.mapped import page_out_checkpoints
from lm_eval_moecache.model.precision.stored import (
    Encoded,
    expert_matrices,
    is_matrices,
    shape_without_memory,
)

_HELD, _IS_KEPT = "moecache_encoded", "moecache_is_kept"
# transformers reads ahead in threads, as fast as the disk is, unless this is set.
_IN_ORDER = "HF_DEACTIVATE_ASYNC_LOAD"


@contextmanager
def encoding(
    skeleton: Sequence[MoELayer], codecs: Sequence[Codec], kept: KeptEncodings | None = None
) -> Iterator[None]:
    """Encode expert matrices while `from_pretrained` sets them, each in its turn.

    Within the block, setting a matrix on a module of the skeleton's experts classes leaves a shape
    without memory there. `take` collects what was encoded. Where all of it is `kept` already,
    nothing is encoded.
    """
    is_kept = kept is not None and kept.has_all(len(skeleton))
    classes = {type(layer.experts) for layer in skeleton}
    before = os.environ.get(_IN_ORDER)
    os.environ[_IN_ORDER] = "1"
    bar = tqdm(
        desc=f"encoding experts at {':'.join(codec.name for codec in codecs)}",
        total=sum(_num_matrices(layer) for layer in skeleton) * len(codecs),
        unit=" matrices",
        delay=2,
        disable=is_kept,
    )
    for each in classes:
        usual = each.__setattr__
        setter = _setter(usual, codecs, is_kept, bar.update)
        each.__setattr__ = setter  # type: ignore[assignment]
    try:
        yield
    finally:
        bar.close()
        for each in classes:
            del each.__setattr__
        os.environ.pop(_IN_ORDER)
        if before is not None:
            os.environ[_IN_ORDER] = before


def _num_matrices(layer: MoELayer) -> int:
    return sum(len(stacked) for stacked in expert_matrices(layer.experts).values())


def _setter(
    usual: Any, codecs: Sequence[Codec], is_kept: bool, noted: Noted
) -> Callable[[Any, str, Any], None]:
    def set_attribute(module: Any, name: str, value: Any) -> None:
        if (
            isinstance(value, nn.Parameter)
            and name in module._parameters
            and not value.is_meta
            and is_matrices(module, value)
        ):
            if is_kept:
                module.__dict__[_IS_KEPT] = True
            else:
                module.__dict__.setdefault(_HELD, {})[name] = encode(module, value, codecs, noted)
            page_out_checkpoints()
            shape = shape_without_memory(value)
            # Else transformers would fill what it takes for a parameter that nobody loaded.
            shape._is_hf_initialized = True  # type: ignore[attr-defined]
            value = shape
        usual(module, name, value)

    return set_attribute


def take(
    layers: Sequence[MoELayer], codecs: Sequence[Codec], kept: KeptEncodings | None = None
) -> list[dict[str, Encoded]]:
    """Return each layer's encoded matrices, and encode those that were set in another way."""
    return [take_layer(index, layer, codecs, kept) for index, layer in enumerate(layers)]


def take_layer(
    index: int, layer: MoELayer, codecs: Sequence[Codec], kept: KeptEncodings | None = None
) -> dict[str, Encoded]:
    """As `take`, of one layer; what was encoded now is kept for the next load."""
    held: dict[str, Encoded] = vars(layer.experts).pop(_HELD, {})
    if vars(layer.experts).pop(_IS_KEPT, False):
        assert kept is not None, "skipped without a place to read from"
        return kept.read(index, layer.experts)
    for name, stacked in expert_matrices(layer.experts).items():
        if name not in held:
            held[name] = encode(layer.experts, stacked, codecs)
            setattr(layer.experts, name, shape_without_memory(stacked))
    if kept is not None:
        kept.write(index, held)
    return held
