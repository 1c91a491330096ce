"""A replay that streams a trace in parts equals a replay of the whole trace."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM, MoECacheSpecLM
from lm_eval_moecache.trace import file
from lm_eval_moecache.trace.file import StreamedTrace, open_trace, read_trace
from tests.conftest import Checkpoint
from tests.engine import traces
from tests.harness import make_instance
from tests.trace.test_trace import rewritten


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Stream every trace, a few rows at a time."""
    monkeypatch.setattr(file, "WHOLE_ROWS", 0)
    monkeypatch.setattr(file, "PART_ROWS", 17)
    return monkeypatch


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    plain = read_trace(traces.record(folder / "plain"))
    served = replay(plain, traces.setting("on_demand", "50%"))
    return traces.record(folder, listed=served.ledger.requests)


@settings(max_examples=20)
@given(rows=st.integers(1, 120))
def test_parts_are_whole_passes_and_together_the_trace(recorded: Path, rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "WHOLE_ROWS", 0)
        patch.setattr(file, "PART_ROWS", rows)
        opened = open_trace(recorded, logits=True, predicted=True)
        assert isinstance(opened, StreamedTrace)
        parts = list(opened.parts())
    whole = read_trace(recorded, logits=True, predicted=True)
    assert (opened.num_passes, opened.requests) == (whole.num_passes, whole.requests)
    assert [p.first_pass for p in parts] == np.cumsum([0, *(p.num_passes for p in parts)])[
        :-1
    ].tolist()
    for name in ("columns.experts", "columns.token", "columns.request", "columns.weights", "keys"):
        value = attrgetter(name)
        assert (np.concatenate([value(part) for part in parts]) == value(whole)).all()
    longest = max(np.diff(whole.row_bounds[:: whole.geometry.num_layers]))
    assert all(len(part.columns.layer) <= rows + longest for part in parts)


@pytest.mark.parametrize("cache_reset", ["never", "request"])
@pytest.mark.parametrize("policy", ["mixtral_offloading", "specmd", "on_demand", "moe_infinity"])
def test_a_streamed_replay_equals_that_of_the_whole(
    recorded: Path, in_parts: pytest.MonkeyPatch, policy: str, cache_reset: str
) -> None:
    setting = traces.setting(policy, "50%")
    opened = open_trace(recorded, predicted=True)
    assert isinstance(opened, StreamedTrace)
    progress: list[int] = []
    streamed = replay(opened, setting, cache_reset=cache_reset, on_progress=progress.append)
    whole = read_trace(recorded, predicted=True)
    expected = replay(whole, setting, cache_reset=cache_reset)
    assert streamed.ledger.passes == expected.ledger.passes
    assert streamed.ledger.requests == expected.ledger.requests
    assert sum(progress) == whole.num_passes


def asked(lm: MoECacheLM, path: Path, config: Any) -> Path:
    lm.install(config)
    generation = {"until": ["@@"], "max_gen_toks": 6, "do_sample": False}
    for number, text in enumerate(["One, two, one, two,", "Count: 3", "A longer text to read"]):
        lm.generate_until([make_instance("generate_until", "gen", number, text, generation)], True)
        lm.loglikelihood([make_instance("loglikelihood", "score", number, text, " a b")], True)
    trace_path = lm.finish_trace()
    assert trace_path is not None
    return trace_path


SCAN = {"policy": "on_demand", "scoring": "scan", "capacity": "4/layer"}
DRAFT = {"policy": "sp_moe", "capacity": "40%", "draft": "self:int8", "draft_tokens": 2}


def test_scanned_texts_stay_whole(
    tmp_path: Path, checkpoint: Checkpoint, in_parts: pytest.MonkeyPatch
) -> None:
    lm = MoECacheLM(pretrained=str(checkpoint("olmoe")), device="cpu", policy="on_demand")
    path = asked(lm, tmp_path, read_config({**SCAN, "trace": str(tmp_path)}))
    opened = open_trace(path)
    assert isinstance(opened, StreamedTrace) and len(opened.scans) == 3
    assert len(list(opened.parts())) > 3
    for reset in ("never", "request"):
        runs = [replay(t, lm.engine.setting, cache_reset=reset) for t in (opened, read_trace(path))]
        assert runs[0].ledger.passes == runs[1].ledger.passes


def test_drafts_and_proposals_are_streamed(
    tmp_path: Path, checkpoint: Checkpoint, in_parts: pytest.MonkeyPatch
) -> None:
    lm = MoECacheSpecLM(pretrained=str(checkpoint("olmoe")), device="cpu", policy="sp_moe")
    path = asked(lm, tmp_path, read_config({**DRAFT, "trace": str(tmp_path)}, speculative=True))
    for policy in ("sp_moe", "specmd", "mixtral_offloading"):
        setting = read_config({**DRAFT, "policy": policy}, speculative=True).setting(lm.geometry)
        streamed, whole = (
            replay(t, setting).ledger.passes for t in (open_trace(path), read_trace(path))
        )
        assert streamed == whole
        assert sum(p.drafted for p in streamed) > 0 and sum(p.predicted for p in streamed) > 0


def with_a_pair(path: Path) -> pa.Table:
    experts = pq.read_table(path)["experts"].to_pylist()
    return rewritten(path, experts=[*experts[:60], [3, 3], *experts[61:]])


def without_a_pass(path: Path) -> pa.Table:
    table = pq.read_table(path)
    return table.filter(table["pass"].to_numpy() != 9)


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (with_a_pair, "row 60: experts is .* names one twice"),
        (without_a_pass, "pass is 10 after 8, must count up"),
    ],
)
def test_damage_is_named_by_its_place_in_the_file(
    recorded: Path, tmp_path: Path, in_parts: pytest.MonkeyPatch, damaged: Any, said: str
) -> None:
    path = tmp_path / "damaged.parquet"
    pq.write_table(damaged(recorded), path)
    with pytest.raises(ValueError, match=said):
        list(open_trace(path).parts())
