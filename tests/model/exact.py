"""Checks equality bit for bit in a process of its own: `python -m tests.model.exact`.

As a stand-in for other machines it is run with other instruction sets, by `test_machines.py`.
"""

from __future__ import annotations

import torch

from tests.model.batches import END, Batch, assert_exact
from tests.models import random_model

SMALL = Batch([1, 2, 9], [[3, END, 4], [5, 5, 5]])
"""Few rows with much padding, and one that ends."""
LONG = Batch([120], [[8]])
"""Buffers long enough to be divided among threads, and a decode step."""


def main() -> None:
    for family, overrides in (("gpt_oss", {"intermediate_size": 56}), ("mixtral", {})):
        model = random_model(family, **overrides).to(torch.float32)
        for threads, batch in ((1, SMALL), (1, LONG), (2, LONG)):
            torch.set_num_threads(threads)
            assert_exact(model, batch, "wall", "1")
            assert_exact(model, batch, "virtual", "50%")
    print(torch.backends.cpu.get_cpu_capability())


if __name__ == "__main__":
    main()
