"""The model and the text of an analysis, and one way to run them under a setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.model.reading import ReadingModel
from lm_eval_moecache.model.wrap import WrappedModel
from lm_eval_moecache.records.files import TINY, lines_of, parse_json, read_text
from lm_eval_moecache.records.hardware import DEFAULT_PROFILE, load_hardware
from lm_eval_moecache.records.sizes import parse_capacity

Rows = list[dict[str, Any]]


class Analysis(NamedTuple):
    """The result of every analysis: tables by name, a title, and what draws the plot under it."""

    tables: Mapping[str, Rows]
    title: str
    draw: Callable[[str], Any]


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

    A file is one text; each line of a `.jsonl` has one, under `text` or `page`.
    """
    if path is None:
        if pretrained != TINY:
            raise ValueError(
                f"text: pretrained={pretrained!r} needs a text to read. Allowed: --text FILE with "
                "plain text, for example the WikiText validation pages."
            )
        from lm_eval_moecache.tiny.documents import wikitext

        return list(wikitext()["test"]["page"])
    content = read_text(path, f"text={path!r}")
    if not path.endswith(".jsonl"):
        return [content]
    texts = []
    for number, line in enumerate(lines_of(content), 1):
        label = f"text={path!r}: line {number}"
        row = parse_json(line, label)
        page = row.get("text", row.get("page")) if isinstance(row, dict) else None
        if not isinstance(page, str):
            raise ValueError(f"{label} has no text under `text` or `page`.")
        texts.append(page)
    return texts
