"""The harness model `moecache-spec`: an expert cache under speculative decoding with a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor

from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.speculative import DraftHooks, DraftModel, watched_by


class MoECacheSpecLM(MoECacheLM):
    """`moecache` whose generations are drafted: greedy, one request at a time.

    Takes the keys of `moecache`, `draft` and `draft_tokens`. The outputs are those of plain greedy
    decoding, token for token, as long as the policy is lossless and no two logits tie in the
    model's precision. Scoring requests run without the draft, as under `moecache`.
    """

    is_speculative: ClassVar[bool] = True

    def _follow(self, draft: DraftModel, stage: DraftStage) -> DraftHooks:
        return DraftHooks(draft, self._moe_layers, stage)

    def _generate(self, context: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Generate greedily with the draft, and cut what was accepted after the stop string."""
        stop: Sequence[str] = kwargs["stop"]
        with watched_by(self._settle, self.engine, self.model):
            output = self._assisted(context, **kwargs)
        row: list[int] = output[0, context.shape[1] :].tolist()
        return output[:, : context.shape[1] + self._count_output(row, stop)]

    def _settle(self, drafted: int, accepted: int) -> None:
        self.engine.settle_drafts(drafted, accepted)
        if self.wrapped.recorder is not None:
            self.wrapped.recorder.settle(drafted, accepted)

    def _assisted(
        self, context: Tensor, *, stop: Sequence[str], max_length: int, **kwargs: Any
    ) -> Tensor:
        tokens = self.moecache.draft_tokens
        assert tokens is not None
        criteria = stop_sequences_criteria(self.tokenizer, list(stop), context.shape[1], 1)
        for criterion in criteria:
            # It looks at the last tokens only, and a verify pass adds several.
            criterion.sequence_id_len += tokens
        if self._draft is None:
            kwargs["prompt_lookup_num_tokens"] = tokens
        else:
            kwargs["assistant_model"] = self._draft.model
            drafting = self._draft.model.generation_config
            # Neither length nor confidence adapt: each draft has the tokens that were asked for.
            drafting.num_assistant_tokens = tokens
            drafting.num_assistant_tokens_schedule = "constant"
            drafting.assistant_confidence_threshold = 0.0
        # Those of sampling have been checked: they say greedy.
        for key in ("temperature", "do_sample", "top_p"):
            kwargs.pop(key, None)
        # As HFLM does around its own call.
        lower = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=lower, enabled=lower is not None):
            output: Tensor = self.model.generate(
                input_ids=context,
                max_length=max_length,
                stopping_criteria=criteria,
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                do_sample=False,
                **kwargs,
            )
        return output
