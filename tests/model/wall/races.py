"""Every way of the wall clock under injected races, judged by a model without a cache.

Transfers and decisions are delayed at random, and a slot holds poison from the moment a transfer
begins to write it. Each pass of the model is recorded: its inputs, its routers' final choices, the
level at which each expert was executed, and its logits. A plain transformers model then recomputes
the passes one after another: with its own choices where the policy is lossless, else with the
recorded ones, each expert at the level of the plan. Its logits must be equal, bit for bit.

`python -m tests.model.wall.races` runs every way with every family, as `make races` does.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from docs.wall_table import LADDER, settings_that_run
from lm_eval_moecache.engine.wall.engine import WallEngine
from lm_eval_moecache.engine.wall.link import Transfer
from lm_eval_moecache.harness.arguments import Config, read_config
from lm_eval_moecache.harness.lm import MoECacheLM, MoECacheSpecLM
from lm_eval_moecache.harness.preflight import check_arguments
from lm_eval_moecache.model.moe_layers import describe, find_moe_layers
from lm_eval_moecache.model.precision.codecs import expert_parameters
from lm_eval_moecache.model.wall.pools import DeviceMover, LadderPools, SlotPools
from lm_eval_moecache.records.batch import Batch
from tests.artifacts import artifacts_of, use_profile
from tests.harness import make_instance
from tests.model.speculative.drafts import generated
from tests.model.wrapped import replaced
from tests.models import FAMILIES, save_model, sizes_of

REPETITIONS = 20
CAPACITIES = ("25%", "60%", "1experts", "40%")
"""Taken in turn: waves, room for prefetches, and one expert at a time."""
OTHERS = 9
"""How many ways of the table, each set by one value, run with the suite."""
LONGEST_S = 0.0004
FOLDERS = ("trace", "store_dir", "encoded_dir", "warm")
SMALL: dict[str, Callable[[int], Any]] = {
    "miss.h": lambda top_k: top_k - 1,
    "miss.rho": lambda top_k: 1,
    "routing.trigger_min": lambda top_k: 1,
    "routing.trigger_max": lambda top_k: top_k - 1,
}
"""Parameters that compositions set for routers of a larger top-k, fitted to `top_k`."""
KERNEL = "experts_implementation"
AHEAD = {"prefetch": "next_gate"}
LEVELS = {"precision": LADDER, "miss": "fetch_priority"}
ALWAYS = {"miss": "host", "miss.rule": "always"}
TOGETHER: dict[str, dict[str, Any]] = {
    "cached first, prefetches": {"miss": "fetch_cached_first", **AHEAD},
    "levels, prefetches": {**LEVELS, **AHEAD},
    "levels, dropping": {"precision": LADDER, "miss": "drop_cascade", **AHEAD},
    "a lossless level, prefetches": {"precision": "bf16:int4", **AHEAD},
    "levels on disk": {**LEVELS, "store": "disk", **AHEAD},
    "encoded once, on disk": {**LEVELS, "encoded_dir": "", "store": "disk"},
    "warm, levels": {**LEVELS, "warm": ""},
    "warm, prefetches": {"warm": "", **AHEAD},
    "warm, host": {"warm": "", "miss": "host"},
    "host, prefetches": {**ALWAYS, **AHEAD},
    "host, levels": {"precision": "int8:int4", "miss": "host", **AHEAD},
    "host, disk": {**ALWAYS, "store": "disk"},
    "prefetches from disk": {"store": "disk", **AHEAD},
    "buddies, prefetches": {"miss": "buddy", **AHEAD},
    "buddies, awaited": {"miss": "buddy", "miss.late": "await", **AHEAD},
    "any neighbour, prefetches": {"miss": "substitute_random", **AHEAD},
    "cache-conditional, prefetches": {"routing": "cache_prior", **AHEAD},
    "dropping, prefetches": {"miss": "drop", **AHEAD},
    "a pool's kernel, prefetches": {KERNEL: "batched_mm", **AHEAD},
    "a pool's kernel, levels": {KERNEL: "batched_mm", **LEVELS},
    "a draft reads along": {"prefetch": "draft", "draft": "self:int4"},
    "a draft reads along, disk": {
        **{"prefetch": "draft", "prefetch.cutoff": 2, "draft": "self:int4", "store": "disk"}
    },
}
"""Combinations, which no single value sets. Folders are filled in."""
SP_MOE = {"policy": "sp_moe", "prefetch.cutoff": 2}
DRAFTING: dict[str, dict[str, Any]] = {
    "drafting in batches": {**SP_MOE, "draft_tokens": 2},
    "drafting one by one": {**SP_MOE, "prefetch.io": "per_expert"},
    "vanilla drafting": {**SP_MOE, "policy": "sp_moe_vanilla"},
    "drafting, disk": {**SP_MOE, "store": "disk"},
    "drafting, host": {**SP_MOE, "miss": "host"},
    "drafting, levels": {**LEVELS, "draft": "tiny", "policy": "sp_moe"},
    "drafting, dropping": {**SP_MOE, "miss": "drop"},
}
"""Combinations for `moecache-spec`."""


@dataclass(frozen=True)
class Way:
    """A setting that runs on the wall clock."""

    name: str
    given: Mapping[str, Any]
    speculative: bool


@cache
def ways() -> tuple[Way, ...]:
    """Return the combinations, and every setting that passes a run's checks for the wall clock."""
    candidates = [Way(name, changes, False) for name, changes in TOGETHER.items()]
    candidates += [Way(name, changes, True) for name, changes in DRAFTING.items()]
    candidates += [Way(*setting) for setting in settings_that_run("")]
    # The first of the values that resolve to one setting, as defaults do.
    return tuple({_setting_of(way): way for way in reversed(candidates)}.values())[::-1]


