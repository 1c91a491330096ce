"""Our clocks against plain transformers: the cost of slots, hooks, bookkeeping.

One model, plain and wrapped in turn, alternating which runs first; medians of the paired ratios
(plain seconds / ours). bookkeeping.py measures the bookkeeping alone.

    python benchmarks/vs_hf.py [--shape cpu|olmoe2|olmoe|mixtral] [--device auto] [--clock wall]
    python benchmarks/vs_hf.py --clock virtual --policy mixture_cache --capacity 4/layer
    python benchmarks/vs_hf.py --pretrained FOLDER
    python benchmarks/vs_hf.py --evaluate 32    (documents a task; on `tiny`, float32, one thread)
    python benchmarks/vs_hf.py --evaluate 16 --shape olmoe --batches 1,16,64

With `--evaluate` compares whole evaluations to `--model hf`: the same weights, dtype, tasks and
batch size, in turn. Machine code serves the events from the start, as in a run of many documents:
whether 32 of them have it depends on what ran before on the machine. A batch lasts as long as its
longest answer, and a lossy policy answers otherwise than hf: the passes of both are printed, too.
The roof is our own decoding loop with hooks that return at once.
With `--shape` it runs `--policy` on random weights with tiny's tokenizer, `--tokens` an answer, and
a batch's worth of documents where that is more.
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


def evaluate(options: argparse.Namespace) -> None:
    """Print documents a second, ours and hf's, of each policy at each batch size."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from lm_eval_moecache import MoECacheLM
    from lm_eval_moecache.records.files import task_configs_dir
    from lm_eval_moecache.tiny import MODEL_DIR

    rounds, device = min(options.rounds, 3), device_of(options.device)
    manager = TaskManager(include_path=str(task_configs_dir()), include_defaults=False)

    def model() -> dict[str, Any]:
        if options.shape is None:
            return {"pretrained": str(MODEL_DIR), "dtype": "float32", "device": str(device)}
        with device:  # a device draws seven billion weights in a second, a host in a minute
            drawn = random_model(options.shape)
        return {"pretrained": drawn.to(device), "tokenizer": str(MODEL_DIR)}

    def rate(lm: Any, batch: int) -> tuple[float, int]:
        """Return documents a second, and the number of passes."""
        passes: list[None] = []
        handle = lm.model.register_forward_hook(lambda *_: passes.append(None))
        lm.batch_size_per_gpu, limit, more = batch, options.evaluate, {}
        if options.shape is not None:
            limit, more = max(limit, batch), {"gen_kwargs": {"max_gen_toks": options.tokens}}
        begin = time.perf_counter()
        lm_eval.simple_evaluate(
            lm, tasks=[*TASKS], limit=limit, task_manager=manager, bootstrap_iters=0, **more
        )
        seconds = time.perf_counter() - begin
        handle.remove()
        return len(TASKS) * limit / seconds, len(passes)

    if device.type == "cpu":
        torch.set_num_threads(1)
    batches = [int(batch) for batch in options.batches.split(",")]
    print(f"{options.shape or 'tiny'} on {device}, {', '.join(TASKS)}, {rounds} rounds in turn")
    plain = HFLM(**model())
    for ours in EVALUATED if options.shape is None else ({"policy": options.policy},):
        # By its name, tiny has the artifacts that ship for it.
        named = {} if options.shape else {"pretrained": "tiny"}
        lm, name = MoECacheLM(**{**model(), **named, **ours}), " ".join(ours.values())
        rate(lm, batches[-1])
        if options.shape is not None:
            rate(plain, batches[-1])
        for batch in batches:
            pairs = [(rate(plain, batch), rate(lm, batch)) for _ in range(rounds)]
            (hf, hf_passes), (own, passes) = (
                map(statistics.median, zip(*runs, strict=True)) for runs in zip(*pairs, strict=True)
            )
            # The hooks return at once: what our decoding loop alone takes.
            lm.wrapped.is_paused = True
            roof = statistics.median(rate(lm, batch)[0] for _ in range(rounds))
            lm.wrapped.is_paused = False
            ratio = statistics.median(ours[0] / plain_run[0] for plain_run, ours in pairs)
            print(
                f"{name}, batch {batch}: documents a second {own:.2f}, hf {hf:.2f}, "
                f"ratio {ratio:.3f}; passes {passes:.0f}, hf {hf_passes:.0f}; roof {roof:.2f}, "
                f"{own / roof:.3f} of it",
                flush=True,
            )
        lm.wrapped.unwrap()


def main() -> None:
    defaults = {"pretrained": None, "clock": ("wall", "virtual"), "prompt": 128, "rounds": 21}
    defaults |= {"shape": None, "evaluate": 0, "batches": "1,16,32"}
    options = arguments(__doc__, capacity="100%", **COMMON | defaults)
    if options.evaluate:
        return evaluate(options)
    options.shape = options.shape or COMMON["shape"]
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
