"""One interface to every family's router: the only module that depends on how they are called.

Also reads the parameters that accelerate offloads, which are on the meta device between calls.

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
    """A router's decision."""

    logits: Tensor
    """[T, E]; log-probabilities for routers that return probabilities."""
    weights: Tensor
    """[T, K]"""
    experts: Tensor
    """[T, K]"""


class Gate:
    """One MoE layer's router: its arguments, its device and dtype, how many logits it returns.

    A router may take more than hidden states. Tensors of the surrounding block (biases that only
    select) are passed from there; whoever begins a pass sets its `input_ids`; what only the layer
    before has is unavailable, and `missing` names it.
    """

    def __init__(
        self, router: nn.Module, block: nn.Module, hidden_size: int, num_experts: int
    ) -> None:
        self.router = router
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self._block = block
        self.input_ids: Tensor | None = None
        """The tokens of the pass in progress, by which some routers choose."""
        self._from_block: list[str] = []
        self.by_token = False
        """Whether token ids decide, so that logits do not determine the choice."""
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
        """Required arguments that are unavailable here: with any, the router cannot be called."""
        self.skips = False
        """Whether it has a class for using no expert; known after the first call."""
        self._rank: int | None = None
        self._normed: bool | None = None
        self._linear_in: torch.dtype | bool | None = None
        """The dtype in which its logits are one product with its weight; False where they are more
        than that, None until tested."""
        # A correction bias may be a part's, of which the router's own source does not speak.
        named = (*router.named_parameters(), *router.named_buffers())
        self.sorts = _sorts_its_choice(kind) and not any("bias" in name for name, _ in named)
        """Whether its choice is sorted, heaviest first."""

    @property
    def name(self) -> str:
        """The router's class name."""
        return type(self.router).__name__

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the router's first floating-point parameter."""
        return next(p.dtype for p in self.router.parameters() if p.is_floating_point())

    @property
    def is_empty(self) -> bool:
        """Whether it has no weights yet, and no hook of accelerate to fetch them."""
        return not is_hooked(self.router) and any(p.is_meta for p in self.router.parameters())

    def read(self, output: Any) -> Choice:
        """Return a router's output in the form that all families share."""
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
        """Route hidden states [T, D], or in the shape with which the model calls routers.

        Our forward hooks on the router do not fire; accelerate's do, and fetch its weights.
        """
        arguments = {name: value_of(self._block, name) for name in self._from_block}
        if not is_hooked(self.router):
            device = next(self.router.parameters()).device
            hidden = hidden.to(device)
            arguments = {name: value.to(device) for name, value in arguments.items()}
        if self.by_token:
            ids = self.input_ids if input_ids is None else input_ids
            assert ids is not None, "a router that looks at tokens, outside a pass"
            arguments["input_ids"] = ids.to(hidden.device)
        return self.read(self._call(hidden, arguments))

    def predict(self, hidden: Tensor) -> Tensor:
        """Return the router's logits [T, E] for these inputs, bit for bit.

        Their top-k is its choice, unless it adds a correction bias or limits groups, which a
        prediction by gates leaves out. If token ids decide, the chosen experts' are raised above
        all others. Most routers are a single product before the top-k, and then
        only that is computed.
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
        """Return the dtype in which one product reproduces the logits bit for bit, else False.

        Tested on this input and on random ones, from tiny to huge so that a clamp or a curve on
        the logits would show.
        """
        weight = self.router._parameters.get("weight")
        if weight is None or is_hooked(self.router) or self.router.training or self.by_token:
            return False
        if weight.shape != (self.num_experts, self.hidden_size):
            return False
        generator = torch.Generator().manual_seed(0)
        scales = torch.tensor([1e-3, 1.0, 30.0, 1e3]).repeat(7)[:, None]
        random_inputs = (torch.randn(28, self.hidden_size, generator=generator) * scales).to(hidden)
        inputs = (hidden, random_inputs, *random_inputs[:4, None])
        try:
            logits = [self.ask(x).logits.reshape(-1, self.num_experts) for x in inputs]
            for dtype in (weight.dtype, torch.float32):
                products = [self._product(x, dtype) for x in inputs]
                pairs = zip(logits, products, strict=True)
                if all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs):
                    return dtype
        except (RuntimeError, ValueError, IndexError, TypeError):
            # The router does not take such inputs.
            return False
        return False

    def probe(self, num_tokens: int) -> Choice:
        """Route random hidden states, scaled so that the logits' standard deviation is about 1.

        That keeps softmax from underflow and sigmoids from their flat ends. A constant scale of
        the input changes the spread, not the rule.
        """
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(num_tokens, self.hidden_size, generator=generator)
        ids = torch.arange(num_tokens)
        spread = float(self.ask(hidden.to(self.dtype), ids).logits.float().std())
        return self.ask((hidden / max(spread, 1e-6)).to(self.dtype), ids)

    def stand_in(self) -> Gate:
        """Return a copy with random weights on the CPU, for a gate without weights yet."""
        # Only those tensors of the block that the router takes.
        shell = nn.Module()
        for name in self._from_block:
            shell.register_buffer(name, getattr(self._block, name).detach())
        router, block = (_drawn(module, self.num_experts) for module in (self.router, shell))
        return Gate(router, block, self.hidden_size, self.num_experts)

    def _call(self, hidden: Tensor, inputs: dict[str, Tensor]) -> Any:
        """Call the router, with a batch dimension in front where it needs one."""
        if hidden.dim() != 2:
            return self.router.forward(hidden, **inputs)
        if self._rank != 3:
            try:
                return self.router.forward(hidden, **inputs)
            except (ValueError, IndexError, RuntimeError, TypeError):
                if self._rank == 2:
                    raise
        output = self.router.forward(hidden[None], **inputs)
        self._rank = 3
        return tuple(part.reshape(-1, part.shape[-1]) for part in output[:3])


def _drawn(module: nn.Module, num_experts: int) -> nn.Module:
    """Return a float32 copy on the CPU with random values, wherever the module is."""
    generator = torch.Generator().manual_seed(0)
    replica: nn.Module = copy.deepcopy(module).to_empty(device="cpu").float().eval()
    for tensor in (*replica.parameters(), *replica.buffers()):
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            # Scales and biases are positive, and none of them is near zero.
            tensor.data.copy_(noise if tensor.dim() > 1 else noise.abs() + 0.5)
        else:
            # Tables of expert indices, distinct within a row.
            numbers = torch.arange(tensor.numel()) % num_experts
            tensor.data.copy_(numbers.view(tensor.shape))
    return replica


def _are_probabilities(values: Tensor) -> bool:
    if values.is_meta or not values.numel() or bool((values < 0).any()):
        return False
    sums = values.float().sum(-1)
    return torch.allclose(sums, torch.ones_like(sums), atol=0.02)


@cache
def _arguments(router: type[Any]) -> dict[str, Any]:
    """Return the arguments of a router's forward besides the hidden states, as name -> default."""
    parameters = list(inspect.signature(router.forward).parameters.values())[2:]
    keywords = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return {p.name: p.default for p in keywords}


