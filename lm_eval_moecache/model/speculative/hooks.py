"""Hooks on the draft model: its time, and its attention outputs through the target's gates.

Shapes: T tokens of a forward of the draft, E experts of the target, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.model.gate import Gate
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.speculative.draft_model import DraftModel, matching_layers
from lm_eval_moecache.records.arrays import FloatArray


class DraftHooks:
    """Tells a draft stage of every block that the draft runs while the stage is open.

    Changes: forward hooks on the draft's blocks and routers, until `remove`.
    """

    def __init__(self, draft: DraftModel, targets: Sequence[MoELayer], stage: DraftStage) -> None:
        self._stage = stage
        self._targets = targets
        matches = matching_layers(draft.blocks, targets)
        self._handles: list[Any] = []
        for index, block in enumerate(draft.blocks):
            before = self._block_hook(index, matches.get(index), is_dense=block.router is None)
            self._handles.append(block.feed_forward.register_forward_pre_hook(before))
            if block.router is not None:
                after = self._router_hook(index)
                self._handles.append(block.router.register_forward_hook(after))

    def remove(self) -> None:
        """Take the hooks off. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _block_hook(
        self, index: int, target: int | None, is_dense: bool
    ) -> Callable[[nn.Module, Any], None]:
        def hook(block: nn.Module, args: Any) -> None:
            stage = self._stage
            if not stage.is_open:
                return
            hidden_TD: Tensor = args[0].reshape(-1, args[0].shape[-1])
            stage.dense(index, len(hidden_TD))
            if target is not None and stage.wants(target):
                # The last token only: those before it (the prompt) have been verified already.
                stage.predict(target, ask_gate(self._targets[target].gate, hidden_TD[-1:]))
            if is_dense:
                stage.experts(index, 1, len(hidden_TD))

        return hook

    def _router_hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(router: nn.Module, args: Any, output: Any) -> None:
            if self._stage.is_open:
                experts: Tensor = output[2].reshape(-1, output[2].shape[-1])
                # A token's experts are different ones: looking at them would wait for the device.
                one = len(experts) == 1
                count = experts.numel() if one else len(set(experts.flatten().tolist()))
                self._stage.experts(index, count, len(experts))

        return hook


def ask_gate(gate: Gate, hidden: Tensor) -> FloatArray:
    """Return the [1, experts] logits of a target's gate; its own hooks do not fire."""
    logits = gate.predict(hidden.to(gate.dtype)).float()
    scores: FloatArray = logits.reshape(1, -1).cpu().numpy()
    return scores
