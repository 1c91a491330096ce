"""Tokens per second of `scoring=scan` against parallel scoring, on `tiny` and one core.

Prints CPU time figures, which do not depend on what else the machine does.

    python benchmarks/scan.py [--tokens 4096] [--capacity 8/layer]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel

CASES: dict[str, dict[str, Any]] = {
    "standard": {},
    "cache_prior": {"routing": "cache_prior"},
    "max_rank": {"routing": "max_rank", "routing.M": 12},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pretrained", default="tiny")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--capacity", default="8/layer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = Path(__file__).resolve().parent.parent.joinpath("DECISIONS.md").read_text()
    analyzed = AnalyzedModel(options.pretrained, [text * 4], options.tokens)
    num_tokens = sum(len(window) for window in analyzed.windows)
    print(f"{num_tokens} tokens, capacity {options.capacity}: tokens per second of CPU time")
    for name, overrides in CASES.items():
        speeds = []
        for scan in (True, False):
            start = time.process_time()
            analyzed.read(overrides, capacity=options.capacity, scan=scan)
            speeds.append(num_tokens / (time.process_time() - start))
        print(f"{name:12s} scan {speeds[0]:7.0f}   parallel {speeds[1]:7.0f}")


if __name__ == "__main__":
    main()
