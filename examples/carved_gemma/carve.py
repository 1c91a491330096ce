"""Cuts Gemma 3 270M's FFNs into experts, tunes them, and saves a model that `pretrained=` takes.

Usage: python -m examples.carved_gemma.carve --out output/carved_gemma/model

1. Layer by layer: neurons that are used together become an expert, a router is fitted, and the
   output matrix is refitted by least squares so that the carved layer gives the whole one's output.
2. End to end: experts, routers and shared paths are trained towards the dense model's words.

Run again, it resumes. `--minutes` is CPU time for step 2. Nothing is installed by itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoTokenizer, Gemma3ForCausalLM

from examples.carved_gemma import carving
from examples.carved_gemma.carving import MaskedFFN, Shape
from examples.carved_gemma.dense import dense_folder, loaded
from examples.carved_gemma.modeling_carved_gemma3 import (
    CarvedGemma3Config,
    CarvedGemma3ForCausalLM,
)
from examples.carved_gemma.samples import samples
from examples.carved_gemma.text import windows

LENGTH = 512
"""Tokens of a window: at most Gemma's sliding window, so that all attention is plain causal."""
NUM_WINDOWS = 96
"""Windows that step 1 fits on; with 16, matrices served 4,096 tokens and little else."""
NUM_GROUPED = 4096
"""Tokens by whose use neurons are grouped."""
RIDGES = (0.003, 0.03, 0.3)
BATCH = 1
"""Windows of a training step: many small steps, as the time is short."""
RATE, WARM_UP = 1e-5, 8
HIDDEN = 5.0
"""Weight of the layers' states next to the KL divergence: each layer's own states say more of its
experts than the words at the end do."""
KL_EVERY = 4
"""Tokens of which one goes through the head, which costs as much as all layers. All words count:
over the text's own the divergence fell on the text, and the loss on other text rose."""
SAVE_EVERY = 20
"""Training steps."""


# --- step 1: layer by layer ---


def attend(model: Gemma3ForCausalLM, index: int, hidden: Tensor) -> Tensor:
    """Run a decoder layer's attention on hidden states [windows, LENGTH, D], a window at a time."""
    layer, places = model.model.layers[index], torch.arange(hidden.shape[1])[None]
    rotary = model.model.rotary_emb(hidden[:1], places, model.config.layer_types[index])
    outputs = [
        layer.self_attn(
            layer.input_layernorm(one), position_embeddings=rotary, attention_mask=None
        )[0]
        for one in hidden.split(1)
    ]
    return hidden + layer.post_attention_layernorm(torch.cat(outputs))


@torch.no_grad()
def carve_layer(
    model: Gemma3ForCausalLM, index: int, hidden: Tensor, shape: Shape
) -> tuple[MaskedFFN, Tensor, dict[str, float]]:
    """Carve one layer on its inputs in the carved model; return it, its output and figures."""
    layer = model.model.layers[index]
    hidden = attend(model, index, hidden)
    x = layer.pre_feedforward_layernorm(hidden).flatten(0, 1)
    whole = MaskedFFN(layer.mlp, shape, torch.arange(layer.mlp.gate_proj.weight.shape[0]))
    neurons = whole.neurons(x)
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:NUM_GROUPED]
    order = carving.in_groups(carving.contributions(neurons[rows], whole.down_proj), shape)
    ffn = MaskedFFN(layer.mlp, shape, order)
    neurons = neurons[:, order]
    # A window's start token has outputs of its own size and kind.
    is_inner = (torch.arange(len(x)) % hidden.shape[1]) > 0
    inner, inner_neurons = x[is_inner], neurons[is_inner]
    found = carving.fit_router(ffn, inner, inner_neurons)
    target = nn.functional.linear(inner_neurons, ffn.down_proj)
    before, after = carving.refit(ffn, inner, inner_neurons, target, RIDGES)
    figures = {"router finds": found, "missing before": before, "missing after": after}
    output = nn.functional.linear(ffn.masked(x, neurons), ffn.down_proj)
    if ffn.linear_path is not None:
        output = output + ffn.linear_path(x)
    output = layer.post_feedforward_layernorm(output.reshape(hidden.shape))
    return ffn, hidden + output, figures


@torch.no_grad()
def carve(model: Gemma3ForCausalLM, ids: Tensor, shape: Shape, file: Path) -> list[MaskedFFN]:
    """Carve all layers, on token ids [windows, LENGTH]; continues what `file` has of them."""
    states, hidden, figures = list[Any](), model.model.embed_tokens(ids), list[dict[str, float]]()
    if file.exists():
        states, hidden, figures = torch.load(file, weights_only=True)
    layers = range(len(states), len(model.model.layers))
    for index in tqdm(layers, desc="carving layers"):
        ffn, hidden, one = carve_layer(model, index, hidden, shape)
        states.append(ffn.state_dict())
        figures.append(one)
        print(f"layer {index}: " + ", ".join(f"{k} {v:.3f}" for k, v in one.items()), flush=True)
        save((states, hidden, figures), file)
    return from_states(model, states, shape)


