"""A model that reads texts in windows of tokens, and what watches its modules meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from lm_eval_moecache.model.checkpoint import load_model
from lm_eval_moecache.model.device import device_of
from lm_eval_moecache.model.moe_layers import MoELayer, describe, find_moe_layers


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


class ReadingModel:
    """A loaded model and its texts as windows of tokens.

    Raises ValueError for texts of less than two tokens, and OSError where there is no such model.
    """

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

    @property
    def num_tokens(self) -> int:
        """The tokens of all windows."""
        return sum(map(len, self.windows))

    def tell_gates(self, input_ids: torch.Tensor) -> None:
        """Set the tokens about which the gates are asked: some routers choose by them."""
        for layer in self.layers:
            layer.gate.input_ids = input_ids

    def logits(self, window: torch.Tensor) -> torch.Tensor:
        """Return the current model's logits after each token but the last, [T - 1, V]."""
        self.tell_gates(window[None])
        with torch.no_grad():
            logits: torch.Tensor = self.model(window[None].to(device_of(self.model))).logits[0, :-1]
        return logits
