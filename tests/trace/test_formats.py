"""Every format: a small file handmade from its documentation, read, shown and written back."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lm_eval_moecache.cli.trace import only_request
from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.profiling.use import read_counts
from lm_eval_moecache.records.event import PHASES
from lm_eval_moecache.trace import formats
from lm_eval_moecache.trace.formats.parquet import Parquet
from lm_eval_moecache.trace.header import Header
from lm_eval_moecache.trace.importers import find_format, load_trace, trace_formats
from lm_eval_moecache.trace.recorder import TraceWriter
from lm_eval_moecache.trace.trace import Trace, with_sizes
from lm_eval_moecache.trace.use import use_of
from tests.conftest import Moecache
from tests.engine import traces

FOLDER = Path(__file__).parent / "formats"
IDS = np.array(
    [[[1, 5], [0, 2]], [[3, 1], [2, 7]], [[5, 4], [7, 0]], [[1, 2], [6, 0]], [[2, 3], [0, 7]]]
)
"""[token, layer, expert] of every file: a prompt of three tokens, then two decode steps."""
PHASED = ("route_trace.csv", "array.npz", "cache_lab.jsonl", "colibri.txt", "activations.csv")
PHASED += ("vllm.json", "vllm_split.json", "sglang.json", "megatron.jsonl", "glm_atlas.json")
# Key for key as the writers have it today: vLLM's chat answers with lists, SGLang's OpenAI route,
# moe-trace without a header (llama.cpp#28544), BigMoeOnEdge's later columns.
PHASED += ("vllm_own.json", "sglang_own.json", "activations_own.csv", "route_trace_own.csv")
WEIGHTED = ("route_trace.csv", "array.npz", "cache_lab.jsonl", "colibri.txt", "lattice.jsonl")
WEIGHTED += ("route_trace_own.csv",)
FILES = (*PHASED, "lattice.jsonl", "token_jsonl.jsonl")


def top_k_of(file: str) -> int | None:
    return 2 if file.startswith("sglang") else None


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_told_by_its_content_and_read_with_all_it_has(file: str) -> None:
    path = FOLDER / file
    assert find_format(str(path)) == path.stem.removesuffix("_split").removesuffix("_own")
    trace = load_trace(str(path), top_k=top_k_of(file))
    columns, geometry = trace.columns, trace.geometry
    assert (geometry.num_layers, geometry.num_experts, geometry.top_k) == (2, 8, 2)
    for row, experts in enumerate(columns.experts.tolist()):
        expected = IDS[columns.token[row], columns.layer[row]].tolist()
        assert experts == (sorted(expected) if file == "megatron.jsonl" else expected)
    assert len(columns.layer) == 10
    phases = columns.phase[trace.row_bounds[:-1][::2]].tolist()
    prefill, decode = PHASES.index("prefill"), PHASES.index("decode")
    assert phases == ([prefill, decode, decode] if file in PHASED else [decode] * 5)
    assert trace.requests[0].prompt_tokens == (3 if file in PHASED else 0)
    assert (columns.weights is not None) == (file in WEIGHTED)
    if columns.weights is not None:
        assert (np.diff(columns.weights, axis=-1) <= 0).all()
        assert columns.weights[0].tolist() == [0.5, 0.25]


def test_every_format_has_a_file_here_and_a_line_in_the_documentation() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text()
    for name in trace_formats():
        assert name == "parquet" or list(FOLDER.glob(f"{name}.*"))
        assert f"`{name}`" in page


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
    recorded = traces.record(tmp_path)
    trace = load_trace(str(recorded))
    with pytest.raises(ValueError, match=r"holds one request, and trace .* has 3.*--request"):
        trace_formats()["cache_lab"].write(trace, tmp_path / "out.jsonl")
    plain = load_trace(str(FOLDER / "token_jsonl.jsonl"))
    with pytest.raises(ValueError, match="has weights, and trace"):
        trace_formats()["route_trace"].write(plain, tmp_path / "out.csv")
    assert only_request(trace, 1).num_passes == 6


def test_a_folder_of_responses_is_one_trace_of_as_many_requests(tmp_path: Path) -> None:
    for name in ("vllm.json", "vllm_split.json"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    trace = load_trace(str(tmp_path))
    assert [r.prompt_tokens for r in trace.requests] == [3, 3]
    assert [r.passes for r in trace.requests] == [(0, 1, 2), (3, 4, 5)]


def test_the_top_k_of_sglang_is_told_from_enough_ids_or_asked_for(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = np.array([[rng.permutation(16)[:4] for _ in range(5)] for _ in range(40)], dtype="<i4")
    text = base64.b64encode(ids.tobytes()).decode()
    info = {"prompt_tokens": 30, "completion_tokens": 11, "routed_experts": text}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"meta_info": info}))
    trace = load_trace(str(path))
    assert (trace.geometry.num_layers, trace.geometry.top_k) == (5, 4)
    with pytest.raises(ValueError, match="does not say the model's top-k"):
        load_trace(str(FOLDER / "sglang.json"))


def test_show_says_what_a_trace_holds_and_cannot_answer(moecache: Moecache) -> None:
    summary = moecache.json("trace", "show", FOLDER / "lattice.jsonl")
    assert (summary["format"], summary["passes"], summary["cycle"]) == ("lattice", {"decode": 5}, 4)
    answers = {question: why is None for question, why in summary["answers"].items()}
    assert answers["evictions and miss rules that use weights"]
    assert not answers["times, and capacities in bytes"]
    assert not answers["what a prompt costs the cache"]
    listed = moecache("trace", "formats")
    assert all(name in listed for name in trace_formats())


def test_show_names_the_prefetchers_that_a_trace_replays_without_its_gates(
    tmp_path: Path, moecache: Moecache
) -> None:
    names = ('{"name": "score", "percentile": 80.0, "predictor": ""}', '{"predictor": "ab"}')
    writer = TraceWriter(tmp_path, "x", Header(geometry=traces.GEOMETRY, seed=0, proposals=names))
    for event, _ in traces.events(0):
        if event.layer == 0:
            tokens = np.arange(event.num_tokens)
            writer.begin_pass(event.pass_index, event.phase, tokens * 0, tokens)
        writer.add(event.layer, event.experts, event.weights, event.logits, [], [[1], []])
    path = writer.close()
    summary, text = moecache.json("trace", "show", path), moecache("trace", "show", path)
    assert summary["prefetchers"] == ["score (percentile=80.0)"]
    assert summary["answers"]["prefetch by the next layer's gate"] is None
    assert "next layer's gate as recorded: score (percentile=80.0)" in text


NEW_FORMAT = '''
from lm_eval_moecache.trace.formats.base import Pass, TraceFormat, build


class Plain(TraceFormat):
    """One token a line, one layer: ids with spaces between."""

    suffixes = (".txt",)
    holds = "nothing"

    @classmethod
    def sniff(cls, head):
        return head.startswith(b"plain")

    @classmethod
    def read(cls, path, options):
        lines = path.read_text().splitlines()[1:]
        tokens = [[[[int(word) for word in line.split()]]] for line in lines]
        passes = [Pass(experts=ids, first_token=n) for n, ids in enumerate(tokens)]
        return build(path.name, path.stem, passes, options)
'''


@pytest.fixture
def add_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Make `tmp_path` a place of formats, with a trace; return what writes its `plain.py`."""

    def forget() -> None:
        sys.modules.pop("lm_eval_moecache.trace.formats.plain", None)
        trace_formats.cache_clear()

    def write(code: str) -> None:
        (tmp_path / "plain.py").write_text(code)
        forget()

    (tmp_path / "trace.txt").write_text("plain\n3 1\n2 0\n")
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    yield write
    forget()


