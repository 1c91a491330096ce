"""A model that reads texts in windows of tokens, and what profiles learn of its experts meanwhile.

Which experts it chooses together and which give similar outputs (BuddyMoE), and how much its loss
would rise where a layer ran only each token's heaviest expert (AdapMoE). Shapes: T tokens of a
window, E experts, K experts per token, D hidden size, N sampled tokens, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lm_eval_moecache.algorithms.learned.buddies import Coactivation
from lm_eval_moecache.algorithms.learned.sensitivity import rises
from lm_eval_moecache.model.checkpoint import load_model
from lm_eval_moecache.model.device import device_of
from lm_eval_moecache.model.moe_layers import MoELayer, describe, find_moe_layers
from lm_eval_moecache.records.arrays import DoubleArray, FloatArray


@contextmanager
def watched(modules: Iterable[nn.Module], note: Callable[[int, Any, Any], None]) -> Iterator[None]:
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
        self.windows = list[Tensor]()
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

    def tell_gates(self, input_ids: Tensor) -> None:
        """Set the tokens about which the gates are asked: some routers choose by them."""
        for layer in self.layers:
            layer.gate.input_ids = input_ids

    def logits(self, window: Tensor) -> Tensor:
        """Return the current model's logits after each token but the last, [T - 1, V]."""
        self.tell_gates(window[None])
        with torch.no_grad():
            logits: Tensor = self.model(window[None].to(device_of(self.model))).logits[0, :-1]
        return logits


# --- experts that are chosen together ---


class Observation(NamedTuple):
    """One reading of the model's text: counts, and sampled tokens of each layer."""

    layers: Sequence[MoELayer]
    counts: Coactivation
    num_tokens: int
    top_logits: FloatArray
    """The sampled tokens' logits of their own experts: [layers, N, K]."""
    hidden: Sequence[Tensor]
    """Their router's inputs, by layer: [N, D]."""

    def similarity(self) -> FloatArray:
        """Return the mean cosine of two experts' outputs on the sampled tokens: [layers, E, E]."""
        similarities = []
        pairs = list(zip(self.layers, self.hidden, strict=True))
        for layer, hidden_ND in tqdm(pairs, desc="output similarity", unit="layer"):
            outputs = []
            for expert in range(layer.num_experts):
                index = torch.full((len(hidden_ND), 1), expert, device=hidden_ND.device)
                ones = torch.ones_like(index, dtype=hidden_ND.dtype)
                with torch.no_grad():
                    output = layer.experts(hidden_ND, index, ones)
                outputs.append(nn.functional.normalize(output.float(), dim=-1))
            stacked_END = torch.stack(outputs)
            cosines = torch.einsum("and,bnd->ab", stacked_END, stacked_END) / len(hidden_ND)
            similarities.append(np.asarray(cosines.cpu().numpy(), dtype=np.float32))
        return np.stack(similarities)


def observe(reading: ReadingModel, sample_tokens: int = 256) -> Observation:
    """Read the model's text once through the unmodified model.

    Raises ValueError for a model of one expert per token.
    """
    if reading.geometry.top_k < 2:
        raise ValueError(
            f"pretrained={reading.name!r} has one expert per token: none are chosen together."
        )
    counts, num_tokens = Coactivation(reading.geometry), reading.num_tokens
    stride, num_read = max(1, num_tokens // max(sample_tokens, 1)), 0
    top_logits: list[list[FloatArray]] = [[] for _ in reading.layers]
    hidden: list[list[Tensor]] = [[] for _ in reading.layers]

    def note(layer: int, args: Any, output: Any) -> None:
        choice = reading.layers[layer].gate.read(output)
        logits, _, experts = (part.reshape(-1, part.shape[-1]).cpu() for part in choice)
        logits_TE, experts_TK = logits.float().numpy(), experts.numpy().astype(np.int64)
        counts.add(layer, experts_TK, logits_TE)
        sampled = slice(-num_read % stride, None, stride)
        top_logits[layer].append(np.take_along_axis(logits_TE, experts_TK, -1)[sampled])
        # Copied: a view would keep the whole tensor alive.
        hidden[layer].append(args[0].reshape(len(logits_TE), -1)[sampled].clone())

    with watched(reading.routers, note):
        for window in tqdm(reading.windows, desc="profiling", unit="text"):
            reading.logits(window)
            num_read += len(window)
    return Observation(
        layers=reading.layers,
        counts=counts,
        num_tokens=num_tokens,
        top_logits=np.stack([np.concatenate(rows) for rows in top_logits]),
        hidden=[torch.cat(rows) for rows in hidden],
    )


# --- what the loss depends on ---


class Fisher:
    """One reading of a model's text, with gradients."""

    def __init__(self, reading: ReadingModel) -> None:
        self._reading = reading
        self._sums = np.zeros(len(reading.layers))
        self._weights: list[list[FloatArray]] = [[] for _ in reading.layers]
        self._changes: list[tuple[Tensor, Tensor]] = []
        self.num_tokens = 0

    def read(self) -> None:
        """Score every window and add up, for each layer, the rise per square of lost weight.

        Leaving out all but the heaviest expert changes a token's output by c (1 - alpha), which
        raises the loss by half of c' H c (1 - alpha)^2. The Hessian's diagonal is taken as the
        square of the gradient (empirical Fisher information), and c' H c is averaged over tokens.
        """
        model, layers = self._reading.model, self._reading.layers
        with watched([layer.experts for layer in layers], self.note):
            for window in tqdm(self._reading.windows, desc="reading", unit="window"):
                ids = window[None].to(device_of(model))
                # Summed, so that a token's gradient does not depend on its window's length.
                logits = model(ids).logits[0, :-1].float()
                loss = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
                slopes = torch.autograd.grad(loss, [output for output, _ in self._changes])
                for index, (_, change_TD) in enumerate(self._changes):
                    rise = ((slopes[index].double() * change_TD) ** 2).sum() / 2
                    self._sums[index] += float(rise)
                self.num_tokens += len(window)
                self._changes.clear()

    @property
    def sensitivity(self) -> DoubleArray:
        """The mean rise of each layer [L], in nats per token."""
        return np.asarray(self._sums / self.num_tokens)

    def thresholds(self) -> DoubleArray:
        """Return the rises below which 0, 1, ... 100% of the activations lie, [101] and finite."""
        pairs = zip(self._weights, self.sensitivity, strict=True)
        all_rises = np.concatenate([rises(np.concatenate(w), float(s)).ravel() for w, s in pairs])
        # A share that includes heaviest experts, whose rise is infinite, gets all the others.
        largest = all_rises[np.isfinite(all_rises)].max()
        shares = np.quantile(all_rises, np.arange(101) / 100, method="lower")
        return np.asarray(np.minimum(shares, largest))

    def note(self, index: int, args: Any, output_TD: Tensor) -> None:
        """Record a layer's call: its output, and the change with the heaviest expert alone."""
        hidden_TD, index_TK, weights_TK = args
        weights = weights_TK.detach().double().sort(dim=-1, descending=True)
        order = index_TK.gather(-1, weights.indices)
        total_T = weights.values.sum(-1, keepdim=True)
        lost_T = 1 - weights.values[:, :1] / total_T
        experts = self._reading.layers[index].experts
        with torch.no_grad():
            heaviest_TD = experts.forward(hidden_TD, order[:, :1], total_T.to(weights_TK.dtype))
            change_TD = (output_TD.double() - heaviest_TD.double()) / lost_T.clamp_min(1e-12)
        self._changes.append((output_TD, change_TD * (lost_T > 1e-12)))
        self._weights[index].append(weights.values.float().cpu().numpy())
