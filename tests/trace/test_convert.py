"""Shipped traces of real models: whole, of the published figures, and written without loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lm_eval_moecache.records.emulation import load_real_model
from lm_eval_moecache.trace.formats.parquet import Parquet
from lm_eval_moecache.trace.importers import load_trace
from lm_eval_moecache.trace.trace import Trace, with_sizes
from tests.engine import traces

SHIPPED = Path(__file__).resolve().parents[2] / "traces"


def written(trace: Trace, path: Path) -> Trace:
    Parquet.write(trace, path)
    return load_trace(str(path))


def test_a_written_trace_is_the_one_that_was_read(tmp_path: Path) -> None:
    path, _ = traces.record(tmp_path)
    trace = load_trace(str(path))
    again = written(trace, tmp_path / "copy.parquet")
    np.testing.assert_array_equal(again.keys, trace.keys)
    np.testing.assert_array_equal(again.key_bounds, trace.key_bounds)
    np.testing.assert_array_equal(again.columns.weights, trace.columns.weights)
    np.testing.assert_array_equal(again.columns.phase, trace.columns.phase)
    assert again.geometry == trace.geometry


def test_a_trace_without_sizes_is_given_those_of_a_model(tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text('{"tok": 0, "layers": [[0, 1], [2, 3]]}\n')
    trace = load_trace(str(file))
    with pytest.raises(ValueError, match="says no sizes"):
        Parquet.write(trace, tmp_path / "bare.parquet")
    sized = with_sizes(trace, load_real_model("OLMoE-1B-7B"))
    again = written(sized, tmp_path / "sized.parquet")
    assert again.geometry.expert_bytes == ((12_582_912,),) * 2 and again.has_sizes


@pytest.mark.parametrize(
    ("name", "layers", "experts", "top_k", "passes"),
    [
        ("olmoe-1b-7b", 16, 64, 8, 299),
        ("qwen3-30b-a3b", 48, 128, 6, 129),
        ("gemma-4-26b-a4b", 30, 128, 6, 129),
    ],
)
def test_the_shipped_traces_are_whole(
    name: str, layers: int, experts: int, top_k: int, passes: int
) -> None:
    trace = load_trace(str(SHIPPED / f"{name}.parquet"))
    found = trace.geometry
    assert (found.num_layers, found.num_experts, found.top_k) == (layers, experts, top_k)
    assert trace.num_passes == passes and trace.has_sizes


@pytest.mark.parametrize(
    ("file", "name"), [("qwen.route.csv", "qwen3-30b-a3b"), ("gemma.route.csv", "gemma-4-26b-a4b")]
)
def test_a_shipped_trace_routes_as_the_published_one(file: str, name: str) -> None:
    published = load_trace(str(traces.published(file)))
    shipped = load_trace(str(SHIPPED / f"{name}.parquet"))
    np.testing.assert_array_equal(shipped.keys, published.keys)
    assert shipped.geometry.expert_bytes == published.geometry.expert_bytes
