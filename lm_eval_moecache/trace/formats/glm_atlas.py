"""GLM's routing atlas."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from lm_eval_moecache.records.files import parse_json, read_text
from lm_eval_moecache.trace.formats.base import (
    UNREADABLE,
    Options,
    Pass,
    TraceFormat,
    build,
    check_no_bool,
    check_routed,
    generation,
    whole,
)
from lm_eval_moecache.trace.trace import Trace

SCHEMA = re.compile(rb'"schema"\s*:\s*"[^"]*routing-trace-export/v(\d+)"')


class GLMAtlas(TraceFormat):
    """GLM-5.2's routing atlas (`routing-trace-export/v2`): ids by layer, rows by prompt.

    A prompt's prefill rows are one pass, each of its decode rows another. Its scores choose experts
    (sigmoid and bias) and do not weigh them: they are not read.
    """

    suffixes = (".json",)
    holds = "phases, requests, the number of experts"

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        return SCHEMA.search(head) is not None

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        what = f"trace {path.name}"
        text = read_text(path, what, 1 << 31)
        version = SCHEMA.search(text[: 1 << 20].encode())
        if version is None or version[1] != b"2":
            raise ValueError(f"{what}: its schema must be routing-trace-export/v2.")
        atlas = parse_json(text, what)
        try:
            prompts = atlas["conditional"]["prompts"]
            traced = sorted(atlas["layer_map"]["traced_layers"], key=lambda of: of["moe_order"])
            layers = [atlas["layers"][str(of["abs_layer"])]["executed_topk"] for of in traced]
            num_experts = whole(what, atlas["routing"]["n_expert_per_layer"], "n_expert_per_layer")
            spans = [(of["start_row"], of["prefill_rows"], of["end_row"]) for of in prompts]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{what} lacks {error}.") from None
        check_no_bool(f"{what}: executed_topk", layers)
        try:
            routed = np.stack([np.asarray(layer) for layer in layers], axis=1)
        except UNREADABLE as error:
            raise ValueError(f"{what}: executed_topk: {error}.") from None
        check_routed(f"{what}: executed_topk", routed)
        passes: list[Pass] = []
        for request, span in enumerate(spans):
            start, prefill, end = (whole(what, row, f"prompt {request}") or 0 for row in span)
            if not start <= start + prefill <= end <= len(routed):
                raise ValueError(
                    f"{what}: prompt {request} has rows {start} to {end}, {prefill} of them "
                    f"prefill, of {len(routed)}."
                )
            prompt_end = start + prefill
            passes += generation(routed[start:prompt_end], routed[prompt_end:end], request)
        model = str(atlas.get("model") or path.stem)
        return build(path.name, model, passes, options, num_experts=num_experts)
