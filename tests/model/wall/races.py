"""Every way of the wall clock under injected races, judged by a model that has no cache at all.

What moves is late at random, what decides waits at random, and a slot holds no number from the
moment a transfer begins to write it. Each pass of the model is written down: what it was given,
what its routers chose in the end, at which level each expert was executed, and what came out. A
plain transformers model then computes the passes again, one after another: with its own choices
where the policy is lossless, else with those that were written down, each expert at the level that
the plan says. Its logits have to be the same, bit for bit.

`python -m tests.model.wall.races` runs every way with every family, which `make races` does.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from lm_eval_moecache.model.store import GroupedCall
from lm_eval_moecache.model.wall.pools import DeviceMover, LadderPools, SlotPools, expert_parameters
from lm_eval_moecache.model.wall.store import WorkInGroups
from tests.artifacts import artifacts_of, use_profile
from tests.harness import make_instance
from tests.model.speculative.drafts import generated
from tests.model.wall.models import replaced
from tests.models import FAMILIES, save_model, sizes_of

REPETITIONS = 20
CAPACITIES = ("25%", "60%", "1", "40%")
"""Taken in turn: waves, room for what is foreseen, and one expert at a time."""
OTHERS = 9
"""Ways of the table that are told by one value and go with the suite."""
LONGEST_S = 0.0004
FOLDERS = ("trace", "store_dir", "encoded_dir", "warm")
SMALL: dict[str, Callable[[int], Any]] = {
    "miss.h": lambda top_k: top_k - 1,
    "miss.rho": lambda top_k: 1,
    "routing.trigger_min": lambda top_k: 1,
    "routing.trigger_max": lambda top_k: top_k - 1,
}
"""What compositions say for routers of more experts, for one of `top_k`."""
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
    "scan, dropping": {"scoring": "scan", "capacity": "3/layer", "miss": "drop"},
    "scan, disk": {"scoring": "scan", "capacity": "1/layer", "store": "disk"},
    "a pool's kernel, prefetches": {KERNEL: "batched_mm", **AHEAD},
    "a pool's kernel, levels": {KERNEL: "batched_mm", **LEVELS},
    "a draft reads along": {"prefetch": "draft", "draft": "self:int4"},
    "a draft reads along, disk": {
        **{"prefetch": "draft", "prefetch.cutoff": 2, "draft": "self:int4", "store": "disk"}
    },
}
"""What is told by no single value: ways that meet. Folders are filled in."""
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
"""The same of `moecache-spec`."""


@dataclass(frozen=True)
class Way:
    """A setting that runs on the wall clock."""

    name: str
    given: Mapping[str, Any]
    speculative: bool


@cache
def ways() -> tuple[Way, ...]:
    """All that runs on the wall clock by the table of a run's own checks, and what meets."""
    found = [Way(name, given, False) for name, given in TOGETHER.items()]
    found += [Way(name, given, True) for name, given in DRAFTING.items()]
    found += [Way(*each) for each in settings_that_run("")]
    # Of values that come to the same setting, as defaults do, the first.
    return tuple({_setting_of(way): way for way in reversed(found)}.values())[::-1]


def share_of(family: str) -> list[Way]:
    """Return the ways that the suite goes with a family: of what meets all, of the others some.

    Dealt out in turn, so that a new family and a new way have a part by themselves; every way with
    every family is what `make races` runs.
    """
    known = TOGETHER.keys() | DRAFTING.keys()
    meet = [way for way in ways() if way.name in known]
    others = [way for way in ways() if way.name not in known]
    dealt = meet + random.Random(0).sample(others, OTHERS)
    return dealt[list(FAMILIES).index(family) :: len(FAMILIES)]


def _setting_of(way: Way) -> str:
    given = {"clock": "wall", "policy": "on_demand", **way.given}
    if not any(given.get(key) == "" for key in FOLDERS) and KERNEL not in given:
        given = dict(read_config(given, way.speculative))
    return repr((given, way.speculative))


# --- races ------------------------------------------------------------------------------------


