"""The trace format: traces survive a round trip, and invalid ones are refused by field."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm_eval_moecache.trace.file import COLUMNS, read_trace
from lm_eval_moecache.trace.header import Header
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.recorder import TraceWriter
from lm_eval_moecache.trace.trace import Columns, Trace
from tests.engine import traces

FAST = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traces.record(tmp_path_factory.mktemp("trace"))


def rewritten(good: Path, **columns: Any) -> pa.Table:
    """Return the rows of the trace with some columns replaced."""
    table = pq.read_table(good)
    for name, values in columns.items():
        kind = None if isinstance(values, pa.Array) else COLUMNS[name]
        table = table.set_column(table.column_names.index(name), name, pa.array(values, kind))
    return table


def read(table: pa.Table, folder: Path) -> Trace:
    pq.write_table(table, folder / "x.parquet")
    return read_trace(folder / "x.parquet")


def refused(table: pa.Table, folder: Path, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(table, folder)


def test_a_written_trace_has_the_columns_types_and_metadata_of_the_format(good: Path) -> None:
    schema = pq.read_schema(good)
    assert schema.names == [*COLUMNS, "logits", "predicted"]
    for name, kind in COLUMNS.items():
        dtype = schema.field(name).type
        assert str(getattr(dtype, "value_type", dtype)) == str(getattr(kind, "value_type", kind))
    header = json.loads(schema.metadata[b"moecache"])
    assert header["version"] == 1 and header["expert_bytes"] == [1000, 1500, 1000]
    fields = "model num_layers num_experts top_k dense_bytes precision seed".split()
    assert header.keys() >= set(fields)


def test_a_trace_is_read_back_as_it_was_recorded(good: Path) -> None:
    trace = read_trace(good, logits=True, predicted=True)
    assert trace.geometry == traces.GEOMETRY
    assert trace.logits is not None and trace.predicted is not None
    assert trace.columns.weights is not None
    for number, (event, _) in enumerate(traces.events(0)):
        rows = slice(trace.row_bounds[number], trace.row_bounds[number + 1])
        keys = trace.keys[trace.key_bounds[number] : trace.key_bounds[number + 1]]
        assert keys.tolist() == event.keys
        assert (trace.columns.experts[rows] == event.experts).all()
        assert (trace.columns.weights[rows] == event.weights).all()
        assert (trace.logits[rows] == event.logits).all()


def test_requests_are_told_from_the_rows_where_the_file_does_not_list_them(
    good: Path, tmp_path: Path
) -> None:
    table = pq.read_table(good)
    plain = table.replace_schema_metadata({b"moecache": table.schema.metadata[b"moecache"]})
    requests = read(plain, tmp_path).requests
    lengths = [(r.kind, r.prompt_tokens, r.output_tokens) for r in requests]
    assert lengths == [("generate_until", 4, 6)] * 3
    assert requests[1].passes == tuple(range(6, 12))


def test_what_a_killed_or_interrupted_recording_has_finished_is_a_trace(tmp_path: Path) -> None:
    writer = traces.half_a_recording(tmp_path, keep_until=2)
    whole = read_trace(traces.record(tmp_path))
    partial = load_trace(str(tmp_path / "run-000.parquet.partial"), logits=True)
    assert (partial.columns.experts == whole.columns.experts[: len(partial.columns.experts)]).all()
    path = writer.close_interrupted()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run-000.parquet", "run-001.parquet"]
    for trace in (partial, read_trace(path)):
        assert [r.passes for r in trace.requests] == [tuple(range(6)), tuple(range(6, 12))]
    assert writer.close() is None and writer.close_interrupted() is None


def test_an_interrupt_leaves_a_stream_that_cannot_be_read_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = traces.half_a_recording(tmp_path, keep_until=2)
    [stream] = tmp_path.iterdir()
    stream.write_bytes(stream.read_bytes()[:9])
    assert writer.close_interrupted() is None
    assert f"{stream} keeps what was finished" in caplog.text
    assert [*tmp_path.iterdir()] == [stream]


def test_a_trace_has_the_mode_of_any_other_file(tmp_path: Path) -> None:
    path = traces.record(tmp_path)
    (tmp_path / "other").write_text("")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_recording_of_any_name_without_passes_leaves_nothing(tmp_path: Path) -> None:
    header = Header(geometry=traces.GEOMETRY, seed=0)
    assert TraceWriter(tmp_path, "n" * 300, header).close([]) is None
    assert not list(tmp_path.iterdir())


# --- damage -----------------------------------------------------------------------------------


@FAST
@given(row=st.integers(0, 79), how=st.sampled_from(["missing", "twice", "swapped", "shuffled"]))
def test_rows_in_another_order_missing_or_there_twice_are_refused_by_row_and_field(
    good: Path, tmp_path: Path, row: int, how: str
) -> None:
    table = pq.read_table(good)
    order = np.arange(len(table))
    if how == "swapped":
        order[[row, row + 1]] = order[[row + 1, row]]
    elif how == "shuffled":
        order = np.random.default_rng(row).permutation(order)
    else:
        order = np.insert(order, row, row) if how == "twice" else np.delete(order, row)
    refused(table.take(order), tmp_path, r"row \d+: (pass|layer|token|request|phase) |holds")


def test_a_token_read_twice_or_left_out_at_every_layer_is_refused(
    good: Path, tmp_path: Path
) -> None:
    table = pq.read_table(good)
    tokens, passes = table["token"].to_numpy(), table["pass"].to_numpy()
    prompt = np.flatnonzero((passes == 0) & (tokens == 1))
    rows = np.arange(len(table))
    left_out, twice = np.delete(rows, prompt), np.insert(rows, prompt, prompt)
    refused(table.take(left_out), tmp_path, "token is 2 after 0: one is missing")
    refused(table.take(twice), tmp_path, "token appears twice")


def test_the_last_layer_may_serve_the_last_token_alone_and_no_other(
    good: Path, tmp_path: Path
) -> None:
    table = pq.read_table(good)
    layer, tokens, passes = (table[name].to_numpy() for name in ("layer", "token", "pass"))
    of_prompt = (layer == layer.max()) & (passes == 0)
    assert read(table.filter(~of_prompt | (tokens == 3)), tmp_path).num_passes == 18
    another = table.filter(~of_prompt | (tokens == 2))
    refused(another, tmp_path, "is not the last of a sequence")
    shorter = table.filter((layer != 1) | (passes != 0) | (tokens != 3))
    refused(shorter, tmp_path, "layer has 3 rows in this pass, layer 0 has 4")


def test_weights_may_be_null(good: Path, tmp_path: Path) -> None:
    nulls = pa.nulls(len(pq.read_table(good)), COLUMNS["weights"])
    assert read(rewritten(good, weights=nulls), tmp_path).columns.weights is None


def test_a_file_that_is_cut_or_has_no_metadata_is_refused(good: Path, tmp_path: Path) -> None:
    for data in (b"", good.read_bytes()[:-9]):
        (tmp_path / "cut.parquet").write_bytes(data)
        with pytest.raises(ValueError, match=r"trace cut\.parquet is not a readable Parquet file"):
            read_trace(tmp_path / "cut.parquet")
    bare = pq.read_table(good).replace_schema_metadata({})
    refused(bare, tmp_path, "no metadata key 'moecache'")


def told(path: Path) -> list[object]:
    """Return all that a reader learns of a trace, without its logits and predictions."""
    trace = read_trace(path)
    arrays = [getattr(trace.columns, field.name) for field in dataclasses.fields(Columns)]
    return [trace.geometry, trace.seed, trace.requests, trace.scans, [a.tolist() for a in arrays]]


@pytest.mark.parametrize("part", ["data", "footer"])
def test_a_flipped_bit_is_refused_or_changes_nothing(good: Path, tmp_path: Path, part: str) -> None:
    """Many flips of the data decode to other experts or weights: only the checksums tell."""
    data, path = good.read_bytes(), tmp_path / "flipped.parquet"
    # Behind these columns lie the logits and predictions, which are not read here.
    end = pq.ParquetFile(good).metadata.row_group(0).column(len(COLUMNS)).data_page_offset
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    begin, end = (4, end) if part == "data" else (footer, len(data))
    whole, chance, refusals = told(good), np.random.default_rng(0), []
    for place in chance.integers(begin, end, 120):
        flipped = bytearray(data)
        flipped[place] ^= 1 << int(chance.integers(8))
        path.write_bytes(flipped)
        try:
            assert told(path) == whole, place
        except ValueError as error:
            refusals.append(str(error))
    assert len(refusals) > 40
    assert part == "footer" or sum("CRC" in text for text in refusals) > 40


def test_recordings_into_one_folder_at_once_keep_apart(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        paths = pool.map(traces.record, [tmp_path] * 32)
    assert len(set(paths)) == len(list(tmp_path.iterdir())) == 32
    assert {read_trace(path).num_passes for path in paths} == {18}


# --- foreign formats --------------------------------------------------------------------------

CSV = """# route_trace v1
# model=/somewhere/tiny-model.gguf arch=x n_layer=2 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=10
# layer=1 expert_bytes=80 dense_bytes=10
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,3,0.6,0,100
0,0,0,0,1,1,0.4,0,100
0,0,1,0,0,1,0.7,0,0
0,0,1,0,1,0,0.3,0,100
0,0,1,1,0,2,0.9,0,80
0,0,1,1,1,3,0.1,0,80
0,1,2,0,0,0,0.6,1,0
0,1,2,0,1,2,0.4,1,0
0,1,2,1,0,1,0.6,1,0
0,1,2,1,1,0,0.4,1,0
"""


JSONL = '{"tok": 1, "layers": [[0, 3], [1, 2]]}\n{"tok": 2, "layers": [[1, 3], [0, 2]]}\n'


ROUTED = np.array([[[0, 3], [1, 2]], [[1, 3], [0, 2]]], dtype=np.uint8)


def test_what_a_format_does_not_say_is_counted_or_given(tmp_path: Path) -> None:
    """The number of experts and their sizes, for arrays and lines of ids alike."""
    path, lines = tmp_path / "t.npz", tmp_path / "t.jsonl"
    np.savez_compressed(path, routed_experts=ROUTED, other=np.zeros(3))
    lines.write_text(JSONL)
    trace, trace_of_lines = load_trace(str(path)), load_trace(str(lines))
    assert (trace.num_passes, trace.has_sizes, trace.geometry.num_experts) == (2, False, 4)
    assert trace.geometry == trace_of_lines.geometry and np.array_equal(
        trace.keys, trace_of_lines.keys
    )
    np.savez(path, routed_experts=ROUTED, num_experts=np.array(64))
    sized = load_trace(str(path), expert_bytes=12)
    assert sized.has_sizes and sized.geometry.expert_bytes == ((12,), (12,))
    assert sized.geometry.num_experts == 64
    assert sized.keys.tolist() == [0, 3, 65, 66, 1, 3, 64, 66]