def test_a_new_format_is_one_file(
    tmp_path: Path, add_format: Callable[[str], None], moecache: Moecache
) -> None:
    add_format(NEW_FORMAT)
    assert "One token a line" in moecache("trace", "formats")
    trace = load_trace(str(tmp_path / "trace.txt"))
    assert trace.columns.experts.tolist() == [[3, 1], [2, 0]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "return [int(line) for _, line in numbered(path)]",
            r"trace trace.txt: line 1: the importer Plain failed: ValueError: invalid literal .*"
            r"'plain'.* \(.*plain.py, line 17\)",
        ),
        (
            'return {}["ids"]',
            r"trace trace.txt: the importer Plain failed: KeyError: 'ids' \(.*plain.py, line 17\)",
        ),
        (
            "return []",
            r"trace trace.txt: the importer Plain failed: TypeError: read returned list. Expected: "
            r"a Trace, as of `build`",
        ),
        ("return build(path.name, path.stem, [], options)", "^trace trace.txt has no rows.$"),
        (
            "return build(path.name, path.stem, in_turn([(7, {})]), options)",
            r"trace trace.txt: .* request 7: a pass has no layer.",
        ),
        (
            'raise ValueError(f"trace {path.name}: my own words")',
            r"^trace trace.txt: my own words$",
        ),
    ],
)
def test_a_third_partys_mistake_is_one_line_that_names_file_line_and_importer(
    tmp_path: Path, add_format: Callable[[str], None], moecache: Moecache, change: str, said: str
) -> None:
    text = NEW_FORMAT.replace("import Pass", "import in_turn, numbered, Pass")
    add_format(text.replace("lines = path", f"{change}\n        lines = path"))
    with pytest.raises(ValueError, match=said):
        load_trace(str(tmp_path / "trace.txt"))
    for command in (["trace", "show"], ["replay"]):
        error = moecache(*command, tmp_path / "trace.txt", code=2)
        assert "Traceback" not in error and error.count("\n") <= 1


def test_a_third_partys_module_that_cannot_be_imported_is_named(
    add_format: Callable[[str], None], moecache: Moecache
) -> None:
    add_format("import no_such_module\n")
    assert "format 'plain' cannot be imported" in moecache("trace", "formats", code=2)


