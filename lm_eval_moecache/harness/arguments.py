"""Reads `--model_args`: which keys are ours, which are HFLM's, and what each of ours may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from lm_eval_moecache.algorithms.policy import Policy, check_cache_form, load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.engine.setting import (
    LINKS,
    PRIORITY,
    PROMPT_LOOKUP,
    Setting,
    check_host,
    offline,
)
from lm_eval_moecache.harness.clock_checks import check_clock
from lm_eval_moecache.harness.encoded_dir import read_encoded_dir
from lm_eval_moecache.harness.scan_checks import check_scan
from lm_eval_moecache.model.precision.ladder import Ladder, parse_ladder
from lm_eval_moecache.records.draft import MOST_DRAFTED
from lm_eval_moecache.records.emulation import RealModel, load_real_model
from lm_eval_moecache.records.errors import nearest, unknown
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.hardware import DEFAULT_PROFILE, Hardware, load_hardware
from lm_eval_moecache.records.numbers import read_count, shown
from lm_eval_moecache.records.sizes import (
    capacity_text,
    check_capacity,
    is_per_layer,
    parse_bandwidth,
    parse_capacity,
)
from lm_eval_moecache.records.use import UseProfile
from lm_eval_moecache.trace.detail import Detail
from lm_eval_moecache.trace.use import load_use
from lm_eval_moecache.trace.writer import prepare_folder

# DESIGN section 6 has the draft, SP-MoE section 5 its length: one token per iteration.
DEFAULT_DRAFT, DEFAULT_DRAFT_TOKENS = "self:int4", 1
LOSSLESS, ALL, ROUTING = KEPT = ("lossless", "all", "routing")
"""What a trace keeps: what lossless policies ask for, with the prefetchers of the compositions;
what any replay may ask for; or the experts alone."""
CHOICES = {
    "clock": ("virtual", "wall"),
    "store": ("ram", "disk"),
    "scoring": ("parallel", "scan"),
    "cache_reset": ("never", "request"),
    "link": LINKS,
    "trace_keep": KEPT,
}
KEYS = (
    *("policy", *AXES, "capacity", "precision", "hardware", "bandwidth", "phases", "seed"),
    *("trace", "store_dir", "encoded_dir", "emulate", "warm"),
    *CHOICES,
    *("draft", "draft_tokens"),
)
NAMES = ("hardware", "trace", "store_dir", "encoded_dir", "emulate", "warm", "draft")
# What HFLM passes on to transformers' from_pretrained; anything else there is a misspelt key.
FROM_PRETRAINED = (
    "attn_implementation",
    "cache_dir",
    "device_map",
    "experts_implementation",
    "local_files_only",
    "low_cpu_mem_usage",
    "quantization_config",
    "token",
    "use_safetensors",
    "variant",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Our share of the model arguments, checked; the rest is HFLM's."""

    policy: Policy
    capacity: str
    hardware: Hardware
    clock: str
    scoring: str
    cache_reset: str
    seed: int
    trace: str | None = None
    """Folder to record a routing trace into."""
    trace_keep: str = LOSSLESS
    """What it keeps: see KEPT."""
    detail: Detail | None = None
    """The same, as a sweep or a search says it."""
    draft: str | None = None
    """What drafts (`moecache-spec`): a model, `self:PRECISION` or `prompt_lookup`."""
    draft_tokens: int | None = None
    """Tokens drafted for each verify pass."""
    store: str = "ram"
    """Where experts lie that are not resident (wall clock only)."""
    encoded_dir: str | None = None
    """Folder in which encoded experts are kept for later loads."""
    store_dir: str | None = None
    """Folder for the files of `store=disk`."""
    throttle_bytes_per_s: float | None = None
    """What the wall clock slows its link down to."""
    link: str = PRIORITY
    """Discipline of the virtual link."""
    emulate: RealModel | None = None
    """The real model whose sizes the layers are charged as (virtual clock only)."""
    warm: UseProfile | None = None
    """What the cache holds before the first request (virtual clock only)."""
    precision: str | None = None
    """Levels at which experts are stored, best first; None for the model's own dtype."""

    @property
    def ladder(self) -> Ladder | None:
        return None if self.precision is None else parse_ladder(self.precision)

    def setting(self, geometry: Geometry) -> Setting:
        """Return what an engine is made of, for this model; bytes are the emulated ones."""
        emulate = self.emulate
        charged = geometry if emulate is None else emulate.emulated_by(geometry)
        return Setting(
            policy=self.policy,
            capacity=parse_capacity(self.capacity, charged),
            emulate=emulate,
            link=self.link,
            warm=self.warm,
            hardware=self.hardware,
            seed=self.seed,
            throttle_bytes_per_s=self.throttle_bytes_per_s,
        )


