"""On a device a layer waits for the host once: every call that would wait is counted on a CPU.

A device's kernels run here on the CPU. Whatever torch would end in a wait for a device (numbers
that are looked at, masks whose hits are counted, copies that are not `non_blocking`) is noted
where this package calls it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lm_eval_moecache.model import wrap
from lm_eval_moecache.model.device import copy_to_host
from lm_eval_moecache.model.wall import store
from tests.model.wall.models import wrap_wall
from tests.model.wall.races import Family, config_of, ways
from tests.models import random_model

LOOKS = {
    *(Tensor.cpu, Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__),
    *(Tensor.__index__, Tensor.nonzero, torch.nonzero, torch.unique),
}


class Waits(TorchFunctionMode):
    """Notes the calls of this package that would wait; one of `copy_to_host` is counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not self.inside and self._would_wait(function, args, kwargs or {}):
            frame = sys._getframe(1)
            while "/torch/" in frame.f_code.co_filename and frame.f_back is not None:
                frame = frame.f_back
            file = frame.f_code.co_filename
            # What is executed on the host has come there.
            if "lm_eval_moecache" in file and not file.endswith("/model/store.py"):
                self.found.append(f"{file.rpartition('/')[2]}:{frame.f_lineno}")
        return function(*args, **(kwargs or {}))

    def _would_wait(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        if function in LOOKS:
            return True
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return any(isinstance(i, Tensor) and i.dtype == torch.bool for i in index)
        if function is Tensor.to:
            places = [a for a in (*args[1:], kwargs.get("device")) if _is_place(a)]
            return bool(places) and not kwargs.get("non_blocking")
        return False


def _is_place(value: Any) -> bool:
    return isinstance(value, (torch.device, str, Tensor))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    noted = Waits()

    def once(tensors: Sequence[Tensor], valid: Any) -> list[Any]:
        noted.found.append("copy_to_host")
        noted.inside = True
        try:
            return copy_to_host(tensors, valid)
        finally:
            noted.inside = False

    monkeypatch.setattr(wrap, "copy_to_host", once)
    monkeypatch.setattr(store, "copy_to_host", once)
    return noted


CASES: list[tuple[str, dict[str, str], int]] = [
    ("on_demand", {}, 1),
    ("specmd", {}, 1),
    ("on_demand", {"miss": "drop"}, 1),
    ("on_demand", {"miss": "substitute_score"}, 1),
    ("on_demand", {"miss": "substitute_random", "prefetch": "next_gate"}, 1),
    ("mixture_cache", {}, 1),
    ("on_demand", {"precision": "int8:int4:int2", "miss": "fetch_priority"}, 1),
    # The host needs the activations as well.
    ("on_demand", {"miss": "host", "miss.rule": "always"}, 2),
]


@pytest.mark.parametrize("capacity", ["100%", "25%"])
@pytest.mark.parametrize(("policy", "changes", "most"), CASES, ids=str)
def test_a_layer_waits_once(
    policy: str,
    changes: dict[str, str],
    most: int,
    capacity: str,
    waits: Waits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its routers do not sort what they choose.
    model: Any = random_model("deepseek_v3", hidden_size=64, moe_intermediate_size=64)
    wrapped = wrap_wall(model, policy, capacity, changes=changes)
    monkeypatch.setattr(wrapped._store, "on_cpu", False)
    layers = len(wrapped._layers)
    text = torch.randint(2, 300, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, :3] = 0
    for rows in (1, 2):
        masked = [{"attention_mask": mask[:, :n]} if rows == 2 else {} for n in (9, 10)]
        # A gate finds out once what it is.
        past, _ = counted(model, waits, input_ids=text[:rows], **masked[0])
        prefill, step = {"input_ids": text[:rows]}, {"input_ids": text[:rows, -1:]}
        for given in (prefill | masked[0], {**step, "past_key_values": past, **masked[1]}):
            _, waited = counted(model, waits, **given)
            # Where a batch has padding is looked up once a pass.
            assert layers <= waited - (rows == 2) <= most * layers, Counter(waits.found)
    wrapped.unwrap()


def counted(model: Any, waits: Waits, **given: Any) -> tuple[Any, int]:
    """Run one pass; return its cache, and how often it waited."""
    waits.found.clear()
    with waits, torch.no_grad():
        past = model(use_cache=True, **given).past_key_values
    # What foresees a pass reads its tokens, once.
    return past, sum("network.py" not in place for place in waits.found)


@pytest.mark.slow
def test_every_way_waits_once_a_layer(tmp_path: Path, waits: Waits) -> None:
    """Of all that runs on the wall clock: an algorithm that is added is asked here as well.

    Left out are drafts, whose layers are looked at one by one, scans, and what stores encoded
    experts or evicts in other ways, which the device does not see.
    """
    family, seen = Family("deepseek_v3", tmp_path), 0
    ids = torch.arange(2, 9)[None]
    for way in ways():
        given = family.arguments(way)
        config = config_of(way, {"capacity": "40%", **given})
        is_alike = way.name.startswith(("eviction=", "precision="))
        if is_alike or config.draft is not None or config.scoring == "scan" or config.trace:
            continue
        lm = family.lm(way, given)
        lm.install(config)
        store: Any = lm.wrapped._store
        store.on_cpu = False
        most = (1 + (config.policy.miss.name == "host")) * lm.geometry.num_layers
        past, _ = counted(lm.model, waits, input_ids=ids)
        for tokens in ({"input_ids": ids[:, :1], "past_key_values": past}, {"input_ids": ids}):
            _, waited = counted(lm.model, waits, **tokens)
            assert lm.geometry.num_layers <= waited <= most, (way.name, Counter(waits.found))
        seen += 1
    family.close()
    assert seen > 60
