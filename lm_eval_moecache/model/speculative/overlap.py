"""What the cutoff solver has to know of this machine: measured before the first request."""

from __future__ import annotations

import os
import statistics
import time

import torch

from lm_eval_moecache.engine.draft_stage import DraftStage
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.model.speculative.draft_model import DraftModel

FORWARDS = 5


def measure_overlap(draft: DraftModel, engine: Engine, stage: DraftStage) -> None:
    """Solve for the cutoff layer by measured times (SP-MoE section 3.2 profiles them offline).

    One token through the draft, and the critical experts of one layer over the real link into
    the empty cache; other layers' loads go by their bytes.
    """
    prefetch = engine.algorithms.prefetch.draft_stage
    if prefetch is None:
        return
    forward_s = _forward_s(draft)
    load_s = engine.time_load(prefetch.critical)
    first = engine.geometry.expert_bytes[0][0]
    stage.solve(
        engine.geometry,
        engine.setting.capacity.bytes_by_partition,
        forward_s / draft.cost.geometry.num_layers,
        [load_s * levels[0] / first for levels in engine.geometry.expert_bytes],
        memory_bytes(draft.model.device),
    )


def _forward_s(draft: DraftModel) -> float:
    """Return the median seconds of one token through the draft, its head included."""
    model, seconds = draft.model, []
    token = torch.ones((1, 1), dtype=torch.int64, device=model.device)
    for _ in range(1 + FORWARDS):
        start_s = time.perf_counter()
        with torch.no_grad():
            model(token, use_cache=True)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[1:])


def memory_bytes(device: torch.device) -> float:
    """Return the memory of a device, or of the machine where that is the device."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
