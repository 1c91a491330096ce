"""OLMoE-1B-7B's own layers side by side: plain transformers, ours, and accelerate's disk offload.

Writes a checkpoint of OLMoE-1B-7B's shapes with random weights and `--layers` of its 16 layers
(0.8 GB each), as transformers saves it. Then each contender loads it in a process of its own and
answers the same prompts: plain transformers with all the memory it wants; ours with `store=ram`
(all experts in host memory, `--capacity` of them in slots besides) and `store=disk`; accelerate
with whole layers of experts near, as many as the capacity holds, and the others on disk. The two
that read from disk are granted the same memory: dense part, capacity and `--margin`, by
RLIMIT_DATA, which also has to allow the private map of the checkpoint, and which does not limit
the page cache: files that were read may be read again from memory, by both.

    python benchmarks/real_size.py [--layers 4] [--capacity 50%] [--policy on_demand]

Memory is what a process holds for itself (RssAnon), sampled; maps of files are not counted.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from setup import prompts, run
from vs_accelerate import offloaded, ours, random_skeleton

from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.sizes import parse_capacity

CONTENDERS = ("plain", "ram", "disk", "accelerate")
ON_DISK = ("disk", "accelerate")
SHAPE = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "pad_token_id": 1,
}
TARGETS = (
    ("decode of store=disk / accelerate's disk offload", "decode", ("disk", "accelerate"), 3.0),
    ("load time of store=ram / plain", "load_s", ("ram", "plain"), -1.3),
    ("load time of store=disk / plain", "load_s", ("disk", "plain"), -1.3),
)
"""Words, figure, (contender, other), and the least ratio of speeds; negative: the most of times."""


def write_checkpoint(folder: str, layers: int) -> None:
    """Draw and save a model; routers are drawn wide, so that routing differs by token."""
    torch.manual_seed(0)
    config = transformers.OlmoeConfig(num_hidden_layers=layers, **SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for layer in find_moe_layers(model):
        torch.nn.init.normal_(next(layer.router.parameters()), std=0.5)
    model.save_pretrained(folder, max_shard_size="1GB")


def status(field: str) -> int:
    """Return a figure of this process in bytes: RssAnon is memory of its own, no map of a file."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, field
    return int(found[1]) * 1024


class Sampled:
    """The largest RssAnon beyond what the libraries took, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.base = self.peak = status("RssAnon")
        self._done = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, status("RssAnon"))

    def end(self) -> int:
        self._done.set()
        return self.peak - self.base


def sizes(folder: str, capacity: str) -> tuple[int, int]:
    """Return the bytes of the capacity, and of all that is no expert."""
    with torch.device("meta"):
        bare = random_skeleton(folder)
    geometry = describe(bare, find_moe_layers(bare), "x")
    whole = sum(p.numel() * p.element_size() for p in bare.parameters())
    near = parse_capacity(capacity, geometry).total_bytes
    return near, whole - geometry.total_expert_bytes


def limit(folder: str, capacity: str, margin: float) -> int:
    """Grant memory beyond what is held now; return the grant, the map of the checkpoint apart."""
    near, dense = sizes(folder, capacity)
    grant = int((near + dense) * (1 + margin))
    mapped = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + mapped + grant,) * 2)
    return grant


def contend(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Load and answer as one contender; return its figures."""
    cpu, folder = torch.device("cpu"), options.folder
    found: dict[str, Any] = {"name": name}
    if name in ON_DISK:
        found["granted"] = limit(folder, options.capacity, options.margin)
    sampled, start = Sampled(), time.perf_counter()
    wrapped = None
    if name == "plain":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        # Lazily mapped files are no loaded model: touch every page.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    elif name == "accelerate":
        model = offloaded(folder, options.capacity, cpu, "disk")
    else:
        wrapped = ours(folder, options.policy, options.capacity, cpu, name)
        model = wrapped.model
    found["load_s"] = time.perf_counter() - start
    texts = prompts(options.rounds + 1, options.prompt, SHAPE["vocab_size"], cpu)
    times = [run(model.eval(), text, options.tokens) for text in texts][1:]
    found["prefill"] = options.prompt / statistics.median(first for first, _ in times)
    found["decode"] = 1 / statistics.median(step for _, step in times)
    found["peak"] = sampled.end()
    if wrapped is not None:
        passes = wrapped.engine.ledger.passes[1 + options.tokens :]
        steps = [p.bytes_moved for p in passes if p.phase != PREFILL]
        found["moved"] = sum(steps) / len(steps)
        wrapped.unwrap()
    return found


def in_a_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    given = [f"--{key}={value}" for key, value in vars(options).items() if value is not None]
    command = [sys.executable, __file__, *given, f"--contender={name}"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-1:] or ["no message"]
        return {"name": name, "failed": reason[0]}
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def report(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    near, dense = sizes(options.folder, options.capacity)
    print(
        f"OLMoE-1B-7B's shapes, {options.layers} layers, {options.policy} at {options.capacity}: "
        f"{near / 1e9:.2f} GB of experts and {dense / 1e9:.2f} GB of the rest"
    )
    print("| contender | load s | prefill tok/s | decode tok/s | MB moved a step | peak GB |")
    print("|---|---|---|---|---|---|")
    for row in found:
        if "failed" in row:
            print(f"| {row['name']} | {row['failed']} | | | | |")
            continue
        moved = f"{row['moved'] / 1e6:.1f}" if "moved" in row else ""
        print(
            f"| {row['name']} | {row['load_s']:.1f} | {row['prefill']:.1f} | {row['decode']:.2f} "
            f"| {moved} | {row['peak'] / 1e9:.2f} |"
        )
    by_name = {row["name"]: row for row in found if "failed" not in row}
    for words, figure, (one, other), bound in TARGETS:
        if one in by_name and other in by_name:
            ratio = by_name[one][figure] / by_name[other][figure]
            met = ratio >= bound if bound > 0 else ratio <= -bound
            _judge(words, ratio, f"{'at least' if bound > 0 else 'at most'} {abs(bound)}", met)
    for name in ("disk",):
        if name in by_name:
            ratio = by_name[name]["peak"] / (near + dense)
            _judge(
                "peak memory of store=disk / capacity and dense part",
                ratio,
                "at most 1.15",
                ratio <= 1.15,
            )
    if {"disk", "accelerate"} <= by_name.keys():
        ratio = by_name["disk"]["prefill"] / by_name["accelerate"]["prefill"]
        print(f"prefill of store=disk / accelerate's disk offload: {ratio:.2f}")


def _judge(words: str, ratio: float, bound: str, met: bool) -> None:
    print(f"{words}: {ratio:.2f} (target {bound}): {'met' if met else 'missed'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--capacity", default="50%")
    parser.add_argument("--policy", default="on_demand")
    parser.add_argument("--margin", type=float, default=0.15)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--folder", help="a checkpoint that was written before")
    parser.add_argument("--contender", choices=CONTENDERS, help="for this script itself")
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(contend(options.contender, options)))
        return
    with tempfile.TemporaryDirectory(prefix="real-size-") as folder:
        if options.folder is None:
            options.folder = folder
            subprocess.run(
                [sys.executable, "-c", _WRITE, folder, str(options.layers)],
                check=True,
                cwd=Path(__file__).parent,
            )
        report([in_a_process(name, options) for name in options.only.split(",")], options)


_WRITE = "import sys; from real_size import *; write_checkpoint(sys.argv[1], int(sys.argv[2]))"
"""In a process of its own, whose memory goes with it."""

if __name__ == "__main__":
    main()
