"""A model with experts stored at low precision computes with exactly their decoded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.model.moe_layers import find_moe_layers
from lm_eval_moecache.model.precision.codecs import expert_matrices
from lm_eval_moecache.model.precision.ladder import ALIASES, codec_names, codecs_of
from tests.conftest import Checkpoint
from tests.harness import answers, choices
from tests.model.wall.on_device import judged
from tests.model.wall.races import Judge
from tests.model.wrapped import (
    WRAP,
    assert_same,
    logits_of,
    replaced,
    store_experts,
    wrap_virtual,
)
from tests.models import random_model, sizes_of

WIDE = sizes_of("olmoe")


@pytest.mark.parametrize("clock", ["virtual", "wall"])
@pytest.mark.parametrize("name", [n for n in codec_names() if n not in ALIASES])
def test_outputs_are_those_of_a_plain_model_with_decoded_weights(name: str, clock: str) -> None:
    model = random_model("olmoe", **WIDE)
    expected, plain = logits_of(replaced(model, name)), logits_of(model)
    for capacity in ("100%", "3experts"):
        logits = logits_of(model, WRAP[clock](model, "on_demand", capacity, precision=name))
        assert_same(expected, logits, f"{name} at {capacity}")
        is_lossless = torch.equal(logits[0], plain[0])
        assert is_lossless == (name in ("bf16", "fp16", "fp32"))


@pytest.mark.parametrize("clock", ["virtual", "wall"])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "deepseek_v3"])
def test_other_families_compute_from_decoded_weights_too(family: str, clock: str) -> None:
    """GPT-OSS has its matrices transposed, and biases that no codec touches."""
    model = random_model(family, **sizes_of(family))
    expected = logits_of(replaced(model, "int4"))
    assert_same(
        expected, logits_of(model, WRAP[clock](model, "specmd", "4experts", precision="int4"))
    )


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_every_kernel_runs_decoded_experts(implementation: str) -> None:
    model = random_model("olmoe", **WIDE)
    model.set_experts_implementation(implementation)
    expected = logits_of(replaced(model, "int8"))
    logits = logits_of(model, wrap_virtual(model, "on_demand", "4experts", precision="int8"))
    assert_same(expected, logits, padding=True)


@pytest.mark.parametrize("miss", ["fetch_lowest", "fetch_priority", "cascade", "drop_cascade"])
def test_each_expert_runs_at_the_level_at_which_the_cache_holds_it(miss: str) -> None:
    model, ladder = random_model("olmoe", **WIDE), "int8:int4:int2"
    judge = Judge(model)
    changes = {"precision": ladder, "miss": miss, "prefetch": "next_gate"}
    wrapped = wrap_virtual(model, "on_demand", "30%", **changes)
    assert judged(judge, wrapped, ladder) >= ({0, 2} if miss == "fetch_lowest" else {0, 1, 2})
    passes = wrapped.engine.ledger.passes
    assert 0 < sum(p.low_precision for p in passes) < sum(p.executed for p in passes)


# --- through the harness model ----------------------------------------------------------------


def load(folder: Path, **arguments: Any) -> MoECacheLM:
    defaults = {"device": "cpu", "capacity": "30%", "policy": "on_demand", "max_length": 48}
    return MoECacheLM(pretrained=str(folder), **{**defaults, **arguments})


def test_scan_scoring_does_not_see_what_was_generated_before(checkpoint: Checkpoint) -> None:
    lm = load(checkpoint("olmoe"), precision="int8:int4", scoring="scan", capacity="2/layer")
    [expected] = lm.loglikelihood(choices()[:1], True)
    assert answers(lm)[1][0] == expected


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_experts_are_encoded_while_they_are_loaded(checkpoint: Checkpoint, family: str) -> None:
    folder = checkpoint(family)
    lm = load(folder, precision="int8:nf4/g64", miss="fetch_priority")
    plain = load(folder)
    for shapes, stored, layer in zip(
        lm._moe_layers, lm.loader.stored, find_moe_layers(plain.model), strict=True
    ):
        assert all(m.stride() == (0, 0, 0) for m in expert_matrices(shapes.experts).values())
        levels = store_experts(layer.experts, codecs_of(("int8", "nf4")))
        for encoded, expected in zip(stored, levels, strict=True):
            assert encoded.keys() == expected.keys()
            assert all(torch.equal(encoded[name], expected[name]) for name in expected)
    assert lm.report()["model"]["precision"] == ("int8", "nf4/g64")
    assert answers(lm) == answers(load(folder, precision="int8:int4", miss="fetch_priority"))


def test_another_precision_needs_another_load_and_the_same_one_does_not(
    checkpoint: Checkpoint,
) -> None:
    lm = load(checkpoint("olmoe"), precision="int8:int4", miss="fetch_lowest", prefetch="next_gate")
    first = answers(lm), lm.engine.ledger.passes
    same = {"precision": "int8:int4", "policy": "on_demand", "miss": "fetch_lowest"}
    lm.install(read_config({**same, "capacity": "30%", "prefetch": "next_gate"}))
    assert (answers(lm), lm.engine.ledger.passes) == first
    for other in ("int4", None):
        message = f"precision={other!r}: the model was loaded with precision='int8:"
        with pytest.raises(ValueError, match=message):
            lm.install(read_config({"precision": other}))


def test_a_ladder_whose_lower_levels_are_never_used_is_warned_of(checkpoint: Checkpoint) -> None:
    lm = load(checkpoint("olmoe"), precision="int8:int4")
    assert any("every expert at int8" in warning for warning in lm.report()["warnings"])
    one_level = load(checkpoint("olmoe"), precision="int8")
    assert not one_level.report()["warnings"]
    assert answers(lm) == answers(one_level)
    assert lm.engine.ledger.passes == one_level.engine.ledger.passes
