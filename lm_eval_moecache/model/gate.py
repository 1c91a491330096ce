"""Routers as they can be asked: the one place that knows how each of them is called.

With the parameters of modules that accelerate offloads: on the meta device but during a call.

Shapes: T tokens, E experts, K experts per token, D hidden size.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Choice(NamedTuple):
    """What a router decided."""

    logits: Tensor
    """[T, E]; from routers that return probabilities, their logarithms."""
    weights: Tensor
    """[T, K]"""
    experts: Tensor
    """[T, K]"""


class Gate:
    """One MoE layer's router: its arguments, its device and dtype, how many logits it returns.

    A router may be called with more than hidden states. What the block around it keeps (biases
    that only select) is given from there; the tokens of the pass in progress are given by whoever
    begins it; what belongs to the layer before cannot be had, and then `missing` names it.
    """

    def __init__(
        self, router: nn.Module, block: nn.Module, hidden_size: int, num_experts: int
    ) -> None:
        self.router = router
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self._block = block
        self.input_ids: Tensor | None = None
        """The tokens of the pass in progress, which some routers choose by."""
        self._from_block: list[str] = []
        self.by_token = False
        """Whether the tokens themselves decide, so that logits do not tell the choice."""
        missing = []
        kind: Any = type(router)
        for name, default in _arguments(kind).items():
            if isinstance(getattr(block, name, None), Tensor):
                self._from_block.append(name)
            elif name == "input_ids":
                self.by_token = True
            elif default is inspect.Parameter.empty:
                missing.append(name)
        self.missing = tuple(missing)
        """Arguments without which it cannot be asked."""
        self.skips = False
        """Whether it has a class for using no expert, seen at its first answer."""
        self._rank: int | None = None
        self._normed: bool | None = None
        self._linear_in: torch.dtype | bool | None = None
        """The dtype of the product with its weight that its logits are, and nothing but that; False
        where they are more, None until it was asked."""
        self.sorts = _sorts_its_choice(kind)
        """Whether its choice comes heaviest first."""

    @property
    def name(self) -> str:
        return type(self.router).__name__

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.router.parameters() if p.is_floating_point())

    @property
    def is_empty(self) -> bool:
        """Whether it has no weights yet, and nobody who would fetch them."""
        return not is_hooked(self.router) and any(p.is_meta for p in self.router.parameters())

    def read(self, output: Any) -> Choice:
        """Return what a call of the router decided, as everybody else understands it."""
        logits: Tensor = output[0]
        if self._normed is None:
            self._normed = _are_probabilities(logits)
        if self._normed:
            logits = logits.clamp_min(torch.finfo(torch.float32).tiny).log()
        if logits.shape[-1] > self.num_experts:
            # A class for skipping the layer, which is no expert.
            self.skips = True
            logits = logits[..., : self.num_experts]
        return Choice(logits, output[1], output[2])

    @torch.no_grad()
    def ask(self, hidden: Tensor, input_ids: Tensor | None = None) -> Choice:
        """Ask about hidden states [T, D], or of the shape that the model calls routers with.

        The router's own hooks for us do not fire; those of accelerate do, and fetch its weights.
        """
        given = {name: value_of(self._block, name) for name in self._from_block}
        if not is_hooked(self.router):
            device = next(self.router.parameters()).device
            hidden = hidden.to(device)
            given = {name: value.to(device) for name, value in given.items()}
        if self.by_token:
            ids = self.input_ids if input_ids is None else input_ids
            assert ids is not None, "a router that looks at tokens, outside a pass"
            given["input_ids"] = ids.to(hidden.device)
        return self.read(self._call(hidden, given))

    def predict(self, hidden: Tensor) -> Tensor:
        """Return logits [T, E] whose best are what the router would choose for these inputs.

        They are the router's own, bit for bit. Most routers are one product before they choose, and
        then that is all that is computed.
        """
        if self._linear_in is None:
            self._linear_in = self._find_linear(hidden)
        if self._linear_in and not torch.is_grad_enabled():
            return self._product(hidden, self._linear_in)
        choice = self.ask(hidden)
        if not self.by_token:
            return choice.logits
        logits = choice.logits.float()
        chosen = torch.zeros_like(logits).scatter_(-1, choice.experts, 1.0)
        return logits + chosen * (1.0 + logits.amax() - logits.amin())

    def _product(self, hidden: Tensor, dtype: Any) -> Tensor:
        parts: Any = self.router._parameters
        weight, bias = parts["weight"], parts.get("bias")
        if hidden.dim() != 2:
            hidden = hidden.reshape(-1, self.hidden_size)
        if not hidden.dtype == weight.dtype == dtype:
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        if bias is not None:
            bias = bias.to(dtype)
        return nn.functional.linear(hidden, weight, bias)

    @torch.no_grad()
    def _find_linear(self, hidden: Tensor) -> torch.dtype | bool:
        """Find a product that gives its logits again, bit for bit: of this input and of drawn ones.

        Those reach from tiny to huge, so that a bound or a curve on the logits would show.
        """
        weight = self.router._parameters.get("weight")
        if weight is None or is_hooked(self.router) or self.router.training or self.by_token:
            return False
        if weight.shape != (self.num_experts, self.hidden_size):
            return False
        generator = torch.Generator().manual_seed(0)
        scales = torch.tensor([1e-3, 1.0, 30.0, 1e3]).repeat(7)[:, None]
        drawn = (torch.randn(28, self.hidden_size, generator=generator) * scales).to(hidden)
        inputs = (hidden, drawn, *drawn[:4, None])
        try:
            own = [self.ask(x).logits.reshape(-1, self.num_experts) for x in inputs]
            for dtype in (weight.dtype, torch.float32):
                found = [self._product(x, dtype) for x in inputs]
                pairs = zip(own, found, strict=True)
                if all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs):
                    return dtype
        except (RuntimeError, ValueError, IndexError, TypeError):
            # It is not called with that.
            return False
        return False

    def probe(self, num_tokens: int) -> Choice:
        """Ask about random hidden states, drawn so that logits spread about 1.

        That keeps softmax from underflow and sigmoids from their flat ends. A constant scale of
        the input changes the spread, not the rule.
        """
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(num_tokens, self.hidden_size, generator=generator)
        ids = torch.arange(num_tokens)
        spread = float(self.ask(hidden.to(self.dtype), ids).logits.float().std())
        return self.ask((hidden / max(spread, 1e-6)).to(self.dtype), ids)

    def stand_in(self) -> Gate:
        """Return a gate like this one with random weights on the CPU, for one that has none yet."""
        # Nothing but what the router is given from its block.
        shell = nn.Module()
        for name in self._from_block:
            shell.register_buffer(name, getattr(self._block, name).detach())
        router, block = (_drawn(each, self.num_experts) for each in (self.router, shell))
        return Gate(router, block, self.hidden_size, self.num_experts)

    def _call(self, hidden: Tensor, given: dict[str, Tensor]) -> Any:
        """Call the router, with a batch's dimension before the tokens' where it wants one."""
        if hidden.dim() != 2:
            return self.router.forward(hidden, **given)
        if self._rank != 3:
            try:
                return self.router.forward(hidden, **given)
            except (ValueError, IndexError, RuntimeError, TypeError):
                if self._rank == 2:
                    raise
        output = self.router.forward(hidden[None], **given)
        self._rank = 3
        return tuple(part.reshape(-1, part.shape[-1]) for part in output[:3])


def _drawn(module: nn.Module, num_experts: int) -> nn.Module:
    """Return a copy with random numbers on the CPU in float32, wherever the module is."""
    generator = torch.Generator().manual_seed(0)
    made: nn.Module = copy.deepcopy(module).to_empty(device="cpu").float().eval()
    for tensor in (*made.parameters(), *made.buffers()):
        if tensor.is_floating_point():
            drawn = torch.randn(tensor.shape, generator=generator)
            # Scales and biases are positive, and none of them is near zero.
            tensor.data.copy_(drawn if tensor.dim() > 1 else drawn.abs() + 0.5)
        else:
            # Tables of expert numbers: each row has different ones.
            numbers = torch.arange(tensor.numel()) % num_experts
            tensor.data.copy_(numbers.view(tensor.shape))
    return made


def _are_probabilities(values: Tensor) -> bool:
    if values.is_meta or not values.numel() or bool((values < 0).any()):
        return False
    sums = values.float().sum(-1)
    return torch.allclose(sums, torch.ones_like(sums), atol=0.02)


@cache
def _arguments(router: type[Any]) -> dict[str, Any]:
    """Return what a router's forward takes beside the hidden states: name -> default."""
    parameters = list(inspect.signature(router.forward).parameters.values())[2:]
    named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return {p.name: p.default for p in named}


