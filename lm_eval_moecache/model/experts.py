"""The experts function that transformers calls instead of its own kernels."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lm_eval_moecache.model.store import LayerStore

IMPLEMENTATION = "moecache"
STORE_ATTRIBUTE = "moecache_store"


def experts_forward(
    module: nn.Module, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Run the chosen experts [T, K] on hidden states [T, D] from the store of this module.

    The router hook has already decided what `index_TK` and `weights_TK` are.
    """
    store: LayerStore = getattr(module, STORE_ATTRIBUTE)
    return store.run(module, hidden_TD, index_TK, weights_TK)


def register_experts_function() -> None:
    """Make `moecache` an experts implementation that models can be set to."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
