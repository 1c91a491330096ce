"""Peak host memory of loading a model whose experts are stored at several precisions.

Writes a random model with about 2 GB of experts as safetensors (one file per layer, in the two
forms of checkpoints: one tensor per expert, and stacked), loads each in a process of its own, and
prints what loading added to the process beside what is stored.

    python benchmarks/load_memory.py [--precision int8:int4] [--gigabytes 2] [--limit 1.3]

Ends with 1 where the peak is above `limit` x (stored + the largest layer).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import OlmoeConfig, OlmoeForCausalLM

HIDDEN, INTERMEDIATE, EXPERTS = 1024, 512, 32


def make_config(gigabytes: float) -> OlmoeConfig:
    layer_bytes = EXPERTS * 3 * HIDDEN * INTERMEDIATE * 2
    return OlmoeConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=max(1, round(gigabytes * 1e9 / layer_bytes)),
        num_attention_heads=8,
        num_key_value_heads=8,
        num_experts=EXPERTS,
        num_experts_per_tok=4,
        max_position_embeddings=256,
        pad_token_id=0,
        dtype="bfloat16",
    )


def write(folder: Path, config: OlmoeConfig, stacked: bool) -> None:
    """Write the checkpoint layer by layer; the values are random, the files are real."""
    config.save_pretrained(folder)
    with torch.device("meta"):
        names = {n: p.shape for n, p in OlmoeForCausalLM(config).named_parameters()}
    weight_map = {}
    for layer in [None, *range(config.num_hidden_layers)]:
        inside = f"model.layers.{layer}."
        part: dict[str, torch.Tensor] = {}
        for name, shape in names.items():
            if name.startswith(inside) if layer is not None else "model.layers." not in name:
                values = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)
                part.update({name: values} if stacked else split(name, values))
        file = f"part-{layer}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def split(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name each expert's matrices as published checkpoints do."""
    base, _, kind = name.rpartition(".")
    if kind == "down_proj":
        parts = {"down_proj": values}
    elif kind == "gate_up_proj":
        gate, up = values.chunk(2, dim=1)
        parts = {"gate_proj": gate, "up_proj": up}
    else:
        return {name: values}
    return {
        f"{base}.{e}.{part}.weight": tensor[e].contiguous()
        for part, tensor in parts.items()
        for e in range(len(tensor))
    }


class Memory:
    """This process' memory since the start: its own, and with the pages of mapped files.

    A checkpoint is mapped while it is read. Those pages count as resident, but the system drops
    them as soon as it wants to: what a machine has to have is the process' own.
    """

    def __init__(self) -> None:
        self._start = self._read()
        self.peak = (0, 0)

    def look(self) -> tuple[int, int]:
        own, resident = (now - then for now, then in zip(self._read(), self._start, strict=True))
        self.peak = max(self.peak[0], own), max(self.peak[1], resident)
        return own, resident

    def _read(self) -> tuple[int, int]:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        kilobytes = {line.split()[0]: int(line.split()[1]) for line in lines}
        return kilobytes["Private_Dirty:"] * 1024, kilobytes["Rss:"] * 1024


def load(folder: str, precision: str) -> dict[str, Any]:
    """Load in this process and return what the memory did."""
    from transformers import AutoModelForCausalLM

    from lm_eval_moecache.model.checkpoint import skeleton
    from lm_eval_moecache.model.moe_layers import find_moe_layers
    from lm_eval_moecache.model.precision.ladder import codecs_of, parse_ladder
    from lm_eval_moecache.model.precision.loading import encoding, take
    from lm_eval_moecache.model.precision.stored import bytes_of

    codecs = codecs_of(parse_ladder(precision), "cpu")
    bare = find_moe_layers(skeleton(folder, {}))
    memory, done = Memory(), threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            memory.look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    start_s = time.perf_counter()
    with encoding(bare, codecs):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    layers = find_moe_layers(model)
    stored = take(layers, codecs)
    seconds = time.perf_counter() - start_s
    done.set()
    watcher.join()
    experts = [sum(p.nbytes for p in layer.experts.parameters()) for layer in layers]
    dense = sum(p.nbytes for p in model.parameters()) - sum(experts)
    return {
        "experts": sum(experts),
        "layer": max(experts),
        "stored": sum(bytes_of(each) for each in stored) + dense,
        "added": memory.look()[0],
        "peak": memory.peak[0],
        "peak_with_files": memory.peak[1],
        "seconds": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="int8:int4")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--limit", type=float, default=1.3)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        print(json.dumps(load(given.load, given.precision)))
        return 0
    failed = False
    for form in ("one tensor per expert", "stacked"):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), make_config(given.gigabytes), stacked=form == "stacked")
            command = [sys.executable, __file__, "--load", folder, "--precision", given.precision]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        ratio = found["peak_with_files"] / (found["stored"] + found["layer"])
        failed |= ratio > given.limit
        gb = {key: value / 1e9 for key, value in found.items()}
        print(
            f"{form}: {gb['experts']:.2f} GB of experts, stored at {given.precision} "
            f"{gb['stored']:.2f} GB, one layer {gb['layer']:.2f} GB; loading added "
            f"{gb['added']:.2f} GB; at its peak {gb['peak']:.2f} GB of its own and "
            f"{gb['peak_with_files']:.2f} GB with the pages of the mapped checkpoint: {ratio:.2f}x "
            f"of stored + one layer (at most {given.limit}); {found['seconds']:.0f} s"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
