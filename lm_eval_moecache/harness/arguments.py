"""`--model_args`: our keys, their allowed values, and the combinations that cannot run.

All checks here need no torch and run before any model is read: `split_arguments` separates our keys
from those of lm-eval's `hf` model, `read_config` checks ours. `preflight` checks what depends on
the model. A user's mistake is an `ArgumentsError`, reported in one line.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import InstanceOf

from lm_eval_moecache.algorithms.policy import Policy, check_cache_form, load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.engine.setting import (
    AS_THEY_ARRIVE,
    CONTEXT,
    FIFO,
    PROMPT_LOOKUP,
    SELF,
    TOGETHER,
    Setting,
    check_host,
    offline_error,
)
from lm_eval_moecache.model.precision.ladder import Ladder, parse_ladder
from lm_eval_moecache.records.errors import ArgumentsError
from lm_eval_moecache.records.files import check_writable
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import Hardware, load_hardware
from lm_eval_moecache.records.numbers import listed, nearest, unknown_name_error
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.runtimes import load_runtime
from lm_eval_moecache.records.schemas import check
from lm_eval_moecache.records.schemas.keys import KEYS, REPLAYED, ModelArguments, keys_with
from lm_eval_moecache.records.sizes import (
    capacity_text,
    check_capacity,
    is_per_layer,
    parse_bandwidth,
    parse_capacity,
)
from lm_eval_moecache.trace.recorder import Detail, check_folder
from lm_eval_moecache.trace.use import UseProfile, load_use, placement

_COMMANDS = ("lm_eval", "lm-eval", "lm_eval.__main__")


@contextmanager
def as_arguments_error(pretrained: object) -> Iterator[None]:
    """Turn the errors of checks, and of a model that cannot be read, into an ArgumentsError."""
    try:
        yield
    except ArgumentsError:
        raise
    except ValueError as error:
        raise ArgumentsError(str(error)) from None
    except OSError as error:
        reason = " ".join(str(error).split())
        raise ArgumentsError(f"pretrained={pretrained!r} cannot be read: {reason}") from None


@contextmanager
def exit_with_message() -> Iterator[None]:
    """Under lm-eval's command, end the process with only the message of an ArgumentsError.

    From Python and under `moecache eval` the error propagates like any other ValueError.
    """
    try:
        yield
    except ArgumentsError as error:
        if not is_lm_eval_command():
            raise
        sys.stderr.write(f"moecache: {error}\n")
        raise SystemExit(1) from None


def is_lm_eval_command() -> bool:
    """Return whether this process is `lm_eval ...` or `python -m lm_eval ...`."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return (spec.name if spec else Path(getattr(main, "__file__", None) or "").stem) in _COMMANDS


# SP-MoE drafts one token per iteration (section 5).
DEFAULT_DRAFT, DEFAULT_DRAFT_TOKENS = "self:int4", 1
ALL, ROUTING = "all", "routing"
"""Contents of a trace: enough for any replay, or the experts alone."""
# Keys that HFLM passes on to transformers' from_pretrained; any other is a misspelt key.
FROM_PRETRAINED = (
    *("attn_implementation", "cache_dir", "device_map", "experts_implementation"),
    *("local_files_only", "low_cpu_mem_usage", "quantization_config", "token"),
    *("use_safetensors", "variant"),
)

_STORED = {"load_in_4bit": "precision=int4", "load_in_8bit": "precision=int8"}
"""What transformers called the experts' precision."""


class Config(ModelArguments):
    """Our share of the model arguments, checked, with its names resolved; the rest is HFLM's.

    The keys of the axes are merged into `policy`, and `bandwidth` into `hardware` (under the wall
    clock into `throttle_bytes_per_s`): the keys themselves are None.
    """

    policy: InstanceOf[Policy]
    capacity: str
    precision: str | None
    hardware: InstanceOf[Hardware]
    emulate: InstanceOf[RealModel] | None
    warm: InstanceOf[UseProfile] | None
    throttle_bytes_per_s: float | None = None
    """Bandwidth to which the wall clock throttles its link; None for no throttle."""
    detail: InstanceOf[Detail] | None = None
    """Content of the trace as a sweep or a search sets it; None for that of `trace_keep`."""

    def with_changes(self, **changes: Any) -> Config:
        """Return a copy with these fields replaced, without checking them again."""
        return self.model_copy(update=changes)

    @property
    def ladder(self) -> Ladder | None:
        """Precisions of the store, best first; None for the model's dtype."""
        return None if self.precision is None else parse_ladder(self.precision)

    def setting(self, geometry: Geometry) -> Setting:
        """Return the engine's setting for this model; bytes are the emulated model's."""
        emulate = self.emulate
        charged = geometry if emulate is None else emulate.emulated_by(geometry)
        return Setting(
            policy=self.policy,
            capacity=parse_capacity(self.capacity, charged, per_layer=self.policy.per_layer),
            emulate=emulate,
            link=self.link,
            execute=self.execute,
            reads_per_expert=self.reads_per_expert,
            attention=self.attention,
            warm=placement(self.policy, self.warm, geometry),
            hardware=self.hardware,
            seed=self.seed,
            throttle_bytes_per_s=self.throttle_bytes_per_s,
        )


