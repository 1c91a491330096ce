"""The model and the text of an analysis, and one way to run them under a setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.engine.setting import Setting
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.harness.arguments import as_arguments_error
from lm_eval_moecache.model.checkpoint import load_model
from lm_eval_moecache.model.moe_layers import MoELayer, describe, find_moe_layers
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


@contextmanager
def watched(
    modules: Iterable[torch.nn.Module], note: Callable[[int, Any, Any], None]
) -> Iterator[None]:
    """Call `note(number of the module, its arguments, its output)` after each module's calls."""
    with ExitStack() as hooks:
        for number, module in enumerate(modules):
            # A hook's first argument is its module, for which the number stands here.
            hook = partial(lambda number, module, args, output: note(number, args, output), number)
            hooks.callback(module.register_forward_hook(hook).remove)
        yield


class AnalyzedModel:
    """A loaded model and its text as windows of tokens; every `under` starts with a cold cache."""

    def __init__(
        self,
        pretrained: str,
        texts: Sequence[str],
        max_tokens: int,
        window: int = 512,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        self.name = pretrained
        with as_arguments_error(pretrained):
            self.model, self.tokenizer = load_model(pretrained, trust_remote_code=trust_remote_code)
        self.layers: list[MoELayer] = find_moe_layers(self.model)
        self.routers = [layer.router for layer in self.layers]
        self.geometry = describe(self.model, self.layers, pretrained)
        self.windows = list[torch.Tensor]()
        self.text_of = list[int]()
        """The index of each window's text."""
        # Each text is split on its own, after a prefix token as lm-eval does for perplexity.
        prefix = self.tokenizer.bos_token_id
        prefix = self.tokenizer.eos_token_id if prefix is None else prefix
        for number, text in enumerate(texts):
            tokens = self.tokenizer(text, add_special_tokens=False).input_ids[:max_tokens]
            max_tokens -= len(tokens)
            token_ids = torch.tensor([*([] if prefix is None else [prefix]), *tokens])
            windows = [part for part in torch.split(token_ids, window) if len(part) > 1]
            self.windows += windows
            self.text_of += [number] * len(windows)
        if not self.windows:
            raise ValueError("text: an analysis needs at least two tokens of text.")

    def tell_gates(self, input_ids: torch.Tensor) -> None:
        """Set the tokens about which the gates are asked: some routers choose by them."""
        for layer in self.layers:
            layer.gate.input_ids = input_ids

    def logits(self, window: torch.Tensor) -> torch.Tensor:
        """Return the current model's logits after each token but the last, [T - 1, V]."""
        self.tell_gates(window[None])
        with torch.no_grad():
            logits: torch.Tensor = self.model(window[None].to(self.model.device)).logits[0, :-1]
        return logits

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
