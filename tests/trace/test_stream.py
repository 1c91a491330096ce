"""A replay that reads a trace part after part gives what one of the whole trace gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.engine.replay import replay
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.harness.lm import MoECacheLM, MoECacheSpecLM
from lm_eval_moecache.trace import file
from lm_eval_moecache.trace.file import StreamedTrace, open_trace, read_trace
from tests.conftest import Checkpoint
from tests.engine import traces
from tests.harness import make_instance
from tests.trace.test_trace import rewritten, without_digest


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Stream every trace, some rows at a time."""
    monkeypatch.setattr(file, "WHOLE_ROWS", 0)
    monkeypatch.setattr(file, "PART_ROWS", 17)
    return monkeypatch


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    return traces.record(folder, traces.setting("mixtral_offloading", "50%"))[0]


@settings(deadline=None, max_examples=20)
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
    for name in ("experts", "token", "request", "weights"):
        joined = np.concatenate([getattr(part.columns, name) for part in parts])
        assert (joined == getattr(whole.columns, name)).all()
    assert (np.concatenate([part.keys for part in parts]) == whole.keys).all()
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
    told: list[int] = []
    found = replay(opened, setting, cache_reset=cache_reset, on_progress=told.append)
    whole = read_trace(recorded, predicted=True)
    expected = replay(whole, setting, cache_reset=cache_reset)
    assert found.ledger.passes == expected.ledger.passes
    assert found.ledger.requests == expected.ledger.requests
    assert sum(told) == whole.num_passes


def asked(lm: MoECacheLM, path: Path, config: Any) -> Path:
    lm.install(config)
    wanted = {"until": ["@@"], "max_gen_toks": 6, "do_sample": False}
    for number, text in enumerate(["One, two, one, two,", "Count: 3", "A longer text to read"]):
        lm.generate_until([make_instance("generate_until", "gen", number, text, wanted)], True)
        lm.loglikelihood([make_instance("loglikelihood", "score", number, text, " a b")], True)
    found = lm.finish_trace()
    assert found is not None
    return found


def test_scanned_texts_stay_whole(
    tmp_path: Path, checkpoint: Checkpoint, in_parts: pytest.MonkeyPatch
) -> None:
    lm = MoECacheLM(pretrained=str(checkpoint("olmoe")), device="cpu", policy="on_demand")
    given = {"policy": "on_demand", "scoring": "scan", "capacity": "4/layer"}
    path = asked(lm, tmp_path, read_config({**given, "trace": str(tmp_path)}))
    for cache_reset in ("never", "request"):
        opened = open_trace(path)
        assert isinstance(opened, StreamedTrace) and len(opened.scans) == 3
        assert len(list(opened.parts())) > 3
        found = replay(opened, lm.engine.setting, cache_reset=cache_reset)
        whole = replay(read_trace(path), lm.engine.setting, cache_reset=cache_reset)
        assert found.ledger.passes == whole.ledger.passes


def test_drafts_and_proposals_are_streamed(
    tmp_path: Path, checkpoint: Checkpoint, in_parts: pytest.MonkeyPatch
) -> None:
    lm = MoECacheSpecLM(pretrained=str(checkpoint("olmoe")), device="cpu", policy="sp_moe")
    given = {"policy": "sp_moe", "capacity": "40%", "draft": "self:int8", "draft_tokens": 2}
    path = asked(lm, tmp_path, read_config({**given, "trace": str(tmp_path)}, speculative=True))
    for policy in ("sp_moe", "specmd", "mixtral_offloading"):
        config = read_config({**given, "policy": policy}, speculative=True)
        setting = config.setting(lm.geometry)
        found, whole = (replay(t, setting) for t in (open_trace(path), read_trace(path)))
        assert found.ledger.passes == whole.ledger.passes
        assert sum(p.drafted for p in found.ledger.passes) > 0
        assert sum(p.predicted for p in found.ledger.passes) > 0


def test_damage_in_a_later_part_is_named_by_its_row_in_the_file(
    recorded: Path, tmp_path: Path, in_parts: pytest.MonkeyPatch
) -> None:
    experts = pq.read_table(recorded)["experts"].to_pylist()
    experts[60] = [3, 3]
    path = tmp_path / "damaged.parquet"
    pq.write_table(rewritten(recorded, experts=experts), path)
    with pytest.raises(ValueError, match=r"row 60: experts is .* names one twice"):
        list(open_trace(path).parts())


def test_a_pass_that_is_missing_between_parts_is_refused(
    recorded: Path, tmp_path: Path, in_parts: pytest.MonkeyPatch
) -> None:
    table = without_digest(pq.read_table(recorded))
    path = tmp_path / "gap.parquet"
    pq.write_table(table.filter(table["pass"].to_numpy() != 9), path)
    with pytest.raises(ValueError, match="pass is 10 after 8, must count up"):
        list(open_trace(path).parts())


def test_the_command_streams_what_needs_no_future(
    recorded: Path, in_parts: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", str(recorded), "--policy=specmd", "--capacity=50%", "--json"]
    assert main([*words, "--bound=false"]) == 0
    streamed = capsys.readouterr().out
    in_parts.setattr(file, "WHOLE_ROWS", 1 << 18)
    assert main([*words, "--bound=false"]) == 0
    assert capsys.readouterr().out == streamed