def share_of(family: str) -> list[Way]:
    """Return a family's share of the suite's ways: all combinations and `OTHERS` of the rest.

    They are dealt out in turn, so that a new family or way gets a share by itself; `make races`
    runs every way with every family.
    """
    known = TOGETHER.keys() | DRAFTING.keys()
    combinations = [way for way in ways() if way.name in known]
    others = [way for way in ways() if way.name not in known]
    dealt = combinations + random.Random(0).sample(others, OTHERS)
    return dealt[list(FAMILIES).index(family) :: len(FAMILIES)]


def _setting_of(way: Way) -> str:
    setting = {"clock": "wall", "policy": "on_demand", **way.given}
    if not any(setting.get(key) == "" for key in FOLDERS) and KERNEL not in setting:
        setting = dict(read_config(setting, way.speculative))
    return repr((setting, way.speculative))


# --- races ------------------------------------------------------------------------------------


@contextmanager
def races(drawn: random.Random) -> Iterator[None]:
    """Delay transfers and decisions at random, and poison each slot until it is written."""

    def pause() -> None:
        if drawn.random() < 0.3:
            time.sleep(drawn.random() * LONGEST_S)

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(*args: Any) -> Any:
            pause()
            return function(*args)

        return delayed

    def poisoned(mover: DeviceMover, transfer: Transfer, begin: Any = DeviceMover.begin) -> Any:
        for tensor in mover.target_of(transfer).values():
            # NaN in every float type, and a wrong code in every codec.
            tensor.view(torch.uint8).fill_(255)
        pause()
        token = begin(mover, transfer)
        pause()
        return token

    decisions = [(WallEngine, name) for name in ("enter", "begin_event", "_demand")]
    with ExitStack() as stack:
        for owner, name in (*decisions, (SlotPools, "stored"), (LadderPools, "stored")):
            function = late(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, function))
        stack.enter_context(mock.patch.object(DeviceMover, "begin", poisoned))
        yield


# --- the recording ----------------------------------------------------------------------------


@dataclass
class Pass:
    """One forward of the model."""

    inputs: dict[str, Any]
    past: int
    """Tokens in the KV cache before this pass; -1 where none is kept."""
    routers: list[Any] = field(default_factory=list)
    """Layer -> its router's final output."""
    levels: list[Any] = field(default_factory=list)
    """Layer -> key -> level, where there are several."""
    logits: Tensor | None = None

    @property
    def answer(self) -> Tensor:
        assert self.logits is not None, "a pass that did not end"
        return self.tokens(self.logits)

    def tokens(self, logits: Tensor) -> Tensor:
        """Leave out padding, which needs no experts."""
        mask, length = self.inputs.get("attention_mask"), logits.shape[1]
        return logits if mask is None else logits[mask[:, -length:].bool()]


