"""transformers' candidate generators, watched: what is drafted when, and how much is accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
)

from lm_eval_moecache.engine.engine import Engine

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
