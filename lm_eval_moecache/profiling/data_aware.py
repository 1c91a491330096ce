"""The action `moecache profile data_aware`."""

from __future__ import annotations

from typing import Any

from lm_eval_moecache.profiling._texts import TRAINING, check_training
from lm_eval_moecache.records.artifact import DATA_AWARE
from lm_eval_moecache.records.command import Report, with_options
from lm_eval_moecache.records.ranges import Count


@with_options(TRAINING, limit=200, tokens=40, batch_size=16, max_epochs=60)
def profile_data_aware(*, out: str, width: Count = 128, **given: Any) -> Report:
    """Train SiDA's data-aware network, which predicts all layers' experts from a text's tokens.

    The prompts are those of `moecache profile predictor`: documents that `--tasks` are trained on
    (never what they are tested on) or files; `tiny` has its own generator's where neither is given.

    Args:
        out: the network: NAME.safetensors
        width: of the network
    """
    given |= {"out": out, "width": width}
    check_training(given)
    # Imported late: it brings torch, and a wrong option should not wait for it.
    from lm_eval_moecache.model.predictor.training import TextRecipe, train_on_texts
    from lm_eval_moecache.profiling._training import train_artifact

    return train_artifact(given, DATA_AWARE, TextRecipe, train_on_texts)
