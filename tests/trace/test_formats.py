"""Every format: a small file handmade from its documentation, read, shown and written back."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_eval_moecache.cli.trace import only_request
from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.records import plugins
from lm_eval_moecache.records.event import PHASES
from lm_eval_moecache.trace.formats import export
from lm_eval_moecache.trace.header import Header
from lm_eval_moecache.trace.importers import find_format, load_trace, trace_formats
from lm_eval_moecache.trace.recorder import TraceWriter
from lm_eval_moecache.trace.trace import Trace, with_sizes
from tests.conftest import Moecache
from tests.engine import traces

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "formats"
IDS = np.array(
    [[[1, 5], [0, 2]], [[3, 1], [2, 7]], [[5, 4], [7, 0]], [[1, 2], [6, 0]], [[2, 3], [0, 7]]]
)
"""[token, layer, expert] of every file: a prompt of three tokens, then two decode steps."""
PHASED = ("route_trace.csv", "array.npz", "cache_lab.jsonl", "colibri.txt", "activations.csv")
PHASED += ("vllm.json", "vllm_split.json", "sglang.json", "megatron.jsonl", "glm_atlas.json")
# Key for key as the writers have it today: vLLM's chat answers with lists, SGLang's OpenAI route,
# dynamo's over vLLM, moe-trace without a header (llama.cpp#28544), BigMoeOnEdge's later columns.
PHASED += ("vllm_own.json", "sglang_own.json", "activations_own.csv", "route_trace_own.csv")
PHASED += ("dynamo.json",)
WEIGHTED = ("route_trace.csv", "array.npz", "cache_lab.jsonl", "colibri.txt", "lattice.jsonl")
WEIGHTED += ("route_trace_own.csv",)
FILES = (*PHASED, "lattice.jsonl", "token_jsonl.jsonl")


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_told_by_its_content_and_read_with_all_it_has(file: str) -> None:
    path = FOLDER / file
    assert find_format(str(path)) == path.stem.removesuffix("_split").removesuffix("_own")
    trace = load_trace(str(path), top_k=2 if file.startswith("sglang") else None)
    columns, geometry = trace.columns, trace.geometry
    assert (geometry.num_layers, geometry.num_experts, geometry.top_k) == (2, 8, 2)
    for row, experts in enumerate(columns.experts.tolist()):
        expected = IDS[columns.token[row], columns.layer[row]].tolist()
        assert experts == (sorted(expected) if file == "megatron.jsonl" else expected)
    assert len(columns.layer) == 10
    phases = [PHASES[code] for code in columns.phase[trace.row_bounds[:-1][::2]]]
    assert phases == (["prefill", "decode", "decode"] if file in PHASED else ["decode"] * 5)
    assert trace.requests[0].prompt_tokens == (3 if file in PHASED else 0)
    assert (columns.weights is not None) == (file in WEIGHTED)
    if columns.weights is not None:
        assert (np.diff(columns.weights, axis=-1) <= 0).all()
        assert columns.weights[0].tolist() == [0.5, 0.25]


@pytest.mark.parametrize("line", ["# a comment\n", "\n"])
def test_a_file_of_comments_is_refused_at_once(line: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.csv"
    path.write_text(line * (1 << 20))
    with pytest.raises(ValueError, match=r"notes\.csv"):
        find_format(str(path))


def test_every_format_is_listed_and_has_a_file_here_and_a_line_in_the_documentation(
    moecache: Moecache,
) -> None:
    page, listed = (ROOT / "docs" / "traces.md").read_text(), moecache("trace", "formats")
    for name, row in trace_formats().items():
        assert name == "parquet" or list(FOLDER.glob(f"{name}.*"))
        assert f"`{name}`" in page and f"{name} (" in listed and row.about in listed


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_what_is_written_is_read_back_as_it_was(
    suffix: str, tmp_path: Path, moecache: Moecache
) -> None:
    trace = load_trace(str(FOLDER / "route_trace.csv"))
    out = tmp_path / f"out{suffix}"
    moecache("trace", "convert", FOLDER / "route_trace.csv", out)
    converted = load_trace(str(out))
    for column in ("request", "pass_index", "phase", "token", "layer", "experts", "weights"):
        np.testing.assert_array_equal(
            getattr(converted.columns, column), getattr(trace.columns, column), err_msg=column
        )
    if suffix != ".jsonl":
        assert converted.geometry.expert_bytes == trace.geometry.expert_bytes == ((1000,), (2000,))


def test_a_format_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    trace, plain = (load_trace(str(p)) for p in (traces.record(tmp_path), FOLDER / "lattice.jsonl"))
    for write, given, words in (
        (export.write_cache_lab, trace, r"holds one request, and trace .* has 3.*--request"),
        (export.write_route_trace, load_trace(str(FOLDER / "vllm.json")), "has weights, and trace"),
        (export.write_parquet, plain, "says no sizes"),
    ):
        with pytest.raises(ValueError, match=words):
            write(given, tmp_path / "out")
    assert only_request(trace, 1).num_passes == 6


# --- responses ---


def response(path: Path, ids: Any, **fields: Any) -> str:
    """Write a response of vLLM with these ids, or of SGLang, whose ids have no shape."""
    usage = {"prompt_tokens": 5, "completion_tokens": 3, **fields}
    if ids.dtype == "<i4":
        text = base64.b64encode(ids.tobytes()).decode()
        path.write_text(json.dumps({"meta_info": {**usage, "routed_experts": text}}))
    else:
        path.write_text(json.dumps({"usage": usage, "routed_experts": ids.tolist(), **fields}))
    return str(path)


def test_a_folder_of_responses_is_one_trace_of_as_many_requests(tmp_path: Path) -> None:
    for name in ("vllm.json", "vllm_split.json"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    trace = load_trace(str(tmp_path))
    assert [r.prompt_tokens for r in trace.requests] == [3, 3]
    assert [r.passes for r in trace.requests] == [(0, 1, 2), (3, 4, 5)]


@pytest.mark.parametrize(
    "given",
    [
        {"routed_experts_prompt_start": 2},
        {"routed_experts_prompt_start": 2, "prompt_token_ids": [0] * 5, "usage": {}}
        | {"token_ids": [0] * 3},
    ],
)
def test_rows_of_a_cached_prefix_are_not_taken_from_the_generation(
    given: dict[str, object], tmp_path: Path
) -> None:
    """Of a prompt of five tokens two were in vLLM's cache: its rows are three, of tokens 2 to 4."""
    columns = load_trace(response(tmp_path / "x.json", IDS, **given)).columns
    first = columns.layer == 0
    assert columns.token[first].tolist() == [2, 3, 4, 5, 6]
    assert [PHASES[phase] for phase in columns.phase[first]] == ["prefill"] * 3 + ["decode"] * 2