class Recording:
    """Records the passes of a wrapped model; its hooks run after the wrapper's."""

    def __init__(self, lm: MoECacheLM) -> None:
        self.passes: list[Pass] = []
        self._lm, engine = lm, lm.engine
        layers = find_moe_layers(lm.model)
        self._handles = [
            lm.model.register_forward_pre_hook(self._begin, with_kwargs=True),
            lm.model.register_forward_hook(self._end),
            *(layer.router.register_forward_hook(self._routed) for layer in layers),
        ]
        rows, choose = engine.alone, engine.alone.choose

        def noted(batch: Batch, *given: Any, **named: Any) -> Any:
            selection = choose(batch, *given, **named)
            # On the wall clock they are written once the layer has been executed.
            self.passes[-1].levels.append((batch.first_layer, rows.executed, rows.levels))
            return selection

        rows.choose = noted

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        inputs = dict(kwargs)
        past = inputs.pop("past_key_values", None)
        uses_cache = inputs.get("use_cache", True)
        if args:
            inputs["input_ids"] = args[0]
        length = past.get_seq_length() if past is not None else 0
        self.passes.append(Pass(inputs, length if uses_cache else -1))

    def _end(self, model: Any, args: Any, output: Any) -> None:
        record = self.passes[-1]
        record.logits = output.logits.clone()
        record.levels = [self._executed(*each) for each in record.levels]

    def _executed(self, layer: int, experts: Any, levels: Any) -> Mapping[int, int] | None:
        """Return at which level a layer has executed each key."""
        if levels is None:
            return None
        live, base = experts >= 0, layer * self._lm.engine.geometry.num_experts
        keys = (experts[live] + base).tolist()
        return dict(zip(keys, levels[live].tolist(), strict=True))

    def _routed(self, router: Any, args: Any, output: Any) -> None:
        self.passes[-1].routers.append(output)


# --- the judge --------------------------------------------------------------------------------


class Judge:
    """Plain transformers models of one checkpoint, which recompute recorded passes."""

    def __init__(self, model: Path | torch.nn.Module) -> None:
        """`model` is a checkpoint, or a loaded model, of which a copy is taken."""
        if isinstance(model, Path):
            model = AutoModelForCausalLM.from_pretrained(str(model), dtype="auto").eval()
        self.plain: Any = copy.deepcopy(model)
        self._levels: dict[str, list[Any]] = {}

    def logits(
        self, passes: Sequence[Pass], precision: str | None, lossless: bool, device: str = "cpu"
    ) -> list[Tensor]:
        """Recompute passes; where `lossless`, with this model's own choices at the best level."""
        levels = [model.to(device) for model in self._models(precision)]
        # The levels' models stay unchanged: plans that mix levels are assembled in a copy.
        model = levels[0] if lossless or len(levels) == 1 else copy.deepcopy(levels[0])
        handles, now = [], [passes[0]]
        if not lossless:
            handles = self._planned(model, levels, now)
        logits, past = [], None
        try:
            for now[0] in passes:
                with torch.no_grad():
                    inputs, past = self._past(now[0], past)
                    logits.append(model(**inputs).logits)
        finally:
            for handle in handles:
                handle.remove()
        return logits

    def _models(self, precision: str | None) -> list[Any]:
        if precision is None:
            return [self.plain]
        if precision not in self._levels:
            names = precision.split(":")
            self._levels[precision] = [replaced(self.plain, name) for name in names]
        for model in self._levels[precision]:
            model.set_experts_implementation(self.plain.get_experts_implementation())
        return self._levels[precision]

    def _past(self, each: Pass, past: Any) -> tuple[dict[str, Any], Any]:
        if each.past < 0:
            return each.inputs, past
        if each.past == 0:
            past = DynamicCache(config=self.plain.config)
        else:
            # Drop the tokens that a verify pass rejected.
            over = past.get_seq_length() - each.past
            if over:
                past.crop(-over)
        return {**each.inputs, "past_key_values": past}, past

    def _planned(self, model: Any, levels: Sequence[Any], now: Sequence[Pass]) -> list[Any]:
        """Make the routers return the recorded choices, and load each expert at its level."""
        handles = []
        stacked = [[expert_parameters(x.experts) for x in find_moe_layers(m)] for m in levels]
        for index, layer in enumerate(find_moe_layers(model)):

            def recorded_choice(router: Any, args: Any, output: Any, index: int = index) -> Any:
                return now[0].routers[index]

            def load_levels(experts: Any, args: Any, index: int = index) -> None:
                plan = now[0].levels[index] if now[0].levels else None
                first = index * experts.num_experts
                for name, parameter in expert_parameters(experts).items():
                    for expert in range(experts.num_experts):
                        level = 0 if plan is None else plan.get(first + expert, 0)
                        parameter[expert].copy_(stacked[level][index][name][expert])

            handles.append(layer.router.register_forward_hook(recorded_choice))
            if len(levels) > 1:
                handles.append(layer.experts.register_forward_pre_hook(load_levels))
        return handles


# --- a family ---------------------------------------------------------------------------------


