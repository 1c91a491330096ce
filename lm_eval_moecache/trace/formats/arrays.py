"""Reads traces that are arrays of expert ids: numpy's files, and JSON that holds arrays."""

from __future__ import annotations

import logging
import re
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.records.files import parse_json, read_text
from lm_eval_moecache.trace.formats.base import (
    MOST_EXPERT,
    Options,
    Rows,
    check_no_bool,
    checked_ids,
    whole,
)
from lm_eval_moecache.trace.trace import Trace

logger = logging.getLogger(__name__)
ROUTED = "routed_experts"
ATLAS = re.compile(rb'"schema"\s*:\s*"[^"]*routing-trace-export/v(\d+)"')
MOST_BYTES = 1 << 32
"""Largest size of an unpacked array: a small file may expand to any number of zeros."""
UNREADABLE = (
    *(ValueError, OSError, EOFError, zlib.error),
    *(zipfile.BadZipFile, NotImplementedError, tokenize.TokenError),  # versions, broken headers
)
"""Exceptions that numpy raises for damaged arrays."""
_ARRAYS = (ROUTED, "num_experts", "num_prompt_tokens", "weights")


def read_array(path: Path, options: Options) -> Trace:
    """Read one request of a `.npy` or `.npz`: its first `num_prompt_tokens` are one prefill."""
    rows, arrays = Rows(path), _arrays(path)
    if ROUTED not in arrays:
        raise ValueError(
            f"{rows.what} has no array {ROUTED!r} [tokens, layers, top_k]; it holds "
            f"{', '.join(map(repr, arrays)) or 'none'}."
        )
    if unknown := sorted(set(arrays) - set(_ARRAYS)):
        logger.warning("%s: left out its arrays %s.", rows.what, ", ".join(unknown))
    routed, weights = arrays[ROUTED], arrays.get("weights")
    if weights is not None and weights.shape != routed.shape:
        raise ValueError(
            f"{rows.what}: weights has the shape {list(weights.shape)}, {ROUTED} has "
            f"{list(routed.shape)}."
        )
    kept = checked_ids(f"{rows.what}: {ROUTED}", routed, options)

    def count(key: str, **bounds: int) -> int | None:
        array = arrays.get(key)
        value = None if array is None else array.item() if array.size == 1 else array.tolist()
        return whole(rows.what, value, key, **bounds)

    prompt = count("num_prompt_tokens", most=len(routed)) or 0
    kept_weights = None if weights is None else weights[..., : kept.shape[-1]]
    rows.add_text(kept, prompt, weights=kept_weights)
    return rows.trace(options, num_experts=count("num_experts", least=1, most=MOST_EXPERT + 1))


def _arrays(path: Path) -> dict[str, Any]:
    """Return the arrays in _ARRAYS by name; any others are empty placeholders."""
    try:
        if path.suffix == ".npy":
            return {ROUTED: np.load(path, allow_pickle=False, mmap_mode="r")}
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.file_size > MOST_BYTES:
                    raise ValueError(f"{info.filename} has {info.file_size} bytes unpacked")
        with np.load(path, allow_pickle=False) as stored:
            return {n: stored[n] if n in _ARRAYS else np.zeros(0) for n in stored.files}
    except UNREADABLE as error:
        raise ValueError(f"trace {path.name} is not a readable {path.suffix}: {error}.") from None


def read_atlas(path: Path, options: Options) -> Trace:
    """Read GLM-5.2's routing atlas (`routing-trace-export/v2`): ids by layer, rows by prompt.

    A prompt's prefill rows are one pass, each of its decode rows another. Its scores choose experts
    (sigmoid and bias) and do not weigh them: they are not read.
    """
    rows = Rows(path)
    text = read_text(path, rows.what, 1 << 31)
    version = ATLAS.search(text[: 1 << 20].encode())
    if version is None or version[1] != b"2":
        raise ValueError(f"{rows.what}: its schema must be routing-trace-export/v2.")
    atlas = parse_json(text, rows.what)
    try:
        prompts = atlas["conditional"]["prompts"]
        traced = sorted(atlas["layer_map"]["traced_layers"], key=lambda of: of["moe_order"])
        layers = [atlas["layers"][str(of["abs_layer"])]["executed_topk"] for of in traced]
        num_experts = whole(rows.what, atlas["routing"]["n_expert_per_layer"], "n_expert_per_layer")
        spans = [(of["start_row"], of["prefill_rows"], of["end_row"]) for of in prompts]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{rows.what} lacks {error}.") from None
    what = f"{rows.what}: executed_topk"
    check_no_bool(what, layers)
    try:
        stacked = np.stack([np.asarray(layer) for layer in layers], axis=1)
    except UNREADABLE as error:
        raise ValueError(f"{what}: {error}.") from None
    routed = checked_ids(what, stacked, options)
    for request, span in enumerate(spans):
        start, prefill, end = (whole(rows.what, n, f"prompt {request}") or 0 for n in span)
        if not start <= start + prefill <= end <= len(routed):
            raise ValueError(
                f"{rows.what}: prompt {request} has rows {start} to {end}, {prefill} of them "
                f"prefill, of {len(routed)}."
            )
        rows.add_text(routed[start:end], prefill, request=request)
    return rows.trace(options, model=str(atlas.get("model") or path.stem), num_experts=num_experts)
