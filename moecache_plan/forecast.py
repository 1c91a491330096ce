"""How fast a program runs a model on a machine: one formula, a sum over what a token waits for.

    seconds a token = bytes read on the card / (share x its bandwidth)
                    + bytes the host reads / (share x its memory's)
                    + bytes that come over the link, or off the drive / (share x its rate)
                    + attention's FLOP / (share x the card's peak), or by the host
                    + layers x an overhead, by how the card's kernels are launched, by mechanism
                    + states of linear attention x an overhead a MB
                    + cards after the first x an overhead

The shares and overheads are constants of mechanisms (`runtimes/mechanisms.yaml`), fitted to
published speeds. The sum is linear in `1 / share` and in the overheads: `Work` holds what they are
multiplied with, so that fit and forecast are one function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.runtimes import BOTH, COPY, HOST, LAYER, READ, Runtime, launches
from moecache_plan.machines import Machine
from moecache_plan.mechanisms import MICROSECONDS, SHARES, Mechanisms, Spread, mechanisms
from moecache_plan.placement import Placed, touched_share

FAULTS = 0.2
"""Share of the drive's rate that page faults of a mapped file reach (flash-moe's results.tsv)."""
USUAL_CORES = 16
"""Cores taken of a processor of which nobody says how many it has."""


def costs(constants: Mapping[str, float]) -> dict[str, float]:
    """Return seconds per unit of each part of `Work`, under these constants."""
    shares = {name.removesuffix("_share"): 1 / constants[name] for name in SHARES}
    return shares | {name.removesuffix("_us"): 1e-6 * constants[name] for name in MICROSECONDS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Seconds by what they wait for, were every share 1, and numbers of what costs overheads."""

    card: float = 0.0
    host: float = 0.0
    link: float = 0.0
    drive: float = 0.0
    attention: float = 0.0
    cuda_layer: float = 0.0
    rocm_layer: float = 0.0
    metal_layer: float = 0.0
    eager_layer: float = 0.0
    host_layer: float = 0.0
    copy_layer: float = 0.0
    read_layer: float = 0.0
    card_state: float = 0.0
    """MB that linear attention reads and writes on a card, or on the host."""
    host_state: float = 0.0
    host_attention: float = 0.0
    """GFLOP of each core, in llama.cpp's kernels, a query head at a time."""
    host_shared: float = 0.0
    """The same where all heads share the cached vectors: a product of matrices, as in a prompt."""
    crossing: float = 0.0
    """Times that a token goes on to another card."""

    def seconds(self, constants: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of each part under these constants."""
        return {name: getattr(self, name) * cost for name, cost in costs(constants).items()}


def token_work(
    model: RealModel,
    machine: Machine,
    runtime: Runtime,
    placed: Placed,
    context: int,
    top_k: int | None = None,
) -> Work:
    """Return what one decoded token at this context length waits for."""
    is_alone = machine.is_processor or placed.placement.kind == "cpu"
    layers, whole = model.num_layers, 1.0 if is_alone else placed.whole
    routed = layers * (top_k or model.top_k) * model.expert_bytes
    dense = layers * model.layer_dense_bytes + model.kv_bytes(context) - model.state_bytes
    flops, state = model.attention_flops(context), 1e-6 * model.state_bytes
    # A unified machine's processor reads the memory that its card reads.
    host_rate = machine.host_rate(runtime) or machine.memory_bytes_per_s
    on_host = (1.0 if is_alone else placed.on_host) * routed + whole * dense
    if is_alone:
        work = Work(host=on_host / host_rate)
        host_layers: float = layers
    else:
        host_layers = layers if placed.mechanism == BOTH else layers * math.ceil(placed.on_host)
        if placed.placement.kind == "host_layers":
            host_layers = min(placed.placement.amount, layers)
        elif placed.placement.kind == "gpu_layers":
            host_layers = layers * whole
        is_split = machine.is_split(runtime)
        together = machine.cards if is_split else 1
        work = Work(
            card=(dense + routed - on_host) / (machine.memory_bytes_per_s * together),
            host=on_host / host_rate,
            **{f"{launches(machine)}_layer": layers * (1 - whole)},
            eager_layer=layers * (1 - whole) if runtime.eager else 0.0,
            attention=(1 - whole) * flops / (machine.peak_flops * together),
            card_state=(1 - whole) * state / together,
            crossing=0.0 if is_split else machine.cards - 1,
        )
    core = whole * 1e-9 / ((machine.cores or USUAL_CORES) * runtime.core_factor)
    shared = model.attention_flops(context, shared=True)
    work = replace(
        work,
        host_attention=core * (flops - shared),
        host_shared=core * shared,
        host_state=whole * state,
    )
    if placed.mechanism in (HOST, BOTH):
        return replace(work, host_layer=host_layers)
    if placed.mechanism == READ:
        rate = machine.drive_rate * (FAULTS if placed.by_faults else 1.0)
        return replace(work, drive=placed.moved * routed / rate, read_layer=layers)
    if placed.mechanism in (COPY, LAYER):
        moved = placed.moved * (model.all_expert_bytes if placed.mechanism == LAYER else routed)
        rate = machine.copy_rate or machine.drive_rate
        return replace(work, link=moved / rate, copy_layer=layers)
    return work


def rule_of_thumb_s(work: Work) -> float:
    """Return the seconds a token by the rule that others use: 0.55 of the card's bandwidth, 0.7 of
    the host memory's nominal rate (a measured one), and the whole of link or drive."""
    return work.card / 0.55 + work.host / 0.7 + work.link + work.drive


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A decode speed in tokens/s, the geometric middle of its range."""

    tok_per_s: float
    placed: Placed
    work: Work
    is_stated: bool
    """Whether all inputs that matter to the mechanism were given, not assumed."""
    spread: Spread
    """Where the range is from, in which 80% of the mechanism's rows fall."""

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the range."""
        return self.tok_per_s / self.spread.reach, self.tok_per_s * self.spread.reach


def forecast(
    model: RealModel,
    machine: Machine,
    runtime: Runtime,
    placed: Placed,
    context: int,
    *,
    top_k: int | None = None,
    is_stated: bool = False,
    known: Mechanisms | None = None,
) -> Forecast:
    """Return the decode speed of a placed model, by the shipped constants or by `known`."""
    known = known or mechanisms()
    work = token_work(model, machine, runtime, placed, context, top_k)
    if runtime.is_ideal:
        speed = 1 / (work.card + work.host + work.link + work.drive)
    else:
        speed = runtime.factor / sum(work.seconds(known.constants).values())
    return Forecast(
        tok_per_s=speed,
        placed=placed,
        work=work,
        is_stated=is_stated,
        spread=known.spread(placed.group, is_stated, "" if machine.is_processor else machine.name),
    )


def scale_by(measured: float, rest_s: float, drive_s: float) -> tuple[float, float]:
    """Return by what one measured speed scales the machine's others, and its drive's rate.

    `rest_s` and `drive_s` are what a token was forecast to take without and on the drive. Where
    the drive is read, what is left of the measured time is the drive's.
    """
    if drive_s and 1 / measured > rest_s:
        return 1.0, drive_s / (1 / measured - rest_s)
    return measured * (rest_s + drive_s), 1.0


# --- the prompt ---


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptWork:
    """Seconds of a prompt by what they wait for, were every share 1, and its number of chunks."""

    compute: float = 0.0
    link: float = 0.0
    card: float = 0.0
    drive: float = 0.0
    chunks: float = 0.0
    core: float = 0.0
    """GFLOP of each of the processor's cores, which then computes all of it."""
    token: Work | None = None
    """What each token waits for where they go through the model one by one."""

    def seconds(self, constants: Mapping[str, float]) -> float:
        """Return the seconds of the prompt under these constants."""
        if self.token is not None:
            return self.chunks * sum(self.token.seconds(constants).values())
        if self.core:
            return self.core / constants["prefill_core_gflops"]
        return (
            self.compute / constants["prefill_compute_share"]
            + self.link / constants["prefill_link_share"]
            + self.card / constants["prefill_card_share"]
            + self.drive / constants["drive_share"]
            + self.chunks * 1e-3 * constants["prefill_chunk_ms"]
        )


def prompt_work(
    model: RealModel,
    machine: Machine,
    runtime: Runtime,
    placed: Placed,
    prompt: int,
    chunk: int | None = None,
    known: Mechanisms | None = None,
) -> PromptWork | None:
    """Return what a prompt waits for, from a cold cache, or None where that is not modelled.

    Not modelled are prompts that the processor computes for a card, or by cores of which nobody
    says how many. Copied are the experts that a chunk needs (`touched_share`), or all of a layer.
    """
    if machine.is_processor or placed.placement.kind == "cpu":
        if not machine.cores or placed.mechanism == READ:
            return None
        core = 1e-9 * model.prompt_flops(prompt) / (machine.cores * runtime.core_factor)
        return PromptWork(core=core)
    if placed.on_host and (runtime.prefill == HOST or prompt < runtime.ships_from):
        return None
    if runtime.prefill == "token" and placed.mechanism == READ:
        token = token_work(model, machine, runtime, placed, prompt // 2)
        return PromptWork(chunks=prompt, token=token)
    chunks = math.ceil(prompt / (chunk or runtime.chunk))
    touched = touched_share(model, prompt / chunks, known)
    every = model.all_expert_bytes
    dense = model.num_layers * model.layer_dense_bytes
    shipped = 1.0 if runtime.prefill == LAYER else touched
    absent = shipped * (1 - placed.cached) * every * chunks
    cards = machine.cards if machine.is_split(runtime) else 1
    work = PromptWork(
        compute=model.prompt_flops(prompt) / (machine.peak_flops * cards),
        card=chunks * (dense + touched * every) / (machine.memory_bytes_per_s * cards),
        chunks=chunks,
    )
    if placed.mechanism == READ:
        return replace(work, drive=absent / machine.drive_rate)
    if machine.copy_rate:
        return replace(work, link=absent / (machine.copy_rate * cards))
    return work


def prefill_tok_per_s(
    work: PromptWork, prompt: int, runtime: Runtime, known: Mechanisms | None = None
) -> float:
    """Return the prompt tokens/s, by the shipped constants or by `known`."""
    if runtime.is_ideal:
        return prompt / (max(work.compute, work.card) + work.link + work.drive)
    return prompt / work.seconds((known or mechanisms()).constants)