@cache
def _sorts_its_choice(router: type[Any]) -> bool:
    """Whether a router's top-k comes heaviest first: torch's default, which some switch off.

    Kept by class: finding its source takes 10 ms, for every layer of every run of a sweep.
    """
    try:
        source = inspect.getsource(router)
    except (OSError, TypeError):
        return False
    return "sorted=False" not in source and "topk(" in source and "bias" not in source


def is_hooked(module: nn.Module) -> bool:
    """Whether accelerate brings this module's inputs and weights together at each call."""
    return hasattr(module, "_hf_hook")


def value_of(module: nn.Module, name: str) -> Tensor:
    """Return a module's own parameter or buffer, from where it is kept if it is not there now."""
    tensor: Tensor = getattr(module, name)
    if not tensor.is_meta or not is_hooked(module):
        return tensor
    hook: Any = module._hf_hook
    for each in getattr(hook, "hooks", (hook,)):
        if getattr(each, "weights_map", None) is not None:
            kept: Tensor = each.weights_map[name]
            return kept
    return tensor


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Walk what `state_dict` holds, by name, with the values of what is offloaded."""
    found = dict(module.state_dict())
    for prefix, part in module.named_modules():
        own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        for name, _ in own:
            path = f"{prefix}.{name}" if prefix else name
            if path in found and found[path].is_meta:
                found[path] = value_of(part, name)
    yield from sorted(found.items())