def split_arguments(
    given: Mapping[str, Any], host_keys: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide the arguments into ours and the host's; unknown keys name their nearest match."""
    host = {*host_keys, *FROM_PRETRAINED}
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for key, value in given.items():
        axis, dot, _ = key.partition(".")
        if key in KEYS or (dot and axis in AXES):
            ours[key] = value
        elif key in host:
            theirs[key] = value
        else:
            allowed = {*KEYS, *host}
            raise ValueError(
                f"model_args: the key {key!r} (with value {value!r}) is not known."
                f"{nearest(key, allowed)} Allowed: {', '.join(KEYS)}, an axis' parameter as "
                "eviction.NAME, and the arguments of lm-eval's `hf` model."
            )
    return ours, theirs


def read_config(
    given: Mapping[str, Any], speculative: bool = False, *, replayed: bool = False
) -> Config:
    """Check our arguments and fill in the defaults. Raises ValueError before any model is read.

    `speculative` is whether a draft model drafts: only then there are the keys of drafting.
    `replayed` is whether a trace is: only then may an algorithm know the future.
    lm-eval reads `prefetch=none` as Python's None: on an axis it is the name again. Elsewhere None
    means that the key is not given.
    """
    named = {k: "none" if v is None and k in AXES else v for k, v in given.items()}
    given = _named({k: v for k, v in named.items() if v is not None})
    overrides = {k: v for k, v in given.items() if k == "phases" or k.partition(".")[0] in AXES}
    policy = load_policy(given.get("policy", "specmd"), overrides)
    if not replayed:
        _check_online(policy)
    capacity = capacity_text(given.get("capacity", "25%"))
    check_capacity(capacity)
    check_cache_form(policy, is_per_layer(capacity))
    choices = _choose(given)
    check_clock(choices, given, policy)
    check_scan(choices["scoring"], policy, capacity)
    bandwidth = None if given.get("bandwidth") is None else str(given["bandwidth"])
    wall = choices["clock"] == "wall"
    drafting = _read_draft(given, policy, speculative)
    return Config(
        policy=policy,
        capacity=capacity,
        hardware=_hardware(given, policy, None if wall else bandwidth),
        throttle_bytes_per_s=parse_bandwidth(bandwidth) if wall and bandwidth else None,
        store_dir=None if given.get("store_dir") is None else str(given["store_dir"]),
        encoded_dir=read_encoded_dir(given),
        seed=read_count("seed", given.get("seed", 0), exact=True),
        precision=_precision(given.get("precision"), choices, policy, drafting.get("draft")),
        emulate=None if given.get("emulate") is None else load_real_model(str(given["emulate"])),
        warm=None if given.get("warm") is None else load_use(str(given["warm"])),
        trace=_trace_folder(given),
        **choices,
        **drafting,
    )


def _named(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse what is neither text nor a path; lm-eval makes whole numbers of digits."""
    for key in NAMES:
        value = given.get(key, "")
        if isinstance(value, bool) or not isinstance(value, (str, int, PurePath)):
            raise ValueError(f"{key}={shown(value)} must be text: a name, or a path.")
    return given


def _check_online(policy: Policy) -> None:
    for axis in AXES:
        algorithm = getattr(policy, axis).algorithm
        if getattr(algorithm, "is_offline", False):
            raise offline(algorithm)


def _hardware(given: Mapping[str, Any], policy: Policy, bandwidth: str | None) -> Hardware:
    found = load_hardware(str(given.get("hardware", DEFAULT_PROFILE)), bandwidth)
    if policy.miss.algorithm.uses_host and given.get("clock") != "wall":
        check_host(found)
    return found


def _choose(given: Mapping[str, Any]) -> dict[str, Any]:
    choices = {}
    for key, allowed in CHOICES.items():
        choices[key] = str(given.get(key, allowed[0]))
        if choices[key] not in allowed:
            raise unknown(key, choices[key], allowed)
    return choices


def _precision(
    given: object, choices: Mapping[str, str], policy: Policy, draft: str | None
) -> str | None:
    """Check the ladder and what it does not go with."""
    if given is None:
        return None
    ladder = parse_ladder(given)
    if choices["scoring"] == "scan" and policy.miss.algorithm.uses_ladder:
        raise ValueError(
            f"scoring='scan' does not go with miss={policy.miss.name!r}: tokens of one text would "
            "run one expert at different precisions, but are executed together. Allowed with "
            "scan: one precision."
        )
    if draft is not None and draft.startswith("self:"):
        raise ValueError(
            f"draft={draft!r} is made of the target's own weights, which precision={given!r} does "
            "not keep. Allowed with it: another draft, as a folder or a hub id."
        )
    return ":".join(ladder)


def _read_draft(given: Mapping[str, Any], policy: Policy, speculative: bool) -> dict[str, Any]:
    prefetch = policy.prefetch.algorithm
    needs_draft = getattr(prefetch, "needs_draft", False)
    if not speculative:
        for key in ("draft", "draft_tokens") if not needs_draft else ("draft_tokens",):
            if key in given:
                raise ValueError(
                    f"{key}={given[key]!r} is for --model moecache-spec; --model moecache decodes "
                    "without a draft (with prefetch=draft one reads along, and drafts no tokens)."
                )
        if not needs_draft:
            return {}
    draft = str(given.get("draft", DEFAULT_DRAFT))
    tokens = given.get("draft_tokens", DEFAULT_DRAFT_TOKENS)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= MOST_DRAFTED:
        raise ValueError(
            f"draft_tokens={shown(tokens)} must be a whole number, 1 or more and at most "
            f"{MOST_DRAFTED}; use --model moecache to decode without a draft."
        )
    if needs_draft and draft == PROMPT_LOOKUP:
        raise ValueError(
            f"draft={PROMPT_LOOKUP!r} has no attention outputs to predict experts from, as "
            f"prefetch={policy.prefetch.name!r} does. Allowed with it: a folder, a hub id or "
            "self:int4; or another prefetch."
        )
    return {"draft": draft, "draft_tokens": tokens} if speculative else {"draft": draft}


def _trace_folder(given: Mapping[str, Any]) -> str | None:
    folder = given.get("trace")
    if folder is None:
        if "trace_keep" in given:
            raise ValueError(
                f"trace_keep={given['trace_keep']!r} says what a trace keeps, and none is recorded"
                ". Allowed: trace=DIR with it, or neither."
            )
        return None
    if not str(folder).strip():
        raise ValueError(f"trace={folder!r} names no folder. Allowed: one; or leave trace= out.")
    prepare_folder(str(folder))
    return str(folder)
