"""How large traces are, by what they keep, for a model of 16 layers of 64 experts, 8 a token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.recording import detail_of
from lm_eval_moecache.records.arrays import softmax
from lm_eval_moecache.records.event import DECODE, Event, unique_in_order
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.ledger import PassRecord, RequestRecord
from lm_eval_moecache.trace.detail import identity
from lm_eval_moecache.trace.header import Header
from lm_eval_moecache.trace.writer import TraceWriter

TOKENS, LAYERS, EXPERTS, TOP_K = 512, 16, 64, 8
GEOMETRY = Geometry(
    model="generated",
    num_layers=LAYERS,
    num_experts=EXPERTS,
    top_k=TOP_K,
    expert_bytes=((12_582_912,),) * LAYERS,
    dense_bytes=(0,) * LAYERS,
)


def write(folder: Path, kept: str) -> Path:
    """Write decode steps whose routing repeats itself like real models'.

    Half of a token's experts are the last one's; the next layer's gate is right about seven of
    eight; weights are rounded to bfloat16, as a router of that dtype gives them.
    """
    config = read_config({"policy": "specmd", "trace": str(folder), "trace_keep": "lossless"})
    choices = {
        "routing": [],
        "sweep": [load_policy("mixtral_offloading").prefetch],
        "lossless": [choice for choice, _ in detail_of(config).onlookers],
    }[kept]
    shadows = {identity(choice, 0, ""): choice.build(GEOMETRY, 0) for choice in choices}
    writer = TraceWriter(folder, kept, Header(geometry=GEOMETRY, seed=0, proposals=tuple(shadows)))
    rng = np.random.default_rng(0)
    request = RequestRecord(0, "generated", "generate_until", 0)
    lasting = rng.normal(size=(LAYERS, EXPERTS))
    for token in range(TOKENS):
        lasting = 0.85 * lasting + 0.53 * rng.normal(size=lasting.shape)
        logits = (1.5 * lasting).astype(np.float16).astype(np.float32)[:, None]
        asked = (logits + 0.3 * rng.normal(size=logits.shape)).astype(np.float32)
        writer.begin_pass(token, DECODE, np.zeros(1, dtype=int), np.array([token]))
        for layer in range(LAYERS):
            experts = np.argsort(-logits[layer], axis=-1, kind="stable")[:, :TOP_K]
            ahead = {layer + 1: asked[layer + 1]} if layer + 1 < LAYERS else {}
            keys = unique_in_order(layer, EXPERTS, experts)
            event = Event(token, layer, DECODE, 1, keys, experts, predicted=ahead)
            weights = np.take_along_axis(softmax(logits[layer]), experts, -1).astype(np.float32)
            rounded = (weights.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
            proposed = [list(shadow.propose(event)) for shadow in shadows.values()]
            kept_weights = rounded if kept == "lossless" else None
            writer.add(layer, experts, kept_weights, None, [], proposed)
        request.passes.append(PassRecord(token, DECODE, 1, 0.0))
    request.output_tokens = TOKENS
    path = writer.close([request])
    assert path is not None
    return path


@pytest.mark.parametrize(
    ("kept", "most_kb"), [("routing", 0.15), ("sweep", 0.3), ("lossless", 0.7)]
)
def test_bytes_a_token(tmp_path: Path, kept: str, most_kb: float) -> None:
    assert write(tmp_path, kept).stat().st_size / TOKENS / 1000 < most_kb
