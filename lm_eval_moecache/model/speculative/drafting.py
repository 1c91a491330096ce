"""What watches a draft: hooks that tell its time and its predictions, and transformers' candidates.

Shapes: T tokens of a forward of the draft, E experts of the target, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
)

from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.model.moe_layers import MoELayer
from lm_eval_moecache.model.speculative.draft_model import DraftModel, matching_layers


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
                gate = self._targets[target].gate
                logits = gate.predict(hidden_TD[-1:].to(gate.dtype)).float()
                stage.predict(target, logits.reshape(1, -1).cpu().numpy())
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


class ReadAlong:
    """Runs the draft before each decode pass, on the tokens that it has not read yet.

    Its time and its predictions go the way of speculative drafting, and what it would write next is
    not asked. As there, the prompt's own pass is without it: it reads the prompt before the first
    decoded token. Changes: the hooks of `DraftHooks`, until `remove`.
    """

    def __init__(self, draft: DraftModel, targets: Sequence[MoELayer], engine: Engine) -> None:
        assert engine.draft_stage is not None, "a draft model without a draft stage"
        self._hooks = DraftHooks(draft, targets, engine.draft_stage)
        self._model, self._engine = draft.model, engine
        self._ids: Tensor | None = None
        self._past: Any = None
        self._num_read = 0

    def remove(self) -> None:
        """Take the hooks off. Safe to call twice."""
        self._hooks.remove()

    @torch.no_grad()
    def begin_pass(self, input_ids: Tensor, past_length: int) -> None:
        """Follow the text [1, tokens], and read on where the pass decodes."""
        if past_length == 0 or self._ids is None:
            self._ids, self._past, self._num_read = input_ids, None, 0
            return
        if len(input_ids) > 1:
            raise ValueError(
                f"num_beams: prefetch='draft' reads one text at a time, and this pass decodes "
                f"{len(input_ids)}. Allowed: num_beams=1."
            )
        assert self._ids.shape[1] == past_length, "a text that the draft has not followed"
        self._ids = torch.cat([self._ids, input_ids], dim=1)
        self._engine.begin_draft()
        output = self._model(
            self._ids[:, self._num_read :], past_key_values=self._past, use_cache=True
        )
        self._past, self._num_read = output.past_key_values, self._ids.shape[1]


Settle = Callable[[int, int], object]
"""(tokens drafted, of these accepted)"""


class WatchedCandidates(CandidateGenerator):
    """Leaves the first pass to the prompt alone, and tells the engine of each later draft.

    transformers drafts before the first pass and verifies those drafts along with the prompt.
    Here the first pass is the prefill that it is without a draft, so that TTFT, the rates of
    prefill and the first token's logits are the same; the draft reads the prompt after it.
    """

    requires_model_outputs = False

    def __init__(self, drafter: Any, engine: Engine, settle: Settle) -> None:
        self._drafter = drafter
        self._engine = engine
        self._settle = settle
        self._num_calls = 0
        self._drafted: list[int] = []

    def get_candidates(self, input_ids: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._num_calls += 1
        if self._num_calls == 1:
            return input_ids, None
        if isinstance(self._drafter, AssistedCandidateGenerator):
            if self._num_calls == 2:
                # The prompt has grown by a token since these were made for it.
                self._drafter.assistant_kwargs.pop("position_ids", None)
                mask = input_ids.new_ones(input_ids.shape)
                self._drafter.assistant_kwargs["attention_mask"] = mask
            self._engine.begin_draft()
        candidate_ids, logits = self._drafter.get_candidates(input_ids, **kwargs)
        self._drafted = candidate_ids[0, input_ids.shape[1] :].tolist()
        return candidate_ids, logits

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
        """Called after each pass of the target; the length of drafts stays as it is."""
        accepted, drafted = int(num_matches), self._drafted
        # transformers cuts behind a closing token, and takes it for the pass' own if drafted.
        accepted += drafted[accepted : accepted + 1] == input_ids[0, -1:].tolist()
        self._settle(len(drafted), accepted)


@contextmanager
def watched_by(settle: Settle, engine: Engine, model: Any) -> Iterator[None]:
    """Watch the drafts of the model's assisted generation, while this lasts.

    `settle` is told after each pass what became of the tokens drafted for it.
    """
    original = model._get_candidate_generator

    def make(*args: Any, **kwargs: Any) -> WatchedCandidates:
        return WatchedCandidates(original(*args, **kwargs), engine, settle)

    model._get_candidate_generator = make
    try:
        yield
    finally:
        del model._get_candidate_generator
