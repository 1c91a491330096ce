"""Layers of OLMoE-1B-7B's size: plain transformers, ours, and accelerate's disk offload.

Writes a checkpoint of OLMoE-1B-7B's shapes with random weights and `--layers` of its 16 layers
(0.8 GB each), as transformers saves it. Each contender loads it in its own process from a cold page
cache, and all answer the same prompts in turn. Plain transformers and `store=ram` (all experts in
host memory, and `--capacity` of them in slots as well) have unlimited memory. `store=disk`, and
accelerate with as many whole layers of experts resident as the capacity holds and the others on
disk, share one limit: dense part, capacity and `--margin`. A control group (v1 or v2; creating one
needs permission) enforces it and counts cached files; under any other limit, files would be read
again from the page cache for free. A contender that cannot load within its grant is reported, and
limited from its first answer on.

    python benchmarks/real_size.py [--shape OLMoE-1B-7B] [--layers 4] [--capacity 50%]
    python benchmarks/real_size.py --loads 5 --shape cpu [--cold]

The second command only loads, `--loads` times and without a memory limit: fresh processes in turn,
timed from the import of their libraries until the first answer could begin. `--cold` drops the
file's pages from the page cache before each load. Ratios are within one round.

Peak memory is a process's private memory (RssAnon), sampled. Bytes read by an answer are those that
the disk delivered, not the page cache. Ratios are medians of `--rounds` answers to the same
prompts, after one that is left out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from grid import arguments, text_table
from setup import SHAPES, described, forget_cached, load_whole, prompts, random_model, run, spread
from vs_accelerate import offloaded, ours

from lm_eval_moecache.model.checkpoint import skeleton
from lm_eval_moecache.model.wrap import WrappedModel
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.sizes import parse_capacity

GROUPS = Path("/sys/fs/cgroup")
CONTENDERS = ("plain", "ram", "disk", "accelerate")
ON_DISK = ("disk", "accelerate")
SPAWN = multiprocessing.get_context("spawn")


def write_checkpoint(folder: str, shape: str, layers: int) -> None:
    model = random_model({**SHAPES[shape], "num_hidden_layers": layers})
    model.save_pretrained(folder, max_shard_size="1GB")


class Limit:
    """Puts this process into its own control group until the end of the block."""

    def __enter__(self) -> Limit:
        for file in _limits_of(os.getpid()):
            try:
                file.parent.mkdir()
                if file.exists():
                    (file.parent / "cgroup.procs").write_text(str(os.getpid()))
                    self._file = file
                    return self
            except OSError:
                pass
            remove_group_of(os.getpid())
        raise SystemExit("no control group that limits memory can be made here")

    def grant(self, nbytes: int) -> None:
        """Allow `nbytes` beyond the memory held now.

        Raises OSError if more is held and cannot be reclaimed.
        """
        self._file.write_text(str(held() + nbytes))

    def __exit__(self, *_: object) -> None:
        (self._file.parent.parent / "cgroup.procs").write_text(str(os.getpid()))
        self._file.parent.rmdir()


def _limits_of(pid: int) -> list[Path]:
    """Return the limit files of a process's group, one level below this process's own group."""
    files = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        group = Path(path.lstrip("/"), f"moecache-{pid}")
        if controllers == "":
            files.append(GROUPS / group / "memory.max")
        elif "memory" in controllers.split(","):
            files.append(GROUPS / "memory" / group / "memory.limit_in_bytes")
    return files


def remove_group_of(pid: int) -> None:
    """Remove the group of a killed process, which could not do so itself."""
    for file in _limits_of(pid):
        if file.parent.exists():
            file.parent.rmdir()


def held() -> int:
    """Return this process's private memory in bytes (RssAnon), without mapped files."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def bytes_read() -> int:
    """Return the bytes that this process has read from the disk, not from the page cache."""
    return int(psutil.Process().io_counters().read_bytes)


class Sampled:
    """Peak RssAnon beyond the libraries' own, sampled every few milliseconds."""

    def __init__(self) -> None:
        self._base = self._peak = held()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, held())
            time.sleep(0.005)

    def so_far(self) -> int:
        return self._peak - self._base