def test_choices_share_a_prompt_and_the_count_of_generated_tokens(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    choices = [{"routed_experts": IDS[:rows].tolist()} for rows in (4, 5)]
    usage = {"prompt_tokens": 3, "completion_tokens": 5}
    path.write_text(json.dumps({"choices": choices, "usage": usage}))
    assert [r.passes for r in load_trace(str(path)).requests] == [(0, 1), (2, 3, 4)]


SHARED = np.full((40, 5, 1), 16)
ROUTED = np.random.default_rng(0).permuted(np.tile(np.arange(16), (40, 5, 1)), axis=2)[..., :4]


@pytest.mark.parametrize(
    ("ids", "shape", "refusal"),
    [
        (ROUTED.astype("<i4"), {"top_k": 4}, ""),
        (ROUTED.astype("<i4"), {}, "without their shape"),
        (ROUTED.astype("<i4"), {"top_k": 3}, "has 20 ids a token"),
        (ROUTED.astype("<i4"), {"top_k": 4, "num_layers": 4}, "those of 4 layers of top_k=4"),
        (np.append(ROUTED, SHARED, -1).astype("<i4"), {"top_k": 4, "num_layers": 5}, ""),
        (np.append(ROUTED, SHARED, -1).astype("<i4"), {"top_k": 5}, "of 25 ids a token 5 never"),
        (np.append(ROUTED, SHARED, -1), {"top_k": 4}, ""),
        (np.append(ROUTED, SHARED, -1), {"top_k": 5}, r"shared experts do.*: 4 \(16\)"),
    ],
)
def test_a_shape_is_never_guessed_and_shared_experts_are_no_routed_ones(
    tmp_path: Path, ids: Any, shape: dict[str, int], refusal: str
) -> None:
    path = response(tmp_path / "x.json", ids, prompt_tokens=30, completion_tokens=11)
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            load_trace(path, **shape)  # type: ignore[arg-type]
    else:
        trace = load_trace(path, **shape)  # type: ignore[arg-type]
        in_order = trace.columns.experts[np.lexsort((trace.columns.layer, trace.columns.token))]
        assert (in_order.reshape(ROUTED.shape) == ROUTED).all()


# --- show ---


def test_show_says_what_a_trace_holds_and_cannot_answer(moecache: Moecache) -> None:
    summary = moecache.json("trace", "show", FOLDER / "lattice.jsonl")
    assert (summary["format"], summary["passes"], summary["cycle"]) == ("lattice", {"decode": 5}, 4)
    answers = {question: why is None for question, why in summary["answers"].items()}
    assert answers["evictions and miss rules that use weights"]
    assert not answers["times, and capacities in bytes"]
    assert not answers["what a prompt costs the cache"]


def test_show_names_the_prefetchers_that_a_trace_replays_without_its_gates(
    tmp_path: Path, moecache: Moecache
) -> None:
    names = ('{"name": "score", "percentile": 80.0, "predictor": ""}', '{"predictor": "ab"}')
    writer = TraceWriter(tmp_path, "x", Header(geometry=traces.GEOMETRY, seed=0, proposals=names))
    for event, _ in traces.events(0):
        if event.layer == 0:
            tokens = np.arange(len(event.experts))
            writer.begin_pass(event.pass_index, event.phase, tokens * 0, tokens)
        writer.add(event.layer, event.experts, event.weights, event.logits, [], [[1], []])
    path = writer.close()
    summary, text = moecache.json("trace", "show", path), moecache("trace", "show", path)
    assert summary["prefetchers"] == ["score (percentile=80.0)"]
    assert summary["answers"]["prefetch by the next layer's gate"] is None
    assert "next layer's gate as recorded: score (percentile=80.0)" in text


# --- a format from outside ---

PLAIN = """
from lm_eval_moecache.trace.formats.base import Rows, TraceFormat, numbered


def read(path, options):
    rows = Rows(path)
    for number, line in numbered(path):
        if number > 1:
            rows.add([int(word) for word in line.split()], layer=0, step=number)
    return rows.trace(options)


PLAIN = TraceFormat("One token a line", (".txt",), "nothing", lambda h: h[:5] == b"plain", read)
"""


@pytest.fixture
def trace_of_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A trace in the format of the module `plain` in the same folder, as if it were installed."""
    point = EntryPoint("plain", "plain:PLAIN", "lm_eval_moecache.formats")
    monkeypatch.setattr(plugins, "_of_kind", lambda kind: (point,))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "trace.txt").write_text("plain\n3 1\n2 0\n")
    monkeypatch.delitem(sys.modules, "plain", raising=False)
    trace_formats.cache_clear()
    yield tmp_path / "trace.txt"
    trace_formats.cache_clear()


def test_a_new_format_is_one_object(trace_of_plain: Path, moecache: Moecache) -> None:
    assert "One token a line" in moecache("trace", "formats")
    assert load_trace(str(trace_of_plain)).columns.experts.tolist() == [[3, 1], [2, 0]]


FAILED = r"trace trace.txt:( line 1:)? the importer of 'plain' failed: "


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "return [int(line) for _, line in numbered(path)]",
            FAILED + r"ValueError: invalid literal .*'plain'.* \(.*plain.py, line 6\)",
        ),
        ('return {}["ids"]', FAILED + r"KeyError: 'ids' \(.*plain.py, line 6\)"),
        ("return []", FAILED + "TypeError: read returned list"),
        ("return Rows(path).trace(options)", "^trace trace.txt has no rows.$"),
        ('raise ValueError(f"trace {path.name}: my own")', r"^trace trace.txt: my own$"),
        ("import no_such_module", r"ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_third_partys_mistake_is_one_line_that_names_file_line_and_importer(
    trace_of_plain: Path, moecache: Moecache, change: str, said: str
) -> None:
    at = "\n\ndef read" if change.startswith("import") else "    rows = Rows(path)"
    code = PLAIN.replace(at, f"{'' if at[0] == chr(10) else '    '}{change}\n{at}")
    trace_of_plain.with_name("plain.py").write_text(code)
    for command in (["trace", "show"], ["replay"]):
        error = moecache(*command, trace_of_plain, code=2)
        assert "Traceback" not in error and error.count("\n") <= 1
    with pytest.raises(ValueError, match=said):
        load_trace(str(trace_of_plain))


# --- use counts ---

COUNTS = ((0, 3, 0, 2, 0, 2, 0, 0), (4, 0, 0, 0, 0, 0, 0, 3))
OF_TRACE = tuple(tuple(np.bincount(IDS[:, n].ravel(), minlength=8).tolist()) for n in range(2))


@pytest.mark.parametrize(
    ("file", "text", "counts"),
    [
        *((f"counts{name}", "", COUNTS) for name in (".coli_usage", "_sglang.csv", "_glm.json")),
        ("counts_imatrix.gguf", "", COUNTS),
        ("glm_atlas.json", "", OF_TRACE),
        # An engine whose counts fade writes fractions; two thirds of a use are one.
        ("x.coli_usage", "-1 2 3\n3 0 0.4\n3 2 0.7\n7 1 2.6\n", ((0, 0, 1), (0, 3, 0))),
        ("x.pt", "", ((11, 22), (33, 44))),
    ],
)
def test_counts_of_engines_and_of_traces_become_a_profile(
    file: str, text: str, counts: Any, tmp_path: Path, moecache: Moecache
) -> None:
    path, out = FOLDER / file, tmp_path / "use.json"
    if file.startswith("x."):
        path = tmp_path / file
        path.write_text(text)
    if file == "x.pt":
        torch = pytest.importorskip("torch")
        table = torch.tensor([[[1, 2], [3, 4]], [[10, 20], [30, 40]]])
        torch.save({"logical_count": table, "rank": 0}, path)
    moecache("profile", "use", path, "--out", out)
    assert json.loads(out.read_text())["counts"] == [list(layer) for layer in counts]


def test_files_of_moe_trace_joined_without_headers_are_requests(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text(2 * (FOLDER / "activations_own.csv").read_text())
    assert [r.passes for r in load_trace(str(path)).requests] == [(0, 1, 2), (3, 4, 5)]


# --- shipped traces: complete, routing as published, and written without loss ---


def written(trace: Trace, path: Path) -> Trace:
    export.write_parquet(trace, path)
    return load_trace(str(path))


def test_a_trace_without_sizes_is_given_those_of_a_model(tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text('{"tok": 0, "layers": [[0, 1], [2, 3]]}\n')
    sized = with_sizes(load_trace(str(file)), load_real_model("OLMoE-1B-7B"))
    reread = written(sized, tmp_path / "sized.parquet")
    assert reread.geometry.expert_bytes == ((12_582_912,),) * 2 and reread.has_sizes


def test_a_trace_written_again_is_the_same_and_takes_no_more_bytes(tmp_path: Path) -> None:
    shipped, copy = ROOT / "traces" / "olmoe-1b-7b.parquet", tmp_path / "copy.parquet"
    trace, reread = load_trace(str(shipped)), written(load_trace(str(shipped)), copy)
    np.testing.assert_array_equal(reread.columns.weights, trace.columns.weights)
    np.testing.assert_array_equal(reread.keys, trace.keys)
    assert copy.stat().st_size < 1.02 * shipped.stat().st_size
