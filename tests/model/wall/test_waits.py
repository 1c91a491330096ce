"""The host waits for a device once a layer: the waits for scripted streams are counted.

Those in transformers' own code, for the masks of a batch or an empty cache, are not ours.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lm_eval_moecache.model import device
from lm_eval_moecache.model.hook import Row, WrappedModel
from tests.model.wall.scripted import NAME, Device, scripted
from tests.model.wrapped import loader_of, wrap_virtual, wrap_wall
from tests.models import random_model, sizes_of

# Its routers do not sort their choices.
FAMILY = "deepseek_v3"
AHEAD = {"prefetch": "next_gate"}
WAYS: list[dict[str, str]] = [
    {},
    {"policy": "specmd"},
    {"policy": "mixture_cache"},
    {"miss": "drop"},
    {"miss": "substitute_score"},
    {"miss": "substitute_random", **AHEAD},
    {"miss": "fetch_priority", "precision": "hqq8:hqq4:hqq2"},
    {"miss": "host", "miss.rule": "always", **AHEAD},
]
"""What differs in what the host reads of a layer, and tells the device."""


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each file of this package has waited for the device's stream."""
    counts, wait = Counter[str](), Device.wait

    def noted(device: Device) -> None:
        frames = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
        file = next(f for f in frames if "/torch/" not in f and "/tests/" not in f)
        counts[file] += "lm_eval_moecache" in file
        wait(device)

    monkeypatch.setattr(Device, "wait", noted)
    with scripted("copies_late"):
        yield counts


def check(wrapped: WrappedModel, waits: Counter[str], most: int) -> None:
    """Count the waits of a prefill and a step, of one text and of a batch with padding."""
    text = torch.randint(2, 300, (2, 9), generator=torch.Generator().manual_seed(1)).to(NAME)
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, :3] = 0
    layers, past = len(wrapped.layers), None
    for rows, count in ((1, 9), (1, 9), (1, 1), (2, 9), (2, 1)):
        mask_args = {"attention_mask": mask[:, : 10 - (count == 9)].to(NAME)} if rows == 2 else {}
        cache_args = {"past_key_values": past} if count == 1 else {}
        waits.clear()
        with torch.no_grad():
            output = wrapped.model(text[:rows, -count:], use_cache=True, **cache_args, **mask_args)
        # A pass looks up a batch's padding once; the first pass, which probes the gates, is exempt.
        waited = waits.total() - (rows == 2)
        assert past is None or layers <= waited <= most * layers, waits
        past = output.past_key_values
    wrapped.unwrap()


@pytest.mark.parametrize("changes", WAYS, ids=lambda way: "-".join(way.values()) or "on_demand")
def test_every_way_waits_once_a_layer(changes: dict[str, str], waits: Counter[str]) -> None:
    model = random_model(FAMILY, **sizes_of(FAMILY))
    loader = loader_of(model, NAME, changes.get("precision"))
    setting = {"policy": "on_demand", **changes}
    policy = setting.pop("policy")
    for capacity in ("100%", "25%"):
        wrapped = wrap_wall(model, policy, capacity, loader=loader, **setting)
        # The host needs the activations as well.
        check(wrapped, waits, 1 + (changes.get("miss") == "host"))


@pytest.mark.parametrize("policy", ["mixture_cache", "buddy_random", "importance_scheduling"])
def test_samples_of_a_batch_cross_once_a_layer_each_way(
    policy: str, waits: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows choose for themselves, and whatever their rule tells the device."""
    sent, copy = list[int](), device.copy_to_device

    def counted(*given: Any) -> torch.Tensor:
        sent.append(1)
        return copy(*given)

    monkeypatch.setattr(device, "copy_to_device", counted)
    wrapped = wrap_virtual(random_model(FAMILY, **sizes_of(FAMILY)).to(NAME), policy, "25%")
    layers, past = len(wrapped.layers), None
    text = torch.randint(2, 300, (5, 9), generator=torch.Generator().manual_seed(1)).to(NAME)
    wrapped.rows = [Row(wrapped.engine.fresh()) for _ in text]
    for count in (9, 1, 1):
        waits.clear(), sent.clear()
        with torch.no_grad():
            output = wrapped.model(text[:, -count:], use_cache=True, past_key_values=past)
        past = output.past_key_values
    assert waits.total() == layers, waits
    assert 0 < len(sent) <= layers