@pytest.mark.parametrize(
    "file", ["counts.coli_usage", "counts_sglang.csv", "counts_imatrix.gguf", "counts_glm.json"]
)
def test_counts_of_engines_become_a_profile(file: str, tmp_path: Path, moecache: Moecache) -> None:
    profile = read_counts(str(FOLDER / file), "trace")
    assert profile is not None
    counts = [[0, 3, 0, 2, 0, 2, 0, 0], [4, 0, 0, 0, 0, 0, 0, 3]]
    assert [list(layer) for layer in profile.counts] == counts
    out = tmp_path / "use.json"
    moecache("profile", "use", FOLDER / file, "--out", out)
    assert json.loads(out.read_text())["counts"] == counts


def test_decayed_counts_are_rounded(tmp_path: Path) -> None:
    """An engine whose counts fade writes fractions; two thirds of a use are one."""
    path = tmp_path / "x.coli_usage"
    path.write_text("-1 2 3\n3 0 0.4\n3 2 0.7\n7 1 2.6\n")
    profile = read_counts(str(path), "trace")
    assert profile is not None and profile.counts == ((0, 0, 1), (0, 3, 0))


def test_a_trace_in_json_is_counted_as_any_other(tmp_path: Path, moecache: Moecache) -> None:
    out = tmp_path / "use.json"
    moecache("profile", "use", FOLDER / "glm_atlas.json", "--out", out)
    counts = json.loads(out.read_text())["counts"]
    assert counts == [np.bincount(IDS[:, layer].ravel(), minlength=8).tolist() for layer in (0, 1)]


def test_files_of_moe_trace_joined_without_headers_are_requests(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text(2 * (FOLDER / "activations_own.csv").read_text())
    assert [r.passes for r in load_trace(str(path)).requests] == [(0, 1, 2), (3, 4, 5)]


def test_counts_of_sglangs_recorder_become_a_profile(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    table = torch.tensor([[[1, 2], [3, 4]], [[10, 20], [30, 40]]])
    torch.save({"logical_count": table, "rank": 0}, tmp_path / "x.pt")
    profile = read_counts(str(tmp_path / "x.pt"), "trace")
    assert profile is not None and profile.counts == ((11, 22), (33, 44))
    assert read_counts(str(FOLDER / "colibri.txt"), "trace") is None
    assert use_of(load_trace(str(FOLDER / "colibri.txt"))).num_layers == 2


# --- shipped traces: complete, routing as published, and written without loss ---


SHIPPED = Path(__file__).resolve().parents[2] / "traces"


def written(trace: Trace, path: Path) -> Trace:
    Parquet.write(trace, path)
    return load_trace(str(path))


def test_a_trace_without_sizes_is_given_those_of_a_model(tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text('{"tok": 0, "layers": [[0, 1], [2, 3]]}\n')
    trace = load_trace(str(file))
    with pytest.raises(ValueError, match="says no sizes"):
        Parquet.write(trace, tmp_path / "bare.parquet")
    sized = with_sizes(trace, load_real_model("OLMoE-1B-7B"))
    reread = written(sized, tmp_path / "sized.parquet")
    assert reread.geometry.expert_bytes == ((12_582_912,),) * 2 and reread.has_sizes


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
    geometry = trace.geometry
    assert (geometry.num_layers, geometry.num_experts, geometry.top_k) == (layers, experts, top_k)
    assert trace.num_passes == passes and trace.has_sizes


@pytest.mark.parametrize(
    ("file", "name"), [("qwen.route.csv", "qwen3-30b-a3b"), ("gemma.route.csv", "gemma-4-26b-a4b")]
)
def test_a_shipped_trace_routes_as_the_published_one(file: str, name: str) -> None:
    published = load_trace(str(traces.published(file)))
    shipped = load_trace(str(SHIPPED / f"{name}.parquet"))
    np.testing.assert_array_equal(shipped.keys, published.keys)
    assert shipped.geometry.expert_bytes == published.geometry.expert_bytes


def test_a_trace_written_again_is_the_same_and_takes_no_more_bytes(tmp_path: Path) -> None:
    shipped, copy = SHIPPED / "olmoe-1b-7b.parquet", tmp_path / "copy.parquet"
    trace, reread = load_trace(str(shipped)), written(load_trace(str(shipped)), copy)
    np.testing.assert_array_equal(reread.columns.weights, trace.columns.weights)
    np.testing.assert_array_equal(reread.keys, trace.keys)
    assert copy.stat().st_size < 1.02 * shipped.stat().st_size


@pytest.mark.parametrize("given", [{"usage": {"prompt_tokens": 5}}, {"prompt_token_ids": [0] * 5}])
def test_rows_of_a_cached_prefix_are_not_taken_from_the_generation(
    given: dict[str, object], tmp_path: Path
) -> None:
    """Of a prompt of five tokens two were in vLLM's cache: its rows are three, of tokens 2 to 4."""
    path = tmp_path / "x.json"
    response = {"routed_experts": IDS.tolist(), "routed_experts_prompt_start": 2, **given}
    path.write_text(json.dumps(response))
    columns = load_trace(str(path)).columns
    first = columns.layer == 0
    assert columns.token[first].tolist() == [2, 3, 4, 5, 6]
    assert [PHASES[phase] for phase in columns.phase[first]] == ["prefill"] * 3 + ["decode"] * 2