def drive(lm: MoECacheLM) -> list[list[int]]:
    """A prompt and two steps of it, then a left-padded batch and a step."""
    model: Any = lm.model
    generator = torch.Generator().manual_seed(1)
    single = torch.randint(2, 300, (1, 9), generator=generator)
    batch = torch.randint(2, 300, (2, 6), generator=generator)
    mask = torch.ones_like(batch)
    mask[1, :2] = 0
    with torch.no_grad():
        output = model(single[:, :7], use_cache=True)
        for position in (7, 8):
            past = output.past_key_values
            output = model(single[:, position : position + 1], past_key_values=past, use_cache=True)
        if lm.moecache.draft is not None and not lm.is_speculative:
            # A draft that reads along follows one text at a time.
            return []
        output = model(batch[:, :5], attention_mask=mask[:, :5], use_cache=True)
        past = output.past_key_values
        model(batch[:, 5:], attention_mask=mask, past_key_values=past, use_cache=True)
    return []


def generate(lm: MoECacheLM) -> list[list[int]]:
    """Generate one short answer and return its tokens."""
    gen_kwargs = {"until": ["\n\n"], "max_gen_toks": 5}
    return generated(lm, [make_instance("generate_until", "gen", 0, "Hello number", gen_kwargs)])


class Family:
    """One family's checkpoint, its judge, and the models loaded from it."""

    def __init__(self, family: str, root: Path) -> None:
        self.name, self._root = family, root / family
        self.folder = save_model(self._root / "model", family, **sizes_of(family))
        self._lms: dict[tuple[Any, ...], MoECacheLM] = {}
        self._current: MoECacheLM | None = None

    @cached_property
    def judge(self) -> Judge:
        return Judge(self.folder)

    def arguments(self, way: Way) -> dict[str, Any]:
        """Return a way's setting with folders, a draft and artifacts of this family."""
        arguments = {"policy": "on_demand", **way.given}
        for key in FOLDERS:
            if key in arguments:
                arguments[key] = str(self._root / key)
        geometry = describe(self.judge.plain, find_moe_layers(self.judge.plain), self.name)
        if "warm" in arguments:
            arguments["warm"] = use_profile(geometry.num_layers, geometry.num_experts)
        if arguments.get("draft") == "tiny":
            arguments["draft"] = str(self._root / "draft")
            save_model(self._root / "draft", self.name, seed=1, **sizes_of(self.name))
        policy, top_k = config_of(way, arguments).policy, geometry.top_k
        for key, fitting in SMALL.items():
            axis, _, name = key.partition(".")
            if (getattr(policy, axis).parameters.get(name) or 0) > fitting(top_k):
                arguments[key] = fitting(top_k)
        return {**arguments, **artifacts_of(self.judge.plain, policy)}

    def lm(self, way: Way, given: Mapping[str, Any]) -> MoECacheLM:
        """Return a loaded model for a way. Raises ValueError where a run would be refused."""
        kind = MoECacheSpecLM if way.speculative else MoECacheLM
        arguments = {name: value for name, value in given.items() if name != KERNEL}
        host: dict[str, Any] = {"device": "cpu", "max_length": 64, "clock": "wall", **arguments}
        load_keys = ("precision", "store", "store_dir", "encoded_dir")
        key = (kind, *(given.get(name) for name in load_keys))
        if key in self._lms:
            lm = self._lms[key]
            check_arguments(str(self.folder), host, speculative=way.speculative)
        else:
            lm = self._lms[key] = kind(str(self.folder), **host)
        if self._current is not None and self._current is not lm:
            self._current.wrapped.unwrap()
        self._current = lm
        return lm

    def close(self) -> None:
        for lm in self._lms.values():
            lm.wrapped.unwrap()

    def forget(self) -> None:
        """Drop the loaded models, so that the next one is loaded anew."""
        self.close()
        self._lms.clear()
        self._current = None


def missing(way: Way, counts: Mapping[str, int]) -> list[str]:
    """Return the effects that a way's repetitions lack, without which they prove nothing."""
    setting = {key: value for key, value in way.given.items() if key not in FOLDERS}
    policy = config_of(way, {"policy": "on_demand", **setting}).policy
    needed = {
        "a miss": counts["misses"],
        "a prefetch": counts["late"] + counts["prefetch_hits"]
        or not policy.prefetch.algorithm.is_active,
        "a draft": counts["drafted"]
        or not way.speculative
        or setting.get("draft") == "prompt_lookup",
        "a part of the host's": counts["host_executed"] or policy.miss.name != "host",
        "a change": policy.is_lossless
        or any(counts[name] for name in ("low_precision", "dropped", "unfaithful")),
    }
    return [effect for effect, took_place in needed.items() if not took_place]


