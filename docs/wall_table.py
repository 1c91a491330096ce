"""What runs with `clock=wall`: every value of every axis and key, tried with a run's own checks.

A cell is empty only if a check refuses the value; the check's own message is next to it, so the
table cannot contradict a run. A page of the site, generated at each build.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from lm_eval_moecache.algorithms.policy import Policy, load_policy, policy_names
from lm_eval_moecache.algorithms.registry import AXES, algorithm_names, find_algorithm
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.model.precision.ladder import codec_names
from lm_eval_moecache.records.files import traces_dir
from lm_eval_moecache.records.schemas.keys import CHOICES

LADDER = "int8:int4:int2"
_FOLDERS = ("trace", "store_dir", "encoded_dir", "warm")
_PLAIN: Mapping[str, Sequence[Any]] = {
    "phases": ("all", "decode"),
    "bandwidth": ("5GB/s",),
    "seed": (1,),
    "hardware": ("h200",),
    "emulate": ("olmoe-1b-7b",),
    "draft": ("self:int4", "tiny", "prompt_lookup"),
    "draft_tokens": (4,),
    "reads_per_expert": (2,),
    "streams": (2,),
    "runtime": ("llama.cpp",),
}
_COMPANIONS: Mapping[tuple[str, Any], Mapping[str, Any]] = {
    ("phases", "decode"): {"miss": "drop"},
    ("seed", 1): {"eviction": "random"},
    ("draft_tokens", 4): {"draft": "tiny"},
}
"""Settings that accompany a value without an effect of its own."""
_HEAD = """# What runs on the wall clock

Every axis and every key of `--model_args` with `clock=wall`, made from the checks that a run makes
before anything is loaded.
`runs` may need what is given next to it; an empty cell has the reason that a run would be given.
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One value: the settings it was tried with, and the reason if it is refused."""

    key: str
    value: str
    companions: str
    reason: str


def wall_table() -> list[Cell]:
    """Try every value. Loads nothing; makes a folder for traces and removes it."""
    with tempfile.TemporaryDirectory() as folder:
        return [_cell(key, value, setting) for key, value, setting in _values(folder)]


def settings_that_run(folder: str) -> list[tuple[str, dict[str, Any], bool]]:
    """Return every value that runs: its name, its setting, and whether it needs `moecache-spec`.

    Settings that name a folder, or a file in one, use `folder`.
    """
    return [
        (f"{key}={value}", setting, _is_speculative(setting))
        for key, value, setting in _values(folder)
        if _refusal({"clock": "wall", **setting}) is None
    ]


def _values(folder: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield every key and value with the setting in which it is tried."""
    for name in policy_names():
        yield "policy", name, _with_ladder({"policy": name})
    for axis in AXES:
        for name in algorithm_names(axis):
            yield axis, name, _composed(axis, name)
    for level in codec_names():
        yield "precision", level, {"precision": level}
    yield "precision", LADDER, {"precision": LADDER, "miss": "fetch_priority"}
    chosen = {key: values for key, values in CHOICES.items() if key != "clock"}
    for key, values in {**chosen, **_PLAIN}.items():
        for value in values:
            extra = {"trace": folder} if key == "trace_keep" else _COMPANIONS.get((key, value), {})
            yield key, str(value), {key: value, **extra}
    yield "store_dir", "a folder", {"store_dir": folder, "store": "disk"}
    yield "encoded_dir", "a folder", {"encoded_dir": folder, "precision": "int8"}
    yield "trace", "a folder", {"trace": folder}
    yield "warm", "a trace or a profile", {"warm": str(traces_dir() / "olmoe-1b-7b.parquet")}


def _composed(axis: str, name: str) -> dict[str, Any]:
    """Return a setting with the algorithm that runs under the virtual clock."""
    partners = {o: allowed[0] for o, allowed in find_algorithm(axis, name).pairs_with.items()}
    settings = [_with_ladder({axis: name}), _with_ladder({axis: name, **partners})]
    for setting in settings:
        if _refusal(setting) is None:
            return setting
    for policy in policy_names():
        if getattr(_shipped(policy), axis).name == name:
            return _with_ladder({"policy": policy})
    return settings[0]


_shipped = cache(load_policy)


def _with_ladder(given: dict[str, Any]) -> dict[str, Any]:
    """Add a precision ladder if the policy's miss algorithm uses one."""
    policy = _policy_of(given)
    uses_ladder = policy is not None and policy.miss.algorithm.uses_ladder
    return {**given, "precision": LADDER} if uses_ladder else given


def _cell(key: str, value: str, given: Mapping[str, Any]) -> Cell:
    companions = {k: v for k, v in given.items() if k != key and k not in _FOLDERS}
    words = [f"{k}={v}" for k, v in companions.items()]
    if _is_speculative(given):
        words.insert(0, "--model moecache-spec")
    reason = _refusal({"clock": "wall", **given}) or ""
    for name in _FOLDERS:
        # The folder is specific to this machine.
        reason = reason.replace(str(given.get(name)), value)
    return Cell(key, value, ", ".join(words), reason)


def _policy_of(given: Mapping[str, Any]) -> Policy | None:
    axes = {axis: given[axis] for axis in AXES if axis in given}
    try:
        return load_policy(given.get("policy", "on_demand"), axes)
    except ValueError:
        return None


def _is_speculative(given: Mapping[str, Any]) -> bool:
    policy = _policy_of(given)
    needs_draft = policy is not None and policy.prefetch.algorithm.needs_draft
    return "draft" in given or bool(needs_draft)


def _refusal(given: Mapping[str, Any]) -> str | None:
    """Return why a setting is refused, or None if it would run."""
    try:
        read_config({"policy": "on_demand", **given}, _is_speculative(given))
    except ValueError as error:
        return str(error)
    return None


def page(cells: Sequence[Cell]) -> str:
    """Return the page in Markdown."""
    lines = [_HEAD, "| key | value | with `clock=wall` | together with, or why not |"]
    lines.append("|---|---|---|---|")
    for cell in cells:
        state = "" if cell.reason else "runs"
        companions = cell.reason or (f"`{cell.companions}`" if cell.companions else "")
        lines.append(f"| {cell.key} | `{cell.value}` | {state} | {companions} |")
    return "\n".join(lines) + "\n"