class Device:
    """A device's way of working on a CPU: what is launched runs later, in order, in its thread.

    Products read their slots when they run, not when they are launched, and a fence is there once
    all that was launched before it has run.
    """

    def __init__(self, races: Races) -> None:
        self._races = races
        self._stream = ThreadPoolExecutor(1, "fake-device")
        self._failed: list[BaseException] = []

    def launch(self, call: GroupedCall, places: Sequence[tuple[int, int]], matrices: Any) -> None:
        def run() -> None:
            time.sleep(self._races.drawn.random() * LONGEST_S)
            try:
                with torch.no_grad():
                    call.run(places, matrices)
            except BaseException as error:
                self._failed.append(error)

        self._stream.submit(run)

    def fence(self) -> threading.Event:
        reached = threading.Event()
        self._stream.submit(reached.set)
        return reached

    def synchronize(self) -> None:
        assert self.fence().wait(60)
        for error in self._failed:
            raise error

    def close(self) -> None:
        self._stream.shutdown()


class Launched:
    """Stands for a call whose products are launched on a device; all else is the call's own."""

    def __init__(self, call: GroupedCall, device: Device) -> None:
        self._call, self._device = call, device

    def run(self, places: Iterable[tuple[int, int]], matrices: Any) -> None:
        if threading.current_thread().name.startswith("moecache-host"):
            self._call.run(places, matrices)
        else:
            self._device.launch(self._call, list(places), matrices)

    def result(self) -> Tensor:
        self._device.synchronize()
        return self._call.result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