@cache
def hflm_keys() -> frozenset[str]:
    """Return the arguments of lm-eval's `hf` model, from its source: importing it imports torch."""
    package = importlib.util.find_spec("lm_eval")
    assert package is not None and package.origin is not None, "lm-eval is not installed"
    source = (Path(package.origin).parent / "models" / "huggingface.py").read_text("utf-8")
    classes = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
    methods = {n.name: n for n in classes["HFLM"].body if isinstance(n, ast.FunctionDef)}
    signature = methods["__init__"].args
    return frozenset(arg.arg for arg in (*signature.args, *signature.kwonlyargs)) - {"self"}


def split_arguments(
    arguments: Mapping[str, Any], hflm_keys: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments into ours and HFLM's; ValueError for an unknown key."""
    hflm = {*hflm_keys, *FROM_PRETRAINED}
    own_args: dict[str, Any] = {}
    hflm_args: dict[str, Any] = {}
    for key, value in arguments.items():
        axis, dot, _ = key.partition(".")
        if key in KEYS or (dot and axis in AXES):
            own_args[key] = value
        elif key in hflm:
            hflm_args[key] = value
        else:
            allowed = {*KEYS, *hflm}
            meant = _STORED.get(key)
            near = f" Did you mean {meant!r}?" if meant else nearest(key, allowed)
            raise ValueError(
                f"model_args: the key {key!r} (with value {value!r}) is not known."
                f"{near} Allowed: {listed(KEYS, key, '`moecache eval -h`')}; an "
                "axis' parameter as eviction.NAME; the arguments of lm-eval's `hf` model."
            )
    return own_args, hflm_args


def read_config(
    given: Mapping[str, Any], speculative: bool = False, *, replayed: bool = False
) -> Config:
    """Check our arguments and fill in the defaults. Raises ValueError before any model is read.

    lm-eval parses `prefetch=none` as None: on an axis this becomes the name `none` again, elsewhere
    None means that the key is not given.

    Args:
        given: Our keys, and parameters of axes as `eviction.NAME`.
        speculative: Whether a draft model drafts (`moecache-spec`): only then are drafting keys
            accepted.
        replayed: Whether a trace is replayed: only then are offline algorithms allowed, and only
            keys that a replay can change.
    """
    for key in given if replayed else ():
        if key not in (known := keys_with(REPLAYED)) and key.partition(".")[0] not in AXES:
            raise unknown_name_error("of a replay, the key", key, known)
    values = {k: "none" if v is None and k in AXES else v for k, v in given.items()}
    given = {k: v for k, v in values.items() if v is not None}
    args = check(ModelArguments, {k: v for k, v in given.items() if k in KEYS}, "model_args")
    overrides = {k: v for k, v in given.items() if k == "phases" or k.partition(".")[0] in AXES}
    policy = load_policy(args.policy, overrides)
    for algorithm in (getattr(policy, axis).algorithm for axis in AXES):
        if not replayed and getattr(algorithm, "is_offline", False):
            raise offline_error(algorithm)
    capacity = capacity_text(args.capacity)
    check_capacity(capacity)
    check_cache_form(policy, is_per_layer(capacity))
    ladder = () if args.precision is None else parse_ladder(args.precision)
    needs_draft = policy.prefetch.algorithm.needs_draft
    draft = (args.draft or DEFAULT_DRAFT) if speculative or needs_draft else None
    for key, why, allowed in _conflicts(args, given, policy, capacity, ladder, draft, speculative):
        value = given.get(key, draft if key == "draft" else getattr(args, key))
        raise ValueError(f"{key}={value!r} {why}. Allowed with it: {allowed}.")
    for key in ("store_dir", "encoded_dir"):
        folder = getattr(args, key)
        try:
            if folder is not None:
                check_writable(Path(folder) / "kept")
        except OSError as error:
            raise ValueError(
                f"{key}={folder!r} cannot be written to: {error}. Allowed: a folder of yours."
            ) from error
    wall = args.clock == "wall"
    bandwidth = None if args.bandwidth is None else str(args.bandwidth)
    hardware = load_hardware(str(args.hardware), None if wall else bandwidth)
    hardware = load_runtime(str(args.runtime)).on(hardware)
    if policy.miss.algorithm.uses_host and not wall:
        check_host(hardware)
    if args.trace is not None:
        if not args.trace.strip():
            raise ValueError(f"trace={args.trace!r} names no folder. Allowed: one, or no trace=.")
        check_folder(args.trace)
    resolved = {
        **dict.fromkeys((*AXES, "phases", "bandwidth")),
        "policy": policy,
        "capacity": capacity,
        "precision": ":".join(ladder) or None,
        "hardware": hardware,
        "throttle_bytes_per_s": parse_bandwidth(bandwidth) if wall and bandwidth else None,
        "emulate": None if args.emulate is None else load_real_model(args.emulate),
        "warm": None if args.warm is None else load_use(args.warm),
        "draft": draft,
        "draft_tokens": (args.draft_tokens or DEFAULT_DRAFT_TOKENS) if speculative else None,
    }
    return Config.model_construct(**{**dict(args), **resolved})


def _conflicts(
    asked: ModelArguments,
    given: Mapping[str, Any],
    policy: Policy,
    capacity: str,
    ladder: Ladder,
    draft: str | None,
    speculative: bool,
) -> Iterator[tuple[str, str, str]]:
    """Yield conflicting settings: (key, why its value does not fit, allowed values)."""
    miss, needs_draft = policy.miss, policy.prefetch.algorithm.needs_draft
    wall = "cannot be combined with clock='wall', "
    if asked.clock == "virtual":
        for key in [k for k in ("store", "store_dir") if k in given]:
            yield key, "has no effect with clock='virtual', where nothing is moved", "clock=wall"
    else:
        if "hardware" in given:
            why = "has no effect with clock='wall', which measures this machine"
            yield "hardware", why, "bandwidth, which slows the real link down; or clock=virtual"
        if "runtime" in given:
            why = "has no effect with clock='wall', which measures this program"
            yield "runtime", why, "clock=virtual"
        if asked.link == FIFO:
            yield "link", f"{wall}whose demands always go first", "clock=virtual"
        for key in [k for k in ("execute", "reads_per_expert", "attention") if k in given]:
            why = "which measures what this machine does in its own order"
            yield key, wall + why, "clock=virtual"
        if "emulate" in given:
            yield "emulate", f"{wall}which moves and times the model's own experts", "clock=virtual"
        if "store_dir" in given and asked.store != "disk":
            yield "store_dir", "has no effect with store='ram'", "store=disk"
        if miss.name == "bounded_insertion":
            why = (
                "cannot be combined with miss='bounded_insertion', whose uploads no event waits for"
            )
            yield "clock", why, "clock=virtual, or miss=host"
        if asked.scoring == "scan":
            why = (
                "which measures one pass over a text: what its tokens would take one after another "
                "is told by a model of time, not by a clock"
            )
            yield "scoring", wall + why, "scoring=parallel, or clock=virtual"
    # Settings under which scanning a text layer by layer differs from decoding it.
    if asked.scoring == "scan":
        if not (is_per_layer(capacity) or policy.per_layer):
            why = f"needs a cache per layer, but capacity={capacity!r} is one cache for all layers:"
            why += " routing token after token inside a layer has no order across layers"
            yield "scoring", why, "a capacity like '30/layer'"
        if policy.prefetch.algorithm.is_active:
            why = f"cannot be combined with prefetch={policy.prefetch.name!r}: "
            why += "prefetches cross layers, and scan goes through one layer at a time"
            yield "scoring", why, "prefetch=none"
        if getattr(policy.routing.algorithm, "depth", 0):
            why = f"cannot be combined with routing={policy.routing.name!r}, "
            why += "which decides a layer's experts in the layer before"
            yield "scoring", why, "a routing of one layer"
        if ladder and miss.algorithm.uses_ladder:
            why = f"cannot be combined with miss={miss.name!r}: tokens of one text would run one "
            why += "expert at different precisions, but are executed together"
            yield "scoring", why, "one precision"
        if asked.attention == CONTEXT:
            why = "cannot be combined with scoring='scan', which goes through a text layer by layer"
            yield "attention", why, "scoring=parallel"
    if asked.attention == CONTEXT and asked.emulate is None:
        why = "needs emulate=, whose configuration gives the heads and KV caches"
        allowed = "emulate=NAME, or the folder of the model itself; or attention=none"
        yield "attention", why, allowed
    if asked.encoded_dir is not None and not ladder:
        why = "has no effect without precision=: experts are stored as they are"
        yield "encoded_dir", why, "precision=int8, int8:int4:int2 and others"
    if asked.execute == AS_THEY_ARRIVE and len(ladder) > 1:
        why = f"is for a store of one precision, and precision={asked.precision!r} has "
        yield "execute", f"{why}{len(ladder)}", f"one precision; or execute={TOGETHER!r}"
    if asked.trace is None and "trace_keep" in given:
        yield "trace_keep", "says what a trace keeps, and none is recorded", "trace=DIR"
    if draft is not None and draft.startswith(SELF) and ladder:
        why = f"is made of the target's own weights, which precision={asked.precision!r} does not "
        yield "draft", f"{why}keep", "another draft, as a folder or a hub id"
    for key in ("draft", "draft_tokens"):
        reads_along = needs_draft and key == "draft"
        if key in given and not (speculative or reads_along):
            why = (
                "is for --model moecache-spec; --model moecache decodes without a draft (with "
                "prefetch=draft one reads along, and drafts no tokens)"
            )
            yield key, why, "--model moecache-spec"
    if needs_draft and draft == PROMPT_LOOKUP:
        why = "has no attention outputs to predict experts from, as "
        why += f"prefetch={policy.prefetch.name!r} does"
        yield "draft", why, "another prefetch; or a folder, a hub id or self:int4 in its place"
