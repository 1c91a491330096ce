"""The model and the text of an analysis, and one way to run them under a setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.engine import Engine as VirtualEngine
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.model.hook import WrappedModel
from lm_eval_moecache.model.reading import ReadingModel
from lm_eval_moecache.profiling._texts import texts_in
from lm_eval_moecache.records.files import TINY, read_text
from lm_eval_moecache.records.hardware import DEFAULT_PROFILE, load_hardware
from lm_eval_moecache.records.sizes import parse_capacity

Rows = list[dict[str, Any]]


class Analysis(NamedTuple):
    """The result of every analysis."""

    tables: Mapping[str, Rows]
    draw: Callable[[], Any]
    """Returns a figure, to which the title is added."""
    title: str
    about: str = ""
    """What the title says after the model."""


class AnalyzedModel(ReadingModel):
    """A reading model that runs under a policy; every `under` starts with a cold cache."""

    def losses(self, window: torch.Tensor, reduction: str = "none") -> torch.Tensor:
        """Return the current model's loss of each token's successor [T - 1], in nats."""
        logits = self.logits(window).float()
        targets = window[1:].to(logits.device)
        return torch.nn.functional.cross_entropy(logits, targets, reduction=reduction)

    def perplexity(self) -> float:
        """Return the current model's perplexity on the text."""
        total = sum(float(self.losses(window, "sum")) for window in self.windows)
        return math.exp(total / sum(len(window) - 1 for window in self.windows))

    @contextmanager
    def under(
        self,
        overrides: Mapping[str, Any],
        *,
        capacity: str = "100%",
        scan: bool = False,
        seed: int = 0,
    ) -> Iterator[VirtualEngine]:
        """Run the model with these overrides of `policy` (default on_demand); yield the engine.

        `scan` routes a text token after token as if decoded, and needs a cache per layer.
        """
        axes = dict(overrides)
        setting = Setting(
            policy=load_policy(axes.pop("policy", "on_demand"), axes),
            capacity=parse_capacity(capacity, self.geometry),
            hardware=load_hardware(DEFAULT_PROFILE),
            seed=seed,
        )
        engine = VirtualEngine(self.geometry, setting)
        wrapped = WrappedModel(self.model, self.layers, engine)
        wrapped.scan_scoring = scan
        try:
            yield engine
        finally:
            wrapped.unwrap()


def read_texts(pretrained: str, path: str | None) -> list[str]:
    """Return the texts to analyse; `tiny` has its own held-out pages where none is named.

    A file is one text; each line of a `.jsonl` is one, or has one under `text` or `page`.
    """
    if path is None:
        if pretrained != TINY:
            raise ValueError(
                f"text: pretrained={pretrained!r} needs a text to read. Allowed: --text FILE with "
                "plain text, for example the WikiText validation pages."
            )
        from lm_eval_moecache.tiny.documents import wikitext

        return list(wikitext()["test"]["page"])
    if path.endswith(".jsonl"):
        return texts_in(path, "text", ("text", "page"))
    return [read_text(path, f"text={path!r}")]