class Races:
    """Delays, drawn anew for each repetition, and slots that are poison until they are written."""

    def __init__(self) -> None:
        self.drawn = random.Random(0)
        self.device: Device | None = None
        """What executes, where it is not the caller."""

    def begin(self, repetition: int) -> None:
        """Draw other delays than before, and change between a CPU's and a device's way."""
        self.drawn = random.Random(repetition)
        self.end()
        self.device = Device(self) if repetition % 2 else None

    def end(self) -> None:
        if self.device is not None:
            self.device.close()
            self.device = None

    def pause(self) -> None:
        if self.drawn.random() < 0.3:
            time.sleep(self.drawn.random() * LONGEST_S)

    @contextmanager
    def injected(self) -> Iterator[None]:
        changed: list[tuple[Any, str, Callable[..., Any]]] = [
            (owner, name, self._late(getattr(owner, name)))
            for owner, name in (
                *((WallEngine, name) for name in ("enter", "run", "_execute")),
                *((SlotPools, "stored"), (LadderPools, "stored")),
            )
        ]
        changed.append((DeviceMover, "begin", self._poisoned(DeviceMover.begin)))
        changed.append((DeviceMover, "fence", lambda mover: self.device and self.device.fence()))
        changed.append((WorkInGroups, "__init__", self._launching(WorkInGroups.__init__)))
        with ExitStack() as stack:
            for owner, name, function in changed:
                stack.enter_context(mock.patch.object(owner, name, function))
            stack.callback(self.end)
            yield

    def _late(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def late(*args: Any) -> Any:
            self.pause()
            return function(*args)

        return late

    def _poisoned(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def late(mover: DeviceMover, transfer: Transfer) -> Any:
            if isinstance(transfer.after, threading.Event):
                assert transfer.after.wait(60)
            for tensor in mover.target_of(transfer).values():
                # No number in any float type, and no code that stands for the right one.
                tensor.view(torch.uint8).fill_(255)
            self.pause()
            token = begin(mover, transfer)
            self.pause()
            return token

        return late

    def _launching(self, make: Callable[..., None]) -> Callable[..., None]:
        def init(work: Any, *args: Any) -> None:
            make(work, *args)
            if self.device is not None:
                work._call = Launched(work._call, self.device)

        return init


# --- what is written down ---------------------------------------------------------------------


@dataclass
class Pass:
    """One forward of the model."""

    inputs: dict[str, Any]
    past: int
    """Tokens that came before; -1 where nothing is kept."""
    routers: list[Any] = field(default_factory=list)
    """Layer -> what its router gave in the end."""
    levels: list[Mapping[int, int] | None] = field(default_factory=list)
    """Layer -> key -> level, where there are several."""
    logits: Tensor | None = None

    @property
    def answer(self) -> Tensor:
        assert self.logits is not None, "a pass that did not end"
        return self.tokens(self.logits)

    def tokens(self, logits: Tensor) -> Tensor:
        """Leave out padding: nobody waits for it, and it needs no experts."""
        mask, length = self.inputs.get("attention_mask"), logits.shape[1]
        return logits if mask is None else logits[mask[:, -length:].bool()]


class Recording:
    """Writes down the passes of a wrapped model; its hooks come after the wrapper's."""

    def __init__(self, lm: MoECacheLM) -> None:
        self.passes: list[Pass] = []
        self._lm, engine = lm, lm.engine
        layers = find_moe_layers(lm.model)
        self._handles = [
            lm.model.register_forward_pre_hook(self._begin, with_kwargs=True),
            lm.model.register_forward_hook(self._end),
            *(layer.router.register_forward_hook(self._routed) for layer in layers),
        ]
        run = engine.run

        def noted(event: Any) -> Any:
            plan = run(event)
            if not lm.wrapped.scan_scoring:
                self.passes[-1].levels.append(plan.levels)
            return plan

        engine.run = noted

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = dict(kwargs)
        past = given.pop("past_key_values", None)
        kept = given.get("use_cache", True)
        if args:
            given["input_ids"] = args[0]
        length = past.get_seq_length() if past is not None else 0
        self.passes.append(Pass(given, length if kept else -1))

    def _end(self, model: Any, args: Any, output: Any) -> None:
        self.passes[-1].logits = output.logits.clone()

    def _routed(self, router: Any, args: Any, output: Any) -> None:
        self.passes[-1].routers.append(output)


# --- the judge --------------------------------------------------------------------------------


class Judge:
    """Plain transformers models of one checkpoint, which compute recorded passes again."""

    def __init__(self, model: Path | torch.nn.Module) -> None:
        """`model` is a checkpoint, or a loaded model, of which a copy is taken."""
        if isinstance(model, Path):
            model = AutoModelForCausalLM.from_pretrained(str(model), dtype="auto").eval()
        self.plain: Any = copy.deepcopy(model)
        self._levels: dict[str, list[Any]] = {}

    def logits(
        self, passes: Sequence[Pass], precision: str | None, lossless: bool, device: str = "cpu"
    ) -> list[Tensor]:
        """Compute passes again; `lossless`: by this model's own choices, at the best level."""
        levels = [model.to(device) for model in self._models(precision)]
        # The levels stay as they are: what a plan mixes is put together in a model of its own.
        model = levels[0] if lossless or len(levels) == 1 else copy.deepcopy(levels[0])
        handles, now = [], [passes[0]]
        if not lossless:
            handles = self._planned(model, levels, now)
        found, past = [], None
        try:
            for now[0] in passes:
                with torch.no_grad():
                    given, past = self._past(now[0], past)
                    found.append(model(**given).logits)
        finally:
            for handle in handles:
                handle.remove()
        return found

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
            # What a verify pass found wrong is gone.
            over = past.get_seq_length() - each.past
            if over:
                past.crop(-over)
        return {**each.inputs, "past_key_values": past}, past

    def _planned(self, model: Any, levels: Sequence[Any], now: Sequence[Pass]) -> list[Any]:
        """Have the routers say what was written down, and each expert lie at its level."""
        handles = []
        stacked = [[expert_parameters(x.experts) for x in find_moe_layers(m)] for m in levels]
        for index, layer in enumerate(find_moe_layers(model)):

            def said(router: Any, args: Any, output: Any, index: int = index) -> Any:
                return now[0].routers[index]

            def lie(experts: Any, args: Any, index: int = index) -> None:
                plan = now[0].levels[index] if now[0].levels else None
                first = index * experts.num_experts
                for name, parameter in expert_parameters(experts).items():
                    for expert in range(experts.num_experts):
                        level = 0 if plan is None else plan.get(first + expert, 0)
                        parameter[expert].copy_(stacked[level][index][name][expert])

            handles.append(layer.router.register_forward_hook(said))
            if len(levels) > 1:
                handles.append(layer.experts.register_forward_pre_hook(lie))
        return handles


# --- a family ---------------------------------------------------------------------------------


def drive(lm: MoECacheLM) -> list[list[int]]:
    """A prompt and two steps of it, then a left-padded batch and a step; or a scanned text."""
    model: Any = lm.model
    generator = torch.Generator().manual_seed(1)
    single = torch.randint(2, 300, (1, 9), generator=generator)
    batch = torch.randint(2, 300, (2, 6), generator=generator)
    mask = torch.ones_like(batch)
    mask[1, :2] = 0
    with torch.no_grad():
        if lm.moecache.scoring == "scan":
            for text in (single[:, :7], single[:, :1]):
                lm.wrapped.scan_scoring = True
                model(text, use_cache=False)
            return []
        output = model(single[:, :7], use_cache=True)
        for place in (7, 8):
            past = output.past_key_values
            output = model(single[:, place : place + 1], past_key_values=past, use_cache=True)
        if lm.moecache.draft is not None and not lm.is_speculative:
            # A draft that reads along reads one text at a time.
            return []
        output = model(batch[:, :5], attention_mask=mask[:, :5], use_cache=True)
        past = output.past_key_values
        model(batch[:, 5:], attention_mask=mask, past_key_values=past, use_cache=True)
    return []


def generate(lm: MoECacheLM) -> list[list[int]]:
    """One short answer; returns its tokens."""
    asked = {"until": ["\n\n"], "max_gen_toks": 5}
    return generated(lm, [make_instance("generate_until", "gen", 0, "Hello number", asked)])


class Family:
    """One family's checkpoint, its judge, and the models that have been loaded of it."""

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
        given = {"policy": "on_demand", **way.given}
        for key in FOLDERS:
            if key in given:
                given[key] = str(self._root / key)
        geometry = describe(self.judge.plain, find_moe_layers(self.judge.plain), self.name)
        if "warm" in given:
            given["warm"] = use_profile(geometry.num_layers, geometry.num_experts)
        if given.get("draft") == "tiny":
            given["draft"] = str(self._root / "draft")
            save_model(self._root / "draft", self.name, seed=1, **sizes_of(self.name))
        policy, top_k = config_of(way, given).policy, geometry.top_k
        for key, fitting in SMALL.items():
            axis, _, name = key.partition(".")
            if (getattr(policy, axis).parameters.get(name) or 0) > fitting(top_k):
                given[key] = fitting(top_k)
        return {**given, **artifacts_of(self.judge.plain, policy)}

    def lm(self, way: Way, given: Mapping[str, Any]) -> MoECacheLM:
        """Return a loaded model for a way. Raises ValueError where a run would be refused."""
        kind = MoECacheSpecLM if way.speculative else MoECacheLM
        ours = {name: value for name, value in given.items() if name != KERNEL}
        host: dict[str, Any] = {"device": "cpu", "max_length": 64, "clock": "wall", **ours}
        loaded = ("precision", "store", "store_dir", "encoded_dir")
        key = (kind, *(given.get(name) for name in loaded))
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
        """Load anew what comes next."""
        self.close()
        self._lms.clear()
        self._current = None


def missing(way: Way, counts: Mapping[str, int]) -> list[str]:
    """Return what a way's repetitions never did, so that they would show nothing."""
    given = {key: value for key, value in way.given.items() if key not in FOLDERS}
    policy = config_of(way, {"policy": "on_demand", **given}).policy
    needed = {
        "a miss": counts["misses"],
        "a prefetch": counts["late"] + counts["prefetch_hits"]
        or not policy.prefetch.algorithm.is_active,
        "a draft": counts["drafted"]
        or not way.speculative
        or given.get("draft") == "prompt_lookup",
        "a part of the host's": counts["host_executed"] or policy.miss.name != "host",
        "a change": policy.is_lossless
        or any(counts[name] for name in ("low_precision", "dropped", "unfaithful")),
    }
    return [what for what, took_place in needed.items() if not took_place]


class Refused(ValueError):
    """A run would be refused this way with this family, before anything is loaded."""


COUNTED = (
    *("misses", "late", "prefetch_hits", "low_precision", "dropped", "substituted", "unfaithful"),
    *("host_executed", "drafted", "bytes_moved"),
)


def compare(
    family: Family, way: Way, repetitions: int = REPETITIONS
) -> tuple[list[int], Counter[str]]:
    """Go a way again and again under races, and have each pass judged. Raises Refused.

    Returns the repetitions in which a pass gave other logits than the judge's, and sums over all
    passes: whether what was to be raced for took place.
    """
    try:
        given = family.arguments(way)
        lm = family.lm(way, given)
    except ValueError as error:
        raise Refused(str(error)) from error
    wrong, counts = list[int](), Counter[str]()
    races, kernel = Races(), given.get(KERNEL, "grouped_mm")
    family.judge.plain.set_experts_implementation(kernel)
    known: dict[bytes, list[Tensor]] = {}
    tokens: list[list[int]] = []
    with races.injected(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for repetition in range(repetitions):
            races.begin(repetition)
            capacity = CAPACITIES[repetition // 2 % len(CAPACITIES)]
            config = config_of(way, {"capacity": capacity, **given})
            lm.wrapped.unwrap()
            lm.model.set_experts_implementation(kernel)
            lm.install(config)
            assert lm.wrapped._store.kernel == kernel
            recording = Recording(lm)
            try:
                answered = generate(lm) if way.speculative else drive(lm)
            finally:
                recording.close()
            lm.engine.check_integrity()
            link: Any = lm.engine.link
            assert link._mover.num_bytes <= lm.engine.setting.capacity.total_bytes
            for record in lm.engine.ledger.passes:
                counts.update({name: getattr(record, name) for name in COUNTED})
            lossless = config.policy.is_lossless
            plan = b"" if lossless and not way.speculative else _fingerprint(recording.passes)
            if plan not in known:
                precision = given.get("precision")
                known[plan] = family.judge.logits(recording.passes, precision, lossless)
            tokens = tokens or answered
            changed = lossless and answered != tokens
            pairs = zip(recording.passes, known[plan], strict=True)
            if changed or not all(torch.equal(p.answer, p.tokens(theirs)) for p, theirs in pairs):
                wrong.append(repetition)
    return wrong, counts


def config_of(way: Way, given: Mapping[str, Any]) -> Config:
    """Read a setting, without what is transformers' own."""
    ours = {key: value for key, value in given.items() if key != KERNEL}
    return read_config({"clock": "wall", **ours}, way.speculative)


def _fingerprint(passes: Sequence[Pass]) -> bytes:
    """Name all that the judge is told: two repetitions with the same plans are computed once."""
    said: list[Any] = []
    for each in passes:
        said.append([each.past, each.inputs["input_ids"].tolist()])
        said.append([None if level is None else sorted(level.items()) for level in each.levels])
        for router in each.routers:
            said += [part.tolist() for part in router if isinstance(part, Tensor)]
    return repr(said).encode()


def main(families: Sequence[str]) -> int:
    """Print a row for each way, of all families; return how many cells are wrong."""
    total = 0
    print(f"{REPETITIONS} race-injected repetitions each of {', '.join(families)}")
    print("equal: all passes, bit for bit, as a model without a cache computes them\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        made = {name: Family(name, Path(folder)) for name in families}
        for way in ways():
            words, counts = [], Counter[str]()
            for name, family in made.items():
                try:
                    wrong, own = compare(family, way)
                except Refused as error:
                    words.append(f"{name} refused: {error}")
                    continue
                never = missing(way, own)
                counts.update({**own, "equal": not wrong and not never})
                if wrong or never:
                    total += 1
                    words.append(f"{name} WRONG in {wrong}, without {never}")
            took = ", ".join(f"{n} {k}" for k, n in counts.items() if n)
            print(f"{way.name:32} {took}", *words, sep="\n    ", flush=True)
        for family in made.values():
            family.close()
    print(f"\n{total} wrong")
    return total


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:] or list(FAMILIES))))