def sizes(folder: str, capacity: str) -> tuple[int, int]:
    """Return the bytes of the capacity and of all non-expert weights."""
    bare = skeleton(folder, {})
    _, geometry = described(bare)
    total_bytes = sum(p.numel() * p.element_size() for p in bare.parameters())
    near = parse_capacity(capacity, geometry).total_bytes
    return near, total_bytes - geometry.total_expert_bytes


def loaded(name: str, options: argparse.Namespace) -> tuple[Any, WrappedModel | None]:
    """Load the model as the contender `name` does."""
    cpu, folder = torch.device("cpu"), options.folder
    if name == "plain":
        return load_whole(folder), None
    if name == "accelerate":
        return offloaded(folder, options.capacity, cpu, "disk"), None
    wrapped = ours(folder, options.policy, options.capacity, cpu, name)
    return wrapped.model, wrapped


def contend(talk: Connection, name: str, early: bool, options: argparse.Namespace) -> None:
    """Load, limited from the start (`early`) or once loaded, and answer until None arrives."""
    near, dense = sizes(options.folder, options.capacity)
    grant = int((near + dense) * (1 + options.margin))
    with Limit() if name in ON_DISK else nullcontext() as limit:
        sampled, start, before = Sampled(), time.perf_counter(), held()
        if limit is not None and early:
            limit.grant(grant)
        try:
            model, wrapped = loaded(name, options)
        except Exception as error:
            talk.send({"failed": (str(error).splitlines() or [repr(error)])[0]})
            return
        load_s = time.perf_counter() - start
        if limit is not None and not early:
            limit.grant(grant - held() + before)
        talk.send({"load_s": load_s, "load_peak": sampled.so_far()})
        while (prompt := talk.recv()) is not None:
            before = bytes_read()
            first_s, step_s = run(model, torch.tensor([prompt]), options.tokens)
            nbytes = bytes_read() - before
            talk.send({"prefill": len(prompt) / first_s, "decode": 1 / step_s, "read": nbytes})
        summary: dict[str, Any] = {"peak": sampled.so_far()}
        if wrapped is not None:
            passes = wrapped.engine.ledger.passes
            _, second, *later = (i for i, record in enumerate(passes) if record.phase == PREFILL)
            moved = sum(record.bytes_moved for record in passes[second:])
            # Mean per answer, without the first.
            summary["moved"] = moved / (1 + len(later))
            wrapped.unwrap()
        talk.send(summary)


@dataclass
class Contender:
    """A process that has loaded the model, or the reason why it could not."""

    name: str
    process: Any
    talk: Connection
    figures: dict[str, Any]
    notes: list[str]
    answers: list[dict[str, float]] = field(default_factory=list)

    def ask(self, prompt: list[int]) -> None:
        self.talk.send(prompt)
        self.answers.append(self.talk.recv())

    def end(self) -> None:
        self.talk.send(None)
        self.figures |= self.talk.recv()
        self.process.join()

    def median(self, figure: str) -> float:
        return statistics.median(answer[figure] for answer in self.answers[1:])


def start(name: str, options: argparse.Namespace) -> Contender:
    """Load a contender from a cold page cache, within its grant if possible."""
    notes: list[str] = []
    for early in (True, False) if name in ON_DISK else (True,):
        if name == "accelerate":
            # Files of a killed attempt would be reused, with their cache charged to another group.
            shutil.rmtree(Path(options.folder) / "offload", ignore_errors=True)
        forget_cached(options.folder)
        here, there = SPAWN.Pipe()
        process = SPAWN.Process(target=contend, args=(there, name, early, options))
        process.start()
        there.close()
        try:
            figures = here.recv()
        except EOFError:
            process.join()
            assert process.pid is not None
            remove_group_of(process.pid)
            figures = {"failed": "killed for its memory"}
        if "failed" not in figures:
            break
        notes.append(f"does not load within the grant ({figures['failed']})" if early else "")
    return Contender(name, process, here, figures, notes)


