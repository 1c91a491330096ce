"""Our clocks against plain transformers: the cost of slots, hooks, bookkeeping.

One model, plain and wrapped in turn, alternating which runs first; medians of the paired ratios
(plain seconds / ours). bookkeeping.py measures the bookkeeping alone.

    python benchmarks/vs_hf.py [--shape cpu|olmoe2|olmoe|mixtral] [--device auto] [--clock wall]
    python benchmarks/vs_hf.py --clock virtual --policy mixture_cache --capacity 4/layer
    python benchmarks/vs_hf.py --pretrained FOLDER
    python benchmarks/vs_hf.py --evaluate 32    (documents a task; on `tiny`, float32, one thread)

With `--evaluate` whole evaluations stand beside `--model hf`: the same checkpoint, dtype, tasks and
batch size, in turn; documents a second of moecache / hf.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from grid import arguments
from setup import COMMON, device_of, prompts, random_model, run, spread, take, virtual, wall
from transformers import AutoModelForCausalLM


def model_of(options: argparse.Namespace) -> Any:
    if options.pretrained is None:
        return random_model(options.shape)
    return AutoModelForCausalLM.from_pretrained(options.pretrained, dtype=torch.bfloat16).eval()


EVALUATED = (
    {"policy": "on_demand"},
    {"policy": "specmd"},
    {"policy": "specmd", "eviction": "hazard"},
    {"policy": "mixture_cache"},
    {"policy": "buddymoe"},
    {"policy": "importance_scheduling"},
)
TASKS = ("tiny_gsm8k", "tiny_arc")
BATCHES = (1, 16, 32)


def evaluate(documents: int, rounds: int) -> None:
    """Print documents a second of each policy / hf, at each batch size."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from lm_eval_moecache import MoECacheLM
    from lm_eval_moecache.records.files import task_configs_dir
    from lm_eval_moecache.tiny import MODEL_DIR

    torch.set_num_threads(1)
    manager = TaskManager(include_path=str(task_configs_dir()), include_defaults=False)
    plain = HFLM(str(MODEL_DIR), dtype="float32", device="cpu")

    def seconds(lm: Any, batch: int) -> float:
        lm.batch_size_per_gpu = batch
        begin = time.perf_counter()
        lm_eval.simple_evaluate(
            lm, tasks=[*TASKS], limit=documents, task_manager=manager, bootstrap_iters=0
        )
        return time.perf_counter() - begin

    print(f"tiny, float32, {', '.join(TASKS)}, {documents} documents each, {rounds} rounds in turn")
    print(f"{'documents a second / hf':40}", *(f"batch {batch:<4}" for batch in BATCHES))
    for ours in EVALUATED:
        lm, ratios = MoECacheLM("tiny", device="cpu", **ours), []
        seconds(lm, BATCHES[-1])
        lm.decoded_rows = [0, 0]
        for batch in BATCHES:
            pairs = [(seconds(plain, batch), seconds(lm, batch)) for _ in range(rounds)]
            ratios.append(statistics.median(hf_s / our_s for hf_s, our_s in pairs))
        lm.wrapped.unwrap()
        computed, useful = lm.decoded_rows
        row = " ".join(f"{ratio:<10.2f}" for ratio in ratios)
        print(f"{' '.join(ours.values()):40} {row} rows waited for: {useful / computed:.0%}")


def main() -> None:
    defaults = {"pretrained": None, "clock": ("wall", "virtual"), "prompt": 128, "rounds": 21}
    options = arguments(__doc__, capacity="100%", evaluate=0, **COMMON | defaults)
    if options.evaluate:
        evaluate(options.evaluate, min(options.rounds, 3))
        return
    device = device_of(options.device)
    plain, cached = model_of(options).to(device), model_of(options)
    if options.clock == "wall":
        wrapped = wall(cached, take(cached, device), options.policy, options.capacity)
    else:
        wrapped = virtual(cached.to(device), options.policy, options.capacity)
    texts = prompts(options.rounds + 4, options.prompt, plain.config.vocab_size, device)
    for prompt in texts[-4:]:
        run(plain, prompt, options.tokens)
        run(cached, prompt, options.tokens)
    pairs = []
    for index, prompt in enumerate(texts[: options.rounds]):
        order = (plain, cached) if index % 2 == 0 else (cached, plain)
        times = [run(model, prompt, options.tokens) for model in order]
        pairs.append(times if order[0] is plain else times[::-1])
    wrapped.unwrap()
    print(
        f"{options.pretrained or options.shape} on {device}, {options.clock} clock, "
        f"{options.policy} at {options.capacity}, {options.rounds} pairs"
    )
    print(f"plain: prefill of {options.prompt} tokens {spread([1e3 * p[0] for p, _ in pairs])} ms")
    print(f"plain: decode {spread([1e3 * p[1] for p, _ in pairs])} ms a token")
    for phase, place in (("prefill: ", 0), ("decode:  ", 1)):
        ratios = [plain_s[place] / our_s[place] for plain_s, our_s in pairs]
        print(f"speed of moecache / plain, {phase}{spread(ratios)}")


if __name__ == "__main__":
    main()
