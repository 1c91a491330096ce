"""The harness model `moecache-spec`: an expert cache under speculative decoding with a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor

from lm_eval_moecache.engine.setting import PROMPT_LOOKUP, Setting
from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.harness.lm import Checked, MoECacheLM
from lm_eval_moecache.harness.lm import check_arguments as check_plain
from lm_eval_moecache.harness.preflight import Bare
from lm_eval_moecache.model.checkpoint import skeleton
from lm_eval_moecache.model.speculative.draft_model import DraftModel, make_draft, measure_overlap
from lm_eval_moecache.model.speculative.drafting import DraftHooks, watched_by


class MoECacheSpecLM(MoECacheLM):
    """`moecache` whose generations are drafted: greedy, one request at a time.

    Takes the keys of `moecache`, `draft` and `draft_tokens`. The outputs are those of plain greedy
    decoding, token for token, as long as the policy is lossless and no two logits tie in the
    model's precision. Scoring requests run without the draft, as under `moecache`.
    """

    is_speculative: ClassVar[bool] = True
    _draft: DraftModel | None = None
    _draft_hooks: DraftHooks | None = None

    def _check(self, pretrained: Any, arguments: Mapping[str, Any]) -> Checked:
        return check_arguments(pretrained, arguments)

    def _wrap(self, config: Config) -> None:
        if self._draft_hooks is not None:
            self._draft_hooks.remove()
            self._draft_hooks = None
        self._draft = self._find_draft(config)
        super()._wrap(config)
        if self._draft is not None:
            stage = self.engine.draft_stage
            assert stage is not None, "a draft model without a draft stage"
            if config.clock == "wall":
                measure_overlap(self._draft, self.engine, stage)
            self._draft_hooks = DraftHooks(self._draft, self._moe_layers, stage)

    def _find_draft(self, config: Config) -> DraftModel | None:
        """Return the draft to use, as loaded before where it is the same model."""
        assert config.draft is not None and config.draft_tokens is not None
        if config.draft == PROMPT_LOOKUP:
            return None
        if self._draft is not None and self._draft.name == config.draft:
            return self._draft.drafting(config.draft_tokens)
        # Freed first: two drafts may not fit.
        self._draft = None
        experts_of = self.loader.experts_of()
        return make_draft(config.draft, self.model, config.draft_tokens, experts_of)

    def _setting(self, config: Config) -> Setting:
        draft = None if self._draft is None else self._draft.cost
        return config.setting(self.geometry).with_draft(draft)

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
        # As HFLM does around its own call.
        lower = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=lower, enabled=lower is not None):
            output: Tensor = self.model.generate(
                input_ids=context,
                max_length=max_length,
                stopping_criteria=criteria,
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                **_greedy(kwargs),
            )
        return output


def check_arguments(
    pretrained: Any, arguments: Mapping[str, Any], bare: Bare = skeleton
) -> Checked:
    """As `moecache`'s, and check that the draft fits the model, without loading any weights."""
    return check_plain(pretrained, arguments, bare, speculative=True)


def _greedy(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation arguments without those of sampling, which have been checked."""
    rest = {k: v for k, v in kwargs.items() if k not in ("temperature", "do_sample", "top_p")}
    return {**rest, "do_sample": False}
