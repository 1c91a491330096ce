"""The action `moecache profile predictor`."""

from __future__ import annotations

from typing import Any, Literal

from lm_eval_moecache.profiling._texts import TRAINING, check_training
from lm_eval_moecache.records.artifact import PREDICTOR
from lm_eval_moecache.records.command import Report, with_options


@with_options(TRAINING, limit=1000, learning_rate=5e-5)
def profile_predictor(*, out: str, loss: Literal["bce", "kl"] = "kl", **given: Any) -> Report:
    """Train CommitMoE's predictors of the next layer's experts on what a model generates.

    The prompts are documents that `--tasks` are trained on (never what they are tested on) or
    files: `.jsonl` with a string or {"prompt": ...} a line, or plain text with a prompt a line.
    `tiny` has its own generator's where neither is given (section 4.2).

    Args:
        out: the predictor: NAME.safetensors
        loss: kl (eq. 4), or bce of the chosen experts
    """
    given |= {"out": out, "loss": loss}
    check_training(given)
    # Imported late: it brings torch, and a wrong option should not wait for it.
    from lm_eval_moecache.model.predictor.training import Recipe, train_layers
    from lm_eval_moecache.profiling._training import train_artifact

    return train_artifact(given, PREDICTOR, Recipe, train_layers)