class Refused(ValueError):
    """A run of this family would refuse this way before anything is loaded."""


COUNTED = (
    *("misses", "late", "prefetch_hits", "low_precision", "dropped", "substituted", "unfaithful"),
    *("host_executed", "drafted", "bytes_moved"),
)


def compare(
    family: Family, way: Way, repetitions: int = REPETITIONS
) -> tuple[list[int], Counter[str]]:
    """Run a way repeatedly under races and judge each pass. Raises Refused.

    Returns the repetitions in which a pass gave other logits than the judge's, and counts summed
    over all passes, which show whether the raced effects took place.
    """
    try:
        arguments = family.arguments(way)
        lm = family.lm(way, arguments)
    except ValueError as error:
        raise Refused(str(error)) from error
    wrong, counts = list[int](), Counter[str]()
    drawn, kernel = random.Random(), arguments.get(KERNEL, "grouped_mm")
    family.judge.plain.set_experts_implementation(kernel)
    judged: dict[bytes, list[Tensor]] = {}
    tokens: list[list[int]] = []
    with races(drawn), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for repetition in range(repetitions):
            drawn.seed(repetition)
            capacity = CAPACITIES[repetition % len(CAPACITIES)]
            config = config_of(way, {"capacity": capacity, **arguments})
            lm.wrapped.unwrap()
            lm.model.set_experts_implementation(kernel)
            lm.install(config)
            assert lm.wrapped.store.kernel == kernel
            recording = Recording(lm)
            try:
                answers = generate(lm) if way.speculative else drive(lm)
            finally:
                recording.close()
            lm.engine.check_integrity()
            link: Any = lm.engine.link
            assert slot_bytes(link._mover) <= lm.engine.setting.capacity.total_bytes
            for record in lm.engine.ledger.passes:
                counts.update({name: getattr(record, name) for name in COUNTED})
            lossless = config.policy.is_lossless
            plan = b"" if lossless and not way.speculative else _fingerprint(recording.passes)
            if plan not in judged:
                precision = arguments.get("precision")
                judged[plan] = family.judge.logits(recording.passes, precision, lossless)
            tokens = tokens or answers
            changed = lossless and answers != tokens
            pairs = zip(recording.passes, judged[plan], strict=True)
            if changed or not all(
                torch.equal(p.answer, p.tokens(expected)) for p, expected in pairs
            ):
                wrong.append(repetition)
    return wrong, counts


def slot_bytes(mover: Any) -> int:
    """Return the bytes that a mover's slots take now."""
    is_ladder = isinstance(mover, LadderPools)
    rows = [row for _, row in mover._slots.values()] if is_ladder else mover._pools
    return sum(tensor.nbytes for row in rows for tensor in row.values())


def config_of(way: Way, given: Mapping[str, Any]) -> Config:
    """Read a setting, transformers' own key left out."""
    setting = {key: value for key, value in given.items() if key != KERNEL}
    return read_config({"clock": "wall", **setting}, way.speculative)


def _fingerprint(passes: Sequence[Pass]) -> bytes:
    """Return a key of all that the judge reads: repetitions of equal plans are computed once."""
    parts: list[Any] = []
    for record in passes:
        parts.append([record.past, record.inputs["input_ids"].tolist()])
        parts.append([None if level is None else sorted(level.items()) for level in record.levels])
        for router in record.routers:
            parts += [part.tolist() for part in router if isinstance(part, Tensor)]
    return repr(parts).encode()


def main(families: Sequence[str]) -> int:
    """Print a row for each way, of all families; return how many cells are wrong."""
    total = 0
    print(f"{REPETITIONS} race-injected repetitions each of {', '.join(families)}")
    print("equal: all passes, bit for bit, as a model without a cache computes them\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        family_of = {name: Family(name, Path(folder)) for name in families}
        for way in ways():
            words, counts = [], Counter[str]()
            for name, family in family_of.items():
                try:
                    wrong, way_counts = compare(family, way)
                except Refused as error:
                    words.append(f"{name} refused: {error}")
                    continue
                absent = missing(way, way_counts)
                counts.update({**way_counts, "equal": not wrong and not absent})
                if wrong or absent:
                    total += 1
                    words.append(f"{name} WRONG in {wrong}, without {absent}")
            summary = ", ".join(f"{n} {k}" for k, n in counts.items() if n)
            print(f"{way.name:32} {summary}", *words, sep="\n    ", flush=True)
        for family in family_of.values():
            family.close()
    print(f"\n{total} wrong")
    return total


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:] or list(FAMILIES))))
