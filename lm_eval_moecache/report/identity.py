"""What is part of a run's identity: all that changes figures and is not what runs are compared in.

Two runs are ranked, joined or drawn as one line only where their identities agree: the same
documents, batch size, prompts, seeds and device. What a comparison is about - the policy, its
capacity, where experts lie, the draft - is no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.report.results import Run

_COMPARED = {
    *("policy", "phases", "capacity", "precision", "link", "warm", "draft", "draft_tokens"),
    *("store", "store_dir", "encoded_dir", "trace", "trace_keep", "label", *AXES),
}
"""Model arguments that runs are compared in (and axes' own: `eviction.NAME`)."""
RATES = (
    *("link_bytes_per_s", "link_latency_s", "peak_flops", "memory_bytes_per_s"),
    *("kernel_overhead_s", "layer_overhead_s", "host_flops", "host_memory_bytes_per_s"),
)
_SEEDS = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
_MODEL = ("model_revision", "model_sha", "model_num_parameters", "model_dtype")
_OPTIONS = ("limit", "fewshot_as_multiturn")
KEYS = (
    *("pretrained", *_MODEL, "tasks", "task_versions", "num_fewshot", "batch_size"),
    *("chat_template", "system_instruction", "gen_kwargs", *_OPTIONS, *_SEEDS, "seed", "clock"),
    *("scoring", "cache_reset", "hardware", "emulate", *RATES, "device"),
)
"""Every key but those that only a run's own model arguments have (`dtype`, `max_length` ...)."""
Identity = Mapping[str, str]


def identity(run: Run, tasks: Sequence[str] | None = None) -> dict[str, str]:
    """Return what changes a run's figures, as texts by name; what a record leaves out is missing.

    `tasks` are those whose versions count; by default all, and then which they are counts, too.
    """
    config, report, given = run.facts.get("config", {}), run.moecache, run.model_args
    of_tasks = run.tasks if tasks is None else tasks
    found: dict[str, Any] = {
        "pretrained": given.get("pretrained", given.get("trace", "tiny")),
        **{key: config.get(key) for key in _MODEL},
        "tasks": "+".join(sorted(run.tasks)) if tasks is None else None,
        "task_versions": _by_task(run.facts.get("versions"), of_tasks),
        "num_fewshot": _by_task(run.facts.get("n-shot"), of_tasks),
        "batch_size": given.get("batch_size") or config.get("batch_size") or 1,
        "chat_template": _told(run, "chat_template", "apply_chat_template"),
        "system_instruction": _told(run, "system_instruction", "system_instruction"),
        "gen_kwargs": run.options.get("gen_kwargs") or config.get("gen_kwargs") or None,
        **{key: run.options.get(key, config.get(key)) for key in _OPTIONS},
        **{key: config.get(key) for key in _SEEDS},
        "seed": report.get("seed"),
        "clock": report["clock"],
        "scoring": report.get("scoring"),
        "cache_reset": report.get("cache_reset"),
        "hardware": report["hardware"]["name"],
        "emulate": (report.get("emulate") or {}).get("name"),
        **{key: report["hardware"].get(key) or None for key in RATES},
    }
    if report["clock"] == "wall":
        found["device"] = given.get("device", config.get("device"))
    others = {k: v for k, v in given.items() if k.partition(".")[0] not in _COMPARED}
    found |= {k: v for k, v in others.items() if k not in (*found, "bandwidth", "device")}
    return {key: _text(value) for key, value in found.items() if value not in (None, "")}


def _by_task(values: Any, tasks: Sequence[str]) -> str | None:
    """Return one value for all tasks, or `task=value` for each."""
    told = {task: _text(values[task]) for task in tasks if task in (values or {})}
    if len(set(told.values())) == 1:
        return next(iter(told.values()))
    return ", ".join(f"{task}={value}" for task, value in sorted(told.items())) or None


def _told(run: Run, name: str, option: str) -> str:
    """Return by which prompt text a run was asked: lm-eval's files keep a digest of it."""
    digest, given = run.facts.get(f"{name}_sha"), run.options.get(option)
    return str(digest)[:12] if digest else str(given) if given else "none"


def _text(value: Any) -> str:
    """Return `40` for 40 and 40.0, and the text of anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def differing(one: Identity, other: Identity) -> dict[str, tuple[str, str]]:
    """Return the keys in which two identities differ, with both values."""
    names = dict.fromkeys([*one, *other])
    pairs = {name: (one.get(name, "none"), other.get(name, "none")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def varying(runs: Sequence[Run]) -> list[str]:
    """Return the keys that tell these runs' identities apart, each only where it tells more."""
    identities = [identity(run) for run in runs]
    kept: list[str] = []
    parts = 1
    for name in dict.fromkeys(key for each in identities for key in each):
        places = {tuple(each.get(n) for n in (*kept, name)) for each in identities}
        if len(places) > parts:
            kept, parts = [*kept, name], len(places)
    return kept


def groups(runs: Sequence[Run]) -> list[list[int]]:
    """Return the places of the runs of each identity."""
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for place, run in enumerate(runs):
        found.setdefault(tuple(sorted(identity(run).items())), []).append(place)
    return list(found.values())
