"""The action `moecache profile use`: counts of a trace, or of an engine, become a profile."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.records.command import Report
from lm_eval_moecache.records.files import (
    check_file,
    lines_of,
    opened_gguf,
    parse_json,
    read_head,
    read_text,
)
from lm_eval_moecache.trace.use import UseProfile, bare_name, load_use, write_use


def profile_use(trace: str, *, out: str, model: str | None = None) -> Report:
    """Count how often each expert was used, in a trace or in an engine's counts: warm=PROFILE.

    Args:
        trace: a trace of any format, or counts: .coli_usage, imatrix .gguf, SGLang's .pt, heat of
            GLM's atlas
        out: the profile: NAME.json
        model: model of the profile (default: the trace's)
    """
    if Path(out).suffix != ".json":
        raise ValueError(f"out={out!r} must end in .json.")
    profile = read_counts(trace, "trace") or load_use(trace, key="trace")
    if model is not None:
        profile = replace(profile, model=bare_name(model))
    write_use(Path(out), profile)
    flat = sorted((count for layer in profile.counts for count in layer), reverse=True)
    total = max(sum(flat), 1)
    shares = {f"{p}%": sum(flat[: len(flat) * p // 100]) / total for p in (10, 25, 50)}
    stats = {
        "out": out,
        "model": profile.model,
        "uses": sum(flat),
        "experts": len(flat),
        "never_used": flat.count(0),
        "share_of_the_most_used": shares,
    }
    lines = [
        f"{out}: {stats['uses']} uses of {stats['experts']} experts of "
        f"{profile.model or 'a model that is not named'}, {stats['never_used']} of them never used:"
    ]
    lines += [f"  the {part} most used: {share:.1%}" for part, share in shares.items()]
    return Report(stats, "\n".join(lines))


_MOST = 1 << 34
_LAYERS, _EXPERTS = 10_000, 32_767
_COUNTS = re.compile(r"blk\.(\d+)\.\w+_exps\.weight\.counts")
Counts = Mapping[int, Mapping[int, float]]
"""Layer, as the engine numbers it -> expert -> count."""


def read_counts(file: str, key: str) -> UseProfile | None:
    """Return the profile in a file of counts, or None for any other file.

    Layers are renumbered from 0, as engines count dense ones too. ValueError begins with `key` and
    the value.
    """
    path, label = Path(file), f"{key}={file!r}"
    head = read_head(path, label, 4096, _MOST)
    first_line = head.split(b"\n", 1)[0].decode("utf-8", "replace").strip().replace(" ", "")
    reader: Callable[[Path, str], tuple[Counts, int | None]]
    if head.startswith(b"GGUF"):
        reader = _imatrix
    elif path.suffix == ".pt":
        reader = _recorder
    elif path.suffix == ".json" and b'"heat"' in head:
        reader = _heat
    elif first_line.startswith("layer_id,expert_id,count") or path.name.endswith("coli_usage"):
        reader = _lines
    else:
        return None
    counts, num_experts = reader(path, label)
    if not counts:
        raise ValueError(f"{label} holds no counts of experts.")
    last = max(max(layer, default=0) for layer in counts.values())
    width = last + 1 if num_experts is None else num_experts
    if last >= width or width > _EXPERTS or len(counts) > _LAYERS:
        raise ValueError(f"{label}: expert {last} of {width}, in {len(counts)} layers.")
    rows = [[counts[layer].get(expert, 0) for expert in range(width)] for layer in sorted(counts)]
    uses = np.asarray(rows, dtype=np.float64)
    if not np.isfinite(uses).all() or (uses < 0).any():
        raise ValueError(f"{label}: counts must be 0 or more.")
    rounded = tuple(tuple(round(count) for count in row) for row in uses.tolist())
    return UseProfile(model="", counts=rounded, name=path.name)


def _lines(path: Path, what: str) -> tuple[Counts, int | None]:
    """Read lines of `layer expert count`, or the same with commas and a header.

    A line `-1 layers experts` gives the model's size.
    """
    counts: dict[int, dict[int, float]] = {}
    num_experts = None
    for number, line in enumerate(lines_of(read_text(path, what)), start=1):
        words = line.replace(",", " ").split()
        if not words or line.lstrip().startswith(("#", "layer_id")):
            continue
        try:
            layer, expert, count = int(float(words[0])), int(float(words[1])), float(words[2])
        except (ValueError, OverflowError, IndexError):
            raise ValueError(f"{what}: line {number} is not `layer expert count`.") from None
        if layer < 0:
            num_experts = int(count)
        else:
            counts.setdefault(layer, {})[expert] = count
    return counts, num_experts


def _heat(path: Path, what: str) -> tuple[Counts, int | None]:
    """Read an overlay of GLM's routing atlas: `heat`, each layer's tokens by expert."""
    overlay = parse_json(read_text(path, what, _MOST), what)
    try:
        layers = {int(of["moe_order"]): of["heat"] for of in overlay["layers"]}
        counts = {
            n: {e: float(count) for e, count in enumerate(heat)} for n, heat in layers.items()
        }
        return counts, int(overlay["n_expert_per_layer"])
    except KeyError as error:
        raise ValueError(f"{what} lacks {error}.") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: moe_order and heat must be numbers: {error}.") from None


def _recorder(path: Path, what: str) -> tuple[Counts, int | None]:
    """Read SGLang's dump: `logical_count` [..., layers, experts]."""
    import torch

    check_file(path, what, _MOST)
    try:
        dump: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, zipfile.BadZipFile) as error:
        reason = str(error).split("\n")[0][:200]
        raise ValueError(f"{what} is not a file that torch reads: {reason}.") from None
    table = dump.get("logical_count") if isinstance(dump, dict) else None
    if not isinstance(table, torch.Tensor) or table.dim() < 2:
        raise ValueError(f"{what} has no tensor `logical_count` [..., layers, experts].")
    total = table.double().reshape(-1, *table.shape[-2:]).sum(dim=0).tolist()
    return {n: dict(enumerate(row)) for n, row in enumerate(total)}, table.shape[-1]


def _imatrix(path: Path, what: str) -> tuple[Counts, int | None]:
    """Read a GGUF's tensors `blk.N.ffn_*_exps.weight.counts`: evaluated tokens by expert."""
    counts: dict[int, Mapping[int, float]] = {}
    with opened_gguf(path, what) as reader:
        for tensor in reader.tensors:
            match = _COUNTS.fullmatch(tensor.name)
            if match and tensor.data.dtype == np.float32:
                tokens_by_expert = enumerate(tensor.data.ravel().tolist())
                counts.setdefault(int(match[1]), dict(tokens_by_expert))
    width = {len(layer) for layer in counts.values()}
    return counts, max(width, default=None)
