"""Precisions on the wall clock: copied as stored, decoded where they run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_eval_moecache.engine.wall.executor import WallExecutor
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM
from tests.conftest import Checkpoint
from tests.harness import answers
from tests.model.precision.test_live import WIDE, wrap
from tests.model.wall.models import assert_same, counts, wrap_wall
from tests.models import FAMILY_CASES, random_model
from tests.test_equality import logits_of

LADDER = "int8:int4:int2"


def wide(family: str) -> Any:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
    if family == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 64
    return random_model(family, **sizes)


@pytest.mark.parametrize("family", FAMILY_CASES)
@pytest.mark.parametrize("miss", ["fetch_lowest", "fetch_priority", "cascade", "drop_cascade"])
def test_without_prefetching_answers_and_counts_are_the_virtual_clocks(
    family: str, miss: str
) -> None:
    """Twelve repetitions of each family: three delays for each way of missing."""
    model = wide(family)
    virtual = wrap(model, LADDER, capacity="30%", miss=miss)
    expected = logits_of(model)
    virtual.unwrap()
    told = counts(virtual.engine.ledger.passes)
    assert sum(p.low_precision for p in virtual.engine.ledger.passes) > 0
    for seed in range(3):
        late = {"seed": seed, "longest_s": 0.0005}
        changes = {"precision": LADDER, "miss": miss}
        wrapped = wrap_wall(model, "on_demand", "30%", changes=changes, **late)
        assert_same(expected, logits_of(model, wrapped), f"{miss}, {seed}")
        assert counts(wrapped.engine.ledger.passes) == told


@pytest.mark.parametrize("store", ["ram", "disk"])
def test_a_model_is_loaded_encoded_and_answers_as_under_the_virtual_clock(
    store: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = str(checkpoint("gpt_oss"))
    ours = {"precision": "int8:nf4/g64", "policy": "on_demand", "capacity": "30%"}
    ours["miss"] = "fetch_priority"
    host: dict[str, Any] = {"device": "cpu", "max_length": 48}
    expected = answers(MoECacheLM(pretrained=path, **host, **ours))
    where = {"store": store, "store_dir": str(tmp_path)} if store == "disk" else {}
    lm = MoECacheLM(pretrained=path, clock="wall", **where, **host, **ours)
    assert answers(lm) == expected
    lm.engine.check_integrity()
    lm.install(read_config({"clock": "wall", **where, **ours}))
    assert answers(lm) == expected
    assert lm.report()["model"]["precision"] == ("int8", "nf4/g64")
    lm.wrapped.unwrap()


@pytest.mark.parametrize(
    "miss", ["fetch_priority", pytest.param("cascade", marks=pytest.mark.slow)]
)
def test_a_pass_that_is_interrupted_while_it_waits_does_no_harm_to_the_next(
    miss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C: what it demanded is still on its way into slots that another would drop."""
    model, wait = random_model("olmoe", **WIDE), WallExecutor._wait
    changes = {"precision": LADDER, "miss": miss}
    wrapped = wrap_wall(model, "on_demand", "3", changes=changes, longest_s=0.01)
    for place in range(14):
        left = itertools.count(place, -1)

        def interrupted(*args: Any, left: Iterator[int] = left) -> None:
            if next(left) == 0:
                raise KeyboardInterrupt
            wait(*args)

        monkeypatch.setattr(WallExecutor, "_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            logits_of(model)
        monkeypatch.setattr(WallExecutor, "_wait", wait)
        assert all(logits.isfinite().all() for logits in logits_of(model))
    wrapped.unwrap()


def test_slots_of_other_sizes_make_room_for_each_other() -> None:
    """Whatever the levels of what comes, all slots together never take more than the capacity."""
    model = random_model("olmoe", **WIDE)
    changes = {"precision": LADDER, "miss": "fetch_lowest", "prefetch": "next_gate"}
    wrapped = wrap_wall(model, "on_demand", "2", changes=changes)
    with torch.no_grad():
        for length in (1, 5, 1, 9, 2):
            model(torch.arange(2, 2 + length)[None])
            wrapped.engine.check_integrity()
            mover = wrapped.engine.link._mover  # type: ignore[attr-defined]
            assert mover.num_bytes <= wrapped.engine.setting.capacity.total_bytes
    wrapped.unwrap()