def report(contenders: list[Contender], options: argparse.Namespace) -> None:
    near, dense = sizes(options.folder, options.capacity)
    print(
        f"{options.shape}'s shapes, {options.layers} layers, {options.policy} at "
        f"{options.capacity}: {near / 1e9:.2f} GB of experts and {dense / 1e9:.2f} GB of the rest; "
        f"{options.rounds} answers of {options.tokens} tokens to prompts of {options.prompt}, "
        "in turn"
    )
    answering, rows = {one.name: one for one in contenders if one.answers}, []
    for name, one in answering.items():
        limit, figures = "control group" if name in ON_DISK else "nothing", one.figures
        memory = [f"{figures[key] / 1e9:.2f}" for key in ("load_peak", "peak")]
        speed = [f"{one.median('prefill'):.1f}", f"{one.median('decode'):.2f}"]
        moved = f"{figures['moved'] / 1e6:.0f}" if "moved" in figures else ""
        read_mb = f"{one.median('read') / 1e6:.0f}"
        rows.append([name, limit, f"{figures['load_s']:.1f}", *memory, *speed, moved, read_mb])
    heads = "limited by, load s, load peak GB, peak GB, prefill tok/s, decode tok/s, "
    heads += "MB moved an answer, MB read from disk an answer"
    print(text_table(["contender", *heads.split(", ")], rows))
    for contender in contenders:
        for note in contender.notes:
            print(f"{contender.name}: {note}")
    if {"disk", "accelerate"} <= answering.keys():
        pairs = answering["disk"].answers[1:], answering["accelerate"].answers[1:]
        for figure in ("decode", "prefill"):
            ratios, target = [a[figure] / b[figure] for a, b in zip(*pairs, strict=True)], ""
            if figure == "decode":
                verdict = "met" if statistics.median(ratios) >= 3 else "missed"
                target = f" (target at least 3.0): {verdict}"
            print(f"{figure} of store=disk / accelerate's disk offload: {spread(ratios)}{target}")
    for name in ("ram", "disk") if "plain" in answering else ():
        if name in answering:
            ratio = answering[name].figures["load_s"] / answering["plain"].figures["load_s"]
            at_most(f"load time of store={name} / plain", ratio, 1.3)
    if "disk" in answering:
        ratio = answering["disk"].figures["peak"] / (near + dense)
        at_most("peak memory of store=disk / capacity and dense part", ratio, 1.15)


def at_most(words: str, ratio: float, most: float) -> None:
    print(f"{words}: {ratio:.2f} (target at most {most}): {'met' if ratio <= most else 'missed'}")


def load_s(name: str, options: argparse.Namespace) -> float:
    start_s = time.perf_counter()
    loaded(name, options)
    return time.perf_counter() - start_s


def load_in_turn(options: argparse.Namespace) -> None:
    """Print each loader's time and its ratio to plain transformers in the same round."""
    names = CONTENDERS[:3]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    nbytes = sum(file.stat().st_size for file in Path(options.folder).glob("*.safetensors"))
    print(f"{options.shape}, {nbytes / 1e6:.0f} MB, {'cold' if options.cold else 'warm'} cache")
    for name in names * options.loads:
        if options.cold:
            forget_cached(options.folder)
        with SPAWN.Pool(1) as fresh:
            seconds[name].append(fresh.apply(load_s, (name, options)))
    for name, times_s in seconds.items():
        ratios = [a / b for a, b in zip(times_s, seconds["plain"], strict=True)]
        print(
            f"{name}: median {statistics.median(times_s):.2f} s, of plain's "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def main() -> None:
    defaults = {"margin": 0.15, "only": ",".join(CONTENDERS), "folder": None}
    defaults |= {"loads": 0, "cold": False}
    settings = {"capacity": "50%", "policy": "on_demand", "prompt": 64, "tokens": 16, "rounds": 5}
    options = arguments(__doc__, shape="OLMoE-1B-7B", layers=4, **settings, **defaults)
    if not options.loads:
        with Limit():
            pass  # says at once where none can be made
    with tempfile.TemporaryDirectory(prefix="real-size-") as folder:
        if options.folder is None:
            options.folder = folder
            # In its own process, which frees the memory when it ends.
            checkpoint = folder, options.shape, options.layers
            writer = SPAWN.Process(target=write_checkpoint, args=checkpoint)
            writer.start()
            writer.join()
        if options.loads:
            return load_in_turn(options)
        contenders = [start(name, options) for name in options.only.split(",")]
        forget_cached(options.folder)
        ready = [contender for contender in contenders if "failed" not in contender.figures]
        words = SHAPES[options.shape]["vocab_size"]
        texts = prompts(options.rounds + 1, options.prompt, words, torch.device("cpu"))
        for text in texts:
            for contender in ready:
                contender.ask(text[0].tolist())
        for contender in ready:
            contender.end()
        report(contenders, options)


if __name__ == "__main__":
    main()
