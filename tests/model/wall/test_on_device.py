"""The wall clock on a device: the same bits as transformers' kernels there.

On this machine's accelerator, and skipped where there is none; `MOECACHE_TEST_DEVICE` names another
one: `xpu`, `cuda:1`, an out-of-tree backend, `scripted` (`scripted.py`), or `cpu`, which runs the
same tests with the store of a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_eval_moecache.model.device import accelerator, devices
from lm_eval_moecache.model.precision.ladder import ALIASES, codec_names
from lm_eval_moecache.model.wall.pools import DeviceMover
from tests.model.wall.on_device import (
    SIZES,
    assert_exact,
    assert_levels_exact,
    assert_plain,
    logits,
    plain_logits,
    wrap,
    wrap_files,
)
from tests.model.wall.scripted import NAME, scripted
from tests.model.wrapped import late, replaced, wrap_virtual
from tests.models import random_model, sizes_of

DEVICE = os.environ.get("MOECACHE_TEST_DEVICE") or accelerator() or ""
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE, reason="needs an accelerator, or MOECACHE_TEST_DEVICE"),
]
OFTEN = 3 if DEVICE == NAME else 20


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    if DEVICE == NAME:
        with scripted("drawn"):
            yield
        return
    # A mistyped name must not pass as a tested device.
    assert str(torch.device(DEVICE)) in devices(), f"{DEVICE!r} is not one of {devices()}"
    yield


@pytest.fixture(autouse=True)
def late_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMover, "begin", late(DeviceMover.begin, longest_s=0.001))


@pytest.mark.parametrize("capacity", ["100%", "25%", "4experts", "1/layer", "2/layer"])
@pytest.mark.parametrize("policy", ["on_demand", "specmd", "mixtral_offloading"])
def test_logits_are_identical_again_and_again(policy: str, capacity: str) -> None:
    assert_plain(DEVICE, policy, capacity, OFTEN)


@pytest.mark.parametrize("clock", ["wall", "virtual"])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "gpt_oss"])
def test_lossless_policies_answer_as_plain_in_batches(family: str, rows: int, clock: str) -> None:
    """Three kinds of expert layers: plain, with a shared expert, with biases and transposed."""

    def model() -> Any:
        drawn = random_model(family, **sizes_of(family))
        drawn.set_experts_implementation("grouped_mm")
        return drawn

    plain = model().to(DEVICE)
    expected = logits(plain, "batched_mm", rows=rows)
    for policy in ("on_demand", "specmd", "mixtral_offloading", "moe_infinity"):
        wrapped = (
            wrap(model(), DEVICE, policy, "25%")
            if clock == "wall"
            else wrap_virtual(model().to(DEVICE), policy, "25%")
        )
        outputs = logits(wrapped.model, rows=rows)
        assert sum(record.misses for record in wrapped.engine.ledger.passes) > 0
        wrapped.engine.check_integrity()
        wrapped.unwrap()
        same = [torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)]
        assert all(same), f"{policy}: {same}"


@pytest.mark.parametrize("name", [n for n in codec_names() if n not in ALIASES])
def test_every_codec_computes_what_its_decoded_weights_say(name: str) -> None:
    plain = replaced(random_model("olmoe", **SIZES), name).to(DEVICE)
    expected = logits(plain, decode_kernel="batched_mm")
    wrapped = wrap(random_model("olmoe", **SIZES), DEVICE, "on_demand", "4experts", precision=name)
    assert_exact(wrapped, expected, 3)


@pytest.mark.parametrize("capacity", ["30%", "2/layer"])
@pytest.mark.parametrize("prefetch", ["none", "next_gate"])
def test_levels_are_what_a_plain_model_computes_at_them(prefetch: str, capacity: str) -> None:
    assert_levels_exact(DEVICE, "int8:int4:int2", capacity, OFTEN, prefetch=prefetch)


def test_more_slots_than_one_grouped_product_takes() -> None:
    """16 layers of 128 experts: 60% are 1,228 slots, two windows of a prefill."""
    sizes = {**SIZES, "num_hidden_layers": 16, "num_experts": 128}
    assert_plain(DEVICE, "on_demand", "60%", 2, sizes=sizes)


@pytest.mark.parametrize("capacity", ["25%", "2/layer"])
def test_experts_are_staged_from_files(tmp_path: Path, capacity: str) -> None:
    """Files are read into pinned buffers, which take turns."""
    expected = plain_logits(DEVICE)
    wrapped = wrap_files(random_model("olmoe", **SIZES), DEVICE, tmp_path, "specmd", capacity)
    assert_exact(wrapped, expected, 5)


def test_dropping_ends_with_finite_answers() -> None:
    wrapped = wrap(random_model("olmoe", **SIZES), DEVICE, "on_demand", "30%", miss="drop")
    assert all(output.isfinite().all() for output in logits(wrapped.model))
    wrapped.engine.check_integrity()
    wrapped.unwrap()


def test_the_host_computes_what_the_device_would_up_to_rounding() -> None:
    expected = plain_logits(DEVICE)
    changes = {"miss": "host", "miss.rule": "always"}
    wrapped = wrap(random_model("olmoe", **SIZES), DEVICE, "on_demand", "30%", **changes)
    outputs = logits(wrapped.model)
    wrapped.unwrap()
    assert torch.allclose(outputs[0].float(), expected[0].float(), atol=0.05, rtol=0.05)