def from_states(
    model: Gemma3ForCausalLM, states: Sequence[dict[str, Tensor]], shape: Shape
) -> list[MaskedFFN]:
    ffns = []
    for layer, state in zip(model.model.layers, states, strict=True):
        ffn = MaskedFFN(layer.mlp, shape, torch.arange(layer.mlp.gate_proj.weight.shape[0]))
        ffn.load_state_dict(state)
        ffns.append(ffn)
    return ffns


def save(what: Any, file: Path) -> None:
    """Replace a file at once, so that an interrupted run leaves a whole one."""
    torch.save(what, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


# --- step 2: end to end ---


@contextmanager
def placed(model: Gemma3ForCausalLM, ffns: Sequence[nn.Module]) -> Iterator[None]:
    """Put these FFNs in the place of the model's own."""
    own = [layer.mlp for layer in model.model.layers]
    for layer, ffn in zip(model.model.layers, ffns, strict=True):
        layer.mlp = ffn
    try:
        yield
    finally:
        for layer, mlp in zip(model.model.layers, own, strict=True):
            layer.mlp = mlp


@torch.no_grad()
def nats(model: Gemma3ForCausalLM, ids: Tensor) -> float:
    """Return the mean loss of each token but a window's first, over all words."""
    total = 0.0
    for window in ids.split(1):
        states = model.model(input_ids=window).last_hidden_state[0, :-1]
        for part, targets in zip(states.split(128), window[0, 1:].split(128), strict=True):
            total += float(
                nn.functional.cross_entropy(model.lm_head(part), targets, reduction="sum")
            )
    return total / (len(ids) * (ids.shape[1] - 1))


def losses(
    model: Gemma3ForCausalLM, ffns: Sequence[nn.Module], ids: Tensor, first: int, *, bf16: bool
) -> tuple[Tensor, Tensor]:
    """Return how far the carved model is from the dense one on token ids [windows, LENGTH].

    That is the KL divergence from the dense distribution, in nats a token, over one token of
    KL_EVERY from the `first` on, and the mean over layers of the squared difference of their states
    as the next norm passes them on, as a share of the dense ones'. A window's start token does not
    count. With `bf16`, matrices are multiplied in bf16.
    """
    norms = [layer.input_layernorm for layer in model.model.layers[1:]]

    def states() -> list[Tensor]:
        outputs = model.model(input_ids=ids, output_hidden_states=True)
        *inner, last = outputs.hidden_states[1:]
        normed = [norm(state) for norm, state in zip(norms, inner, strict=True)]
        return [state[:, 1:].flatten(0, 1) for state in (*normed, last)]

    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        with torch.no_grad():
            dense = states()
        with placed(model, ffns):
            carved = states()
    shares = [
        nn.functional.mse_loss(found, expected) / expected.square().mean()
        for found, expected in zip(carved, dense, strict=True)
    ]
    found, expected = (
        model.lm_head(one[-1][first::KL_EVERY]).log_softmax(-1) for one in (carved, dense)
    )
    divergence = nn.functional.kl_div(found, expected, reduction="batchmean", log_target=True)
    return divergence, torch.stack(shares).mean()


def tune(
    model: Gemma3ForCausalLM,
    ffns: Sequence[MaskedFFN],
    text: Iterator[list[int]],
    seconds: float,
    file: Path,
    *,
    bf16: bool = False,
) -> None:
    """Train the FFNs towards the dense model's states and words (`losses`), for CPU seconds.

    The rate rises over WARM_UP steps and falls to zero at the end. Changes `ffns`.
    """
    model.requires_grad_(False)
    parameters = [parameter for ffn in ffns for parameter in ffn.parameters()]
    # The fused form takes 0.3 s of a step's 12 on a CPU.
    optimizer = torch.optim.AdamW(
        parameters, lr=RATE, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )
    step, used, divergences = 0, 0.0, list[float]()
    if file.exists():
        states, optimizer_state, step, used, divergences = torch.load(file, weights_only=True)
        for ffn, state in zip(ffns, states, strict=True):
            ffn.load_state_dict(state)
        optimizer.load_state_dict(optimizer_state)
    text = islice(text, step * BATCH, None)
    begun = time.process_time() - used
    bar = tqdm(total=round(seconds), initial=round(used), unit="s", desc="tuning")
    while used < seconds:
        rate = RATE * min(1.0, (step + 1) / WARM_UP) * max(0.05, 1 - used / seconds)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = torch.tensor([next(text) for _ in range(BATCH)])
        divergence, share = losses(model, ffns, ids, step % KL_EVERY, bf16=bf16)
        optimizer.zero_grad()
        (divergence + HIDDEN * share).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        divergences.append(divergence.item())
        bar.update(round(time.process_time() - begun) - round(used))
        used = time.process_time() - begun
        if step % 10 == 0:
            print(f"step {step}, {used:.0f} s: KL {sum(divergences[-10:]) / 10:.4f}", flush=True)
        if step % SAVE_EVERY == 0 or used >= seconds:
            states = [ffn.state_dict() for ffn in ffns]
            save((states, optimizer.state_dict(), step, used, divergences), file)


# --- the saved model ---


def carved_state(ffn: MaskedFFN) -> dict[str, Tensor]:
    """Return a CarvedMLP's tensors."""
    width, shared = ffn.width, ffn.width * ffn.shape.num_shared
    gate, up = (
        matrix[shared:].unflatten(0, (-1, width)) for matrix in (ffn.gate_proj, ffn.up_proj)
    )
    down = ffn.down_proj[:, shared:].unflatten(1, (-1, width))
    state = {
        "gate.weight": ffn.router.weight,
        "gate.bias": ffn.router.bias,
        "experts.gate_up_proj": torch.cat([gate, up], 1),
        "experts.down_proj": down.transpose(0, 1),
    }
    if shared:
        state |= {
            "shared_expert.gate_proj.weight": ffn.gate_proj[:shared],
            "shared_expert.up_proj.weight": ffn.up_proj[:shared],
            "shared_expert.down_proj.weight": ffn.down_proj[:, :shared],
        }
    if ffn.linear_path is not None:
        state |= {f"linear_path.{name}": p for name, p in ffn.linear_path.named_parameters()}
    return {name: tensor.detach().contiguous() for name, tensor in state.items()}


def carved_config(dense: Any, shape: Shape) -> CarvedGemma3Config:
    """Return the configuration of a dense model's carved form."""
    settings = dense.to_dict()
    width = settings["intermediate_size"] // shape.num_groups
    for name in ("model_type", "architectures", "transformers_version"):
        settings.pop(name, None)
    return CarvedGemma3Config(
        **settings,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=width,
        shared_intermediate_size=width * shape.num_shared,
        linear_path=shape.linear_path,
    )


def carved_model(model: Gemma3ForCausalLM, ffns: Sequence[MaskedFFN]) -> CarvedGemma3ForCausalLM:
    """Return the carved model as transformers runs it."""
    carved = CarvedGemma3ForCausalLM(carved_config(model.config, ffns[0].shape))
    state = {name: value for name, value in model.state_dict().items() if ".mlp." not in name}
    for index, ffn in enumerate(ffns):
        state |= {f"model.layers.{index}.mlp.{k}": v for k, v in carved_state(ffn).items()}
    carved.load_state_dict(state)
    return carved.eval()


def save_model(carved: CarvedGemma3ForCausalLM, dense: Path, out: Path) -> None:
    """Save in bf16, with the modelling file and the dense model's tokenizer."""
    CarvedGemma3Config.register_for_auto_class()
    CarvedGemma3ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    carved.to(torch.bfloat16).save_pretrained(out)
    for file in dense.glob("*token*"):
        shutil.copy(file, out)


def ids_of(text: Iterator[list[int]], num_windows: int) -> Tensor:
    return torch.tensor(list(islice(text, num_windows)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the saved model's folder")
    parser.add_argument("--work", type=Path, default=Path("output/carved_gemma"))
    parser.add_argument("--shared", type=int, default=4, help="of 32 groups, always on")
    parser.add_argument("--top", type=int, default=16, help="groups a token gets, shared ones too")
    parser.add_argument("--no-linear-path", action="store_true")
    parser.add_argument("--minutes", type=float, default=45, help="CPU time of end-to-end tuning")
    bf16 = "multiply in bf16 while tuning: over twice as fast where the CPU does"
    parser.add_argument("--bf16", action="store_true", help=bf16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(
        num_shared=options.shared, top=options.top, linear_path=not options.no_linear_path
    )
    options.work.mkdir(parents=True, exist_ok=True)
    folder = dense_folder(options.work)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), loaded(folder)
    cache = options.work / "text"
    written = cycle(samples(folder, cache, options.work / "samples.pt", tokenizer, LENGTH))

    def text(seed: int) -> Iterator[list[int]]:
        """Yield two windows of the dense model's own text, then one of the books, and so on."""
        for books in windows("train", cache, tokenizer, LENGTH, seed=seed):
            yield next(written)
            yield next(written)
            yield books

    ids = ids_of(text(0), NUM_WINDOWS)
    held_out = ids_of(windows("test", cache, tokenizer, LENGTH, seed=0), 4)
    ffns = carve(model, ids, shape, options.work / "layers.pt")
    report = {"dense": nats(model, held_out)}
    with placed(model, ffns):
        report["carved"] = nats(model, held_out)
    print(json.dumps(report), flush=True)
    seconds = 60 * options.minutes
    tune(model, ffns, text(1), seconds, options.work / "tuned.pt", bf16=options.bf16)
    with placed(model, ffns):
        report["tuned"] = nats(model, held_out)
    print(json.dumps(report), flush=True)
    save_model(carved_model(model, ffns), folder, options.out)


if __name__ == "__main__":
    main()
