"""Counts the kernels of one decode step, for the constants of `engine/virtual/link.py`.

Every operator that reaches the dispatcher counts, less those that only change a tensor's view.

    python benchmarks/kernels.py
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from grid import arguments
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.tiny import MODEL_DIR

_VIEWS = ("view", "reshape", "transpose", "permute", "expand", "slice", "select", "unsqueeze")
_VIEWS += ("squeeze", "detach", "alias", "split", "chunk", "as_strided", "t.default", "lift_fresh")


class Counting(TorchDispatchMode):
    """Counts operators, apart for what runs inside an experts module or a router."""

    def __init__(self) -> None:
        super().__init__()
        self.part = "dense"
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(word in str(func) for word in _VIEWS):
            self.counts[self.part] += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    options = arguments(__doc__, pretrained=MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(options.pretrained, dtype=torch.bfloat16).eval()
    layers = find_moe_layers(model)
    counting = Counting()

    def enter(part: str) -> Any:
        return lambda *_: setattr(counting, "part", part)

    for layer in layers:
        for part, module in (("gate", layer.router), ("experts", layer.experts)):
            module.register_forward_pre_hook(enter(part))
            module.register_forward_hook(enter("dense"))
    with torch.no_grad():
        output = model(torch.arange(2, 34)[None], use_cache=True)
        token = output.logits[:, -1:].argmax(-1)
        with counting:
            model(token, past_key_values=output.past_key_values, use_cache=True)
    for part, count in counting.counts.items():
        print(f"{part:8s} {count / len(layers):5.1f} kernels per MoE layer and decode step")


if __name__ == "__main__":
    main()