@cache
def _sorts_its_choice(router: type[Any]) -> bool:
    """Whether a router's top-k is sorted, heaviest first: torch's default, which some switch off.

    Cached by class: reading the source takes 10 ms, for every layer of every run of a sweep.
    """
    try:
        source = inspect.getsource(router)
    except (OSError, TypeError):
        return False
    return "sorted=False" not in source and "topk(" in source and "bias" not in source


def is_hooked(module: nn.Module) -> bool:
    """Whether accelerate moves this module's inputs and weights to one device at each call."""
    return hasattr(module, "_hf_hook")


def value_of(module: nn.Module, name: str) -> Tensor:
    """Return a module's own parameter or buffer, from accelerate's store while it is offloaded."""
    tensor: Tensor = getattr(module, name)
    if not tensor.is_meta or not is_hooked(module):
        return tensor
    hook: Any = module._hf_hook
    for candidate in getattr(hook, "hooks", (hook,)):
        if getattr(candidate, "weights_map", None) is not None:
            offloaded: Tensor = candidate.weights_map[name]
            return offloaded
    return tensor


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield `state_dict` as (name, tensor) sorted by name, with the values of offloaded tensors."""
    for path in sorted(module.state_dict()):
        part, _, name = path.rpartition(".")
        yield path, value_of(module.get_submodule(part), name)
