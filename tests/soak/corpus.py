"""Bad inputs in one table: each input, and the words that its refusal must contain.

To add one, add a row, or a line of `commands.txt`. `…` in the words stands for anything between
them; `{models}` holds folders of models that cannot be built.
"""

from __future__ import annotations

import base64
import io
import json
import math
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save

from lm_eval_moecache.algorithms.policy import unmangle
from lm_eval_moecache.algorithms.registry import (
    AXES,
    algorithm_names,
    find_algorithm,
    parameters_of,
)
from lm_eval_moecache.emulate.models import EMULATED_DIR
from lm_eval_moecache.trace.file import COLUMNS
from tests.engine import traces
from tests.records.test_files import LAUGHS
from tests.report.runs import record
from tests.trace.test_formats import FOLDER, IDS
from tests.trace.test_trace import CSV, JSONL, ROUTED


class Bad(NamedTuple):
    """One bad input: a model argument (ours, a draft's, or HFLM's), a file's text, or a command."""

    kind: str
    given: Any
    words: str


def _trace(edit: Callable[[pa.Table], pa.Table] = lambda table: table, **header: Any) -> bytes:
    """Return a recorded trace with changed header fields and an edited table."""
    with tempfile.TemporaryDirectory() as folder:
        path = traces.record(Path(folder))
        table = edit(pq.read_table(path))
        about = json.loads(table.schema.metadata[b"moecache"])
        metadata = {b"moecache": json.dumps({**about, **header}).encode()}
        pq.write_table(table.replace_schema_metadata(metadata), path)
        return path.read_bytes()


def _cell(column: str, change: Callable[[Any], Any], row: int = 41) -> bytes:
    """Return a recorded trace with one value changed."""

    def edit(table: pa.Table) -> pa.Table:
        values = table[column].to_pylist()
        values[row] = change(values[row])
        place = table.column_names.index(column)
        return table.set_column(place, column, pa.array(values, COLUMNS[column]))

    return _trace(edit)


def _columns() -> Iterator[tuple[bytes, str]]:
    """Yield traces with columns that are lacking, mistyped, or wrong in one row."""
    yield _trace(lambda t: t.append_column("layer", t["layer"])), "the column 'layer' appears twice"
    yield _trace(lambda t: t.slice(0, 0)), "has no rows"
    for place, column in enumerate(COLUMNS):
        real = pa.array([1.5] * 81)
        mistyped = _trace(lambda t, at=place, n=column, new=real: t.set_column(at, n, new))
        yield mistyped, f"column '{column}' is double, must be"
        yield _trace(lambda t, n=column: t.drop_columns([n])), f"lacks the column '{column}'"
    for column in ("request", "pass", "token", "layer"):
        yield _cell(column, lambda value: None), f"row 41: {column} is null"
    for column in ("experts", "weights"):
        yield (
            _cell(column, lambda value: value[:1], 80),
            f"row 80: {column} has 1 values, must have 2",
        )
    for expert in (8, 32767, -1, -32768):
        yield _cell("experts", lambda v, n=expert: [n, v[1]], 0), f"row 0: experts is [{expert}, "
    yield _cell("weights", lambda value: [0.4, 0.6]), "row 41: weights … heaviest first"


def arrays_of(**arrays: Any) -> bytes:
    """Return these arrays as an engine's `.npz`."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


USAGE = {"prompt_tokens": 3, "completion_tokens": 3}


def _response(broken: bytes = b"", **changes: Any) -> str:
    """Return a vLLM response with its tokens' experts, broken or with changed fields."""
    file = io.BytesIO()
    np.save(file, IDS)
    array = file.getvalue().replace(broken, b" ") if broken else file.getvalue()
    own = {"routed_experts": base64.b64encode(array).decode()}
    return json.dumps({"choices": [own], "usage": USAGE, **changes})


def _artifact(**header: Any) -> bytes:
    """Return an artifact with a header as another release would write it."""
    told = {"format": 2, "kind": "buddies", "model": "x", "num_layers": 2, "num_experts": 4}
    told |= {"top_k": 2, "router_digest": "ab", "made_from": {}, "versions": {}} | header
    return save({"lists": np.arange(3)}, metadata={"moecache": json.dumps(told)})


LONG = "n" * 300
POLICY = "routing: standard\nprefetch: none\neviction: lru\nmiss: fetch\n"
HARDWARE = (
    "name: x\npeak_flops: 1.0e+12\nmemory_bytes_per_s: 1.0e+11\nlink_bytes_per_s: 1.0e+9\n"
    "link_latency_s: 0\nkernel_overhead_s: 0\nmemory_bytes: 1.0e+10\n"
)
SWEEP = "tasks: tiny_arc\ngrid: {policy: [on_demand, specmd], capacity: [25%, 50%]}\n"
SPACE = "routing: {standard: {}}\nprefetch: {none: {}}\neviction: {lru: {}}\nmiss: {fetch: {}}\n"
BOARD = "title: x\ncolumns: [policy]\n"
CLAIMS = """title: x
about: x
claims:
- id: A1
  claim: x
  where: x
  regime: x
  why: x
  parts:
  - {what: x, runs: results, metric: quiz, where: {policy: on_demand}, form: value, expect: {below: 1}}
  - {what: y, rows: {file: x.json, new: a, old: b, unit: layers, model: m}, expect: {above: 0, below: 2}}
"""
USE = {
    "format": 1,
    "kind": "use",
    "model": "m",
    "num_layers": 2,
    "num_experts": 2,
    "counts": [[1, 2], [3, 4]],
}
ATLAS = (FOLDER / "glm_atlas.json").read_text()
EMULATED = (EMULATED_DIR / "OLMoE-1B-7B.yaml").read_text()
SOUND = [("policy", POLICY), ("hardware", HARDWARE), ("sweep", SWEEP), ("space", SPACE), ("board", BOARD)]  # fmt: skip
THOUSAND = f"[{', '.join(map(str, range(1000)))}]"

PATHS = ("policy", "hardware", "trace", "trace_keep", "encoded_dir", "store_dir", "emulate", "warm")
ARGUMENTS: list[tuple[str, Any, str]] = [
    ("capacity", "1_0%", "capacity='1_0%' is not a capacity"),
    *(("capacity", value, "is not a capacity … 30/layer") for value in ("\u0661\u0662%", "\u0661/layer", "1e30", 1e30, math.inf, 10**400, True, -1, {}, "1e30GB")),
    *(("capacity", text, f"capacity={text!r} is not a capacity … '5%' … 30/layer") for text in ("-5%", "0%", "101%", "100.1%", "nan%", "inf%", "%", "5%%", "0/layer", "-1/layer", "1.5/layer", "/layer", "x/layer", "5 layers")),
    *(("capacity", text, f"capacity={text!r} is not a capacity … '5%' … 30/layer") for text in ("0", "-3", "0.2", "51.5", "0.0", "1e999", "9e999GB", "big", "", "None", "5GB/s")),
    ("capacity", "none.json", "there is no such file"),
    ("capacity", LONG + ".json", "capacity="),
    *(("bandwidth", text, f"bandwidth={text!r} … reads as bits per second … capital B") for text in ("5Gb/s", "40Gb/s", "800Mb", "1Gib/s", "9kb/s")),
    *(("bandwidth", text, f"bandwidth={text!r} … '5GB/s'") for text in ("0", "5e9", "5/s", "5kB/s", "25G")),
    *(("bandwidth", text, f"bandwidth={text!r} … 5GB/s") for text in ("0GB/s", "0.5B/s", "fast", "-1GB/s", "9e999GB/s")),
    *(("bandwidth", value, "bandwidth=") for value in ("infGB/s", "1e30GB/s", "1_0GB/s", -5, [])),
    ("bandwidth", "5Gb/h", "bandwidth='5Gb/h' … KiB"),
    ("bandwidth", "16000", "is 16000 GB/s, more than any machine has. Did you mean '16000MB/s'"),
    ("bandwidth", "3TB/s", "more than any machine has … at most 2000GB/s"),
    ("bandwidth", "5XB/s", "bandwidth='5XB/s' … GiB"),
    ("bandwidth", 5e9, "has no unit … Did you mean '5GB/s'"),
    ("hardware", "a100-5gbp", "hardware='a100-5gbp' … Did you mean 'a100-5GBps'"),
    ("hardware", "a100", "hardware='a100' could be any of several … a100-40gb"),
    ("hardware", "nowhere/mine.yaml", "hardware='nowhere/mine.yaml' … no such file"),
    ("policy", "nowhere/mine.yaml", "policy='nowhere/mine.yaml' … no such file"),
    ("routing", "standart", "routing='standart' … Did you mean 'standard'?"),
    ("evict.order", "fifo", "'evict.order' … 'fifo'"),
    ("hardware", LONG + ".yaml", "there is no such file"),
    ("hardware", LONG, "hardware="),
    ("hardware", "a\0b.yaml", "hardware="),
    ("policy", "specmdd", "policy='specmdd' … Did you mean 'specmd' … which `moecache policies` lists"),
    *(("policy", value, "policy=") for value in (LONG, "../policies", 7)),
    ("policy", LONG + ".yaml", "there is no such file"),
    ("polcy", "specmd", "Did you mean 'policy'"),
    ("seed", -1, "seed=-1 … 0 or more"),
    *(("seed", value, f"seed={value!r}") for value in (1.0, 1.5, True, math.nan, "x")),
    ("seed", 10**400, "seed="),
    *(("trace", value, "names no folder") for value in ("", " ")),
    *(("trace", value, "trace=") for value in ("/dev/null/x", "a\0b", "/proc/" + LONG)),
    ("clock", 3, "clock="),
    ("clock", "virtuel", "clock='virtuel' … Did you mean 'virtual'?"),
    ("store", "disc", "Did you mean 'disk'"),
    ("scoring", "serial", "scoring='serial' … parallel"),
    ("scoring", "scan", "scoring='scan' … capacity='25%' … '30/layer'"),
    ("execute", "as_they_arive", "execute='as_they_arive' … Did you mean 'as_they_arrive"),
    ("attention", "context", "attention='context' needs emulate= … attention=none"),
    ("cache_reset", "always", "Allowed: never, request"),
    ("phases", "decod", "phases='decod' … Did you mean 'decode'? … all"),
    ("phases", ["all"], "phases="),
    ("eviction", "lruu", "eviction='lruu' … Did you mean 'lru'? … which `moecache policies` lists"),
    ("eviction", None, "eviction='none' … lru"),
    ("eviction", "lhu", "miss='fetch' cannot be combined with eviction='lhu'"),
    ("eviction", "os.system", "eviction"),
    ("eviction", "no.such.module", "cannot be imported"),
    ("eviction", "lm_eval_moecache.algorithms.eviction.base.EvictionAlgorithm", "not a subclass"),
    ("eviction", {}, "eviction="),
    ("eviction", {"name": "lru", "class_path": "x.y"}, "eviction="),
    ("eviction", "belady", "needs to know the future"),
    *(("prefetch.overfetch", value, "prefetch.overfetch") for value in (math.inf, math.nan, 10**400)),
    ("prefetch.depth", 1e30, "prefetch.depth"),
    ("eviction.init_args", 7, "eviction.init_args"),
    ("draft", "self:int4", "moecache-spec"),
    ("draft_tokens", 3, "moecache-spec"),
    ("precision", "int5", "Did you mean 'int"),
    ("precision", "int2/16", "precision='int2/16' is not known"),
    ("precision", "", "precision"),
    ("precision", "int4:int8", "is not in order"),
    ("precision", "int8:int4:nf4", "names 'int4' twice"),
    ("store", "disk", "store='disk' … clock=wall"),
    ("trace_keep", "rout", "Did you mean 'routing'"),
    ("trace_keep", "routing", "trace_keep='routing'"),
    ("encoded_dir", "x", "encoded_dir='x' has no effect without precision="),
    ("encoded_dir", "", "encoded_dir=''"),
    ("store_dir", "x", "store_dir='x' … clock=wall"),
    ("link", "fif", "Did you mean 'fifo'"),
    ("link", True, "link="),
    ("emulate", "OLMoE-1B-7", "Did you mean 'OLMoE-1B-7B'"),
    ("emulate", "none.yaml", "emulate='none.yaml': there is no such file"),
    *(("emulate", value, "emulate=") for value in (7, LONG, "a\0b.yaml")),
    ("emulate", "", "emulate=''"),
    ("warm", "", "warm='' names no file"),
    ("warm", "none.parquet", "warm='none.parquet': there is no such file"),
    *(("warm", value, "warm=") for value in (LONG, 7, "a\0b.json")),
    *((key, value, key) for key in PATHS for value in ([], [[]], {}, {"a": 1}, True, math.nan)),
]  # fmt: skip
WALL = {"clock": "wall"}
TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"policy": "specmd", "phases": "decode"}, "phases='decode' has no effect"),
    ({"eviction": "lru", "eviction.order": "fifo"}, "eviction.order='fifo' … is not used by eviction=lru … Allowed: none"),
    ({"eviction": "least_stale", "eviction.ordr": "fifo"}, "eviction.ordr='fifo' … Did you mean 'order'?"),
    ({"eviction": "least_stale", "eviction.order": "lifo"}, "eviction.order='lifo' … last_use … fifo"),
    ({"policy": "on_demand", "eviction.": 1}, "eviction.=1 names no parameter"),
    ({"policy": "buddymoe", "prefetch": "none", "miss.late": "await"}, "miss.late='await' has no effect with prefetch='none'"),
    ({"prefetch": "score", "prefetch.percentile": "most"}, "prefetch.percentile='most' … prefetch=score"),
    ({"prefetch": "next_gate", "prefetch.depth": 1.5}, "prefetch.depth=1.5"),
    ({"eviction": "lru", "eviction.seed": 3}, "eviction.seed=3 … is not used"),
    ({"policy": "on_demand", "precision": "int8:int4", "miss": "cascade", "scoring": "scan", "capacity": "4/layer"}, "scoring='scan' cannot be combined with miss='cascade'"),
    ({"execute": "as_they_arrive", "precision": "int8:int4"}, "precision='int8:int4' has 2"),
    ({"attention": "context", "emulate": "OLMoE-1B-7B", "scoring": "scan", "policy": "on_demand", "capacity": "2/layer"}, "attention='context' … scoring=parallel"),
    ({**WALL, "policy": "on_demand", "scoring": "scan", "capacity": "2/layer"}, "scoring='scan' cannot be combined with clock='wall'"),
    ({**WALL, "link": "fifo"}, "link='fifo' cannot be combined with clock='wall'"),
    ({**WALL, "hardware": "h200"}, "hardware='h200' … bandwidth"),
    ({**WALL, "store_dir": "x"}, "store_dir='x' … store=disk"),
    ({**WALL, "execute": "as_they_arrive"}, "execute='as_they … clock=virtual"),
    ({**WALL, "reads_per_expert": 2}, "reads_per_expert=2 … clock=virtual"),
    ({**WALL, "attention": "context"}, "attention='context' … clock=virtual"),
    ({**WALL, "store": "tape"}, "store='tape' … disk, ram"),
    ({**WALL, "bandwidth": "5e9"}, "bandwidth='5e9' … '5GB/s'"),
    ({**WALL, "store": "disk", "store_dir": "/dev/null/x"}, "store_dir='/dev/null/x' cannot be written to"),
    ({"encoded_dir": "/dev/null/x", "precision": "int8"}, "encoded_dir='/dev/null/x' cannot be written to"),
]  # fmt: skip
"""Incompatible arguments."""
DRAFTED: list[tuple[str, Any, str]] = [
    ("draft_tokens", 0, "draft_tokens=0 … 1 or more"),
    ("draft_tokens", "two", "draft_tokens='two' … whole number"),
    ("draft_token", 2, "'draft_token' … Did you mean 'draft_tokens'?"),
    ("precision", "int4", "draft='self:int4' is made of the target's own weights"),
    *(("draft_tokens", value, f"draft_tokens={value!r}") for value in (10**6, 2.5, math.inf, True)),
    ("draft_tokens", 10**400, "draft_tokens="),
]
HOST: list[tuple[str, Any, str]] = [
    *(("batch_size", value, f"batch_size={value!r} must be a whole number") for value in ("x", 0, -1, 2.5, True, "1_0", [2], 10**12)),
    *(("batch_size", value, f"batch_size={value!r} is not known … auto:N") for value in ("autos", "auto:x")),
    *(("max_length", value, f"max_length={value!r} must be a whole number") for value in ("x", 1, -1, math.nan)),
    ("experts_implementation", "egaer", "experts_implementation='egaer' is not known. Did you mean 'eager'"),
    *(("experts_implementation", value, f"experts_implementation={value!r} is not known") for value in ("moecache", 7)),
    ("quantization_config", "x", "quantization_config='x' must be a mapping"),
    ("attn_implementation", "sdap", "Did you mean 'sdpa'"),
    ("dtype", "bfloat61", "dtype='bfloat61' is not known. Did you mean 'bfloat16'"),
    *((key, value, f"{key}={value!r} is not known") for key, value in (("dtype", "int8"), ("softmax_dtype", "float61"))),
    ("backend", "casual", "Did you mean 'causal'"),
    ("trust_remote_code", "yes", "trust_remote_code='yes' must be true or false"),
    ("add_bos_token", 3, "add_bos_token=3 must be true or false"),
    ("device", "cud", "device='cud' is not the name of a device"),
    ("tokenizer", "./none", "tokenizer='./none': there is no such folder"),
    ("peft", "", "peft='': there is no such folder"),
    *(("pretrained", name, "there is no such folder") for name in ("./none", "/none/none", "", "tiny/", "a\0b", LONG)),
    ("pretrained", "no/such", "pretrained='no/such' cannot be read"),
    ("pretrained", "{models}/negative", "no model can be built of its config.json"),
    ("pretrained", "{models}/binary", "pytorch_model.bin is cut short, damaged"),
    ("pretrained", "tinyy", "pretrained='tinyy' cannot be read"),
]  # fmt: skip
"""Bad HFLM arguments, on which it would fail only after loading the weights."""
UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"prefetch": "score", "prefetch.percentile": 101}, "percentile=101 … at most 100"),
    ({"prefetch": "score", "prefetch.percentile": 0.8}, "percentile=0.8 … 80 for the 80th, not 0.8"),
    ({"prefetch": "next_gate", "prefetch.overfetch": 0}, "prefetch.overfetch=0 … above 0"),
    ({"prefetch": "next_gate", "prefetch.depth": 0}, "prefetch.depth=0 … 1 or more"),
    ({"prefetch": "next_gate", "prefetch.depth": 99}, "depth=99 … past the last of the"),
    ({"capacity": "0.01%"}, "capacity='0.01%' … too small for one expert of 36864 bytes"),
    ({"capacity": "36000B"}, "capacity='36000B' … too small for one expert of 36864 bytes"),
    ({"capacity": "30000B", "dtype": "float32"}, "'30000B' … one expert of 36864 bytes"),
    ({"capacity": "65/layer"}, "capacity='65/layer' … more than the 64 experts"),
    *(({"policy": "on_demand", **given}, words) for given, words in (
        ({"precision": "int8/g64"}, "has no groups"),
        ({"precision": "int2/g7"}, "g8, g16"),
        ({"precision": "int2/g1024"}, "the group size must be one of g8, g16"),
        ({"precision": "int4", "miss": "cascade"}, "precision='int4' is the only one stored"),
        ({"miss": "fetch_lowest"}, "precision='bf16' is the only one stored"),
        ({"precision": "int8:int4", "miss": "cascade", "miss.t2": 0.8}, "miss.t2=0.8 has no"),
        ({"precision": "int4", "device_map": "auto"}, "device_map='auto' cannot be combined with"),
        ({"precision": "int8:int4", "capacity": "10B"}, "too small for one expert of"),
        ({"prefetch": "draft", "draft_tokens": 2}, "draft_tokens=2 … drafts no tokens"),
        ({"prefetch": "draft", "draft": "prompt_lookup"}, "no attention outputs"),
        ({"prefetch": "draft", "streams": 2}, "follows one request at a time"),
        ({"draft": "tiny"}, "draft='tiny' is for … moecache-spec"),
        ({"draft_tokens": 2}, "draft_tokens=2 is for … moecache-spec"),
        ({"prefetch": "draft", "scoring": "scan", "capacity": "8/layer"}, "scoring='scan' cannot be combined with"),
    )),
]  # fmt: skip
"""Settings that do not fit the shipped model: checked before its weights are loaded."""
SPEC: list[tuple[dict[str, Any], str]] = [
    ({"streams": 2, "draft": "tiny"}, "streams=2 … one request at a time"),
    ({"draft": "nowhere/at-all"}, "draft='nowhere/at-all' … prompt_lookup"),
    ({"draft": "self:int5"}, "self:int5 … Did you mean … int4"),
    ({"draft": "prompt_lookup"}, "draft='prompt_lookup' … prefetch='draft' … folder"),
    ({"prefetch.cutoff": 9}, "prefetch.cutoff=9 … must be 0 or more … 8 MoE layers"),
    ({"prefetch.cutoff": "all"}, "prefetch.cutoff='all' … auto"),
    ({"prefetch.critical": 65}, "prefetch.critical=65 … 64"),
]
"""Settings of drafts that do not fit the shipped model under `sp_moe`."""
ON_WALL: list[tuple[str, Any, str]] = [
    ("parallelize", True, "parallelize=True … accelerate launch"),
    ("load_in_8bit", True, "load_in_8bit"),
    ("experts_implementation", "eager", "'eager' … grouped_mm"),
]
FILES: list[tuple[str, str, str]] = [
    *((kind, LAUGHS, "more than 100000 values") for kind in ("policy", "hardware", "sweep", "space", "board")),
    *((kind, "", "must hold a mapping") for kind in ("policy", "hardware", "sweep", "board")),
    *((kind, "- a\n", "must hold a mapping") for kind in ("policy", "hardware", "sweep", "space", "board")),
    *((kind, text, said) for kind in ("policy", "hardware", "sweep", "space", "board") for text, said in (('a: !!bool "x"', "a tag that does not fit its text 'x'"), ('name: !!timestamp "x"', 'line 1: failed to construct timestamp from "x"'), ("a: !!int {}", "line 1: expected a scalar node"))),
    *((kind, 'name: "a\\ud800b"', "is half of a surrogate pair, not a character") for kind in ("policy", "hardware", "sweep", "space", "board")),
    ("sweep", SWEEP + "include_path: no/such\n", "include_path='no/such': there is no such folder"),
    ("sweep", SWEEP + "model: ''\n", "model='' is not known"),
    ("sweep", SWEEP + "base: {emulate: true}\n", "emulate=True must be text"),
    *((kind, "a: b: c", "not readable YAML") for kind in ("policy", "hardware", "sweep", "space", "board")),
    *((kind, "1: 2\n", "") for kind in ("policy", "hardware", "sweep", "space", "board")),
    *((kind, "{" * 5000, "nested too deeply") for kind in ("policy", "hardware", "sweep", "space", "board")),
    ("policy", POLICY + "miss: drop\n", 'duplicate key "miss"'),
    ("policy", POLICY + "mis: drop\n", "Did you mean 'miss'"),
    *((kind, "Xyz: 1\n" + sound, "'Xyz' is not known") for kind, sound in SOUND),
    *((kind, "'[]': 1\n" + sound, "'[]' is not known") for kind, sound in SOUND),
    *((kind, "str: 1\n" + sound, "'str' is not known") for kind, sound in SOUND),
    ("policy", POLICY.replace("miss: fetch\n", ""), "lacks 'miss'"),
    ("policy", POLICY.replace("lru", "[lru]"), "eviction"),
    ("policy", POLICY.replace("lru", "{name: lru, order: fifo}"), "not used by"),
    ("policy", POLICY.replace("lru", "{nam: lru}"), "eviction={'nam': 'lru'} … `name`"),
    ("policy", POLICY.replace("lru", "{class_path: no.such.Thing}"), "eviction.class_path='no.such.Thing' … cannot be imported"),
    ("policy", POLICY.replace("lru", "{class_path: pathlib.Path}"), "eviction.class_path='pathlib.Path' … is not a subclass"),
    ("policy", POLICY + "phases: [all]\n", "phases="),
    ("policy", POLICY.replace("lru", "7"), "eviction=7 must be"),
    ("policy", POLICY.replace("none", "{name: next_gate, overfetch: .inf}"), "overfetch"),
    ("policy", POLICY + "phases: decod\n", "Did you mean 'decode'"),
    ("policy", POLICY + "name: [1]\n", "name=[1] must be text"),
    ("hardware", HARDWARE.replace("link_latency_s: 0", "link_latency_s: .inf"), "link_latency_s=inf"),
    ("hardware", HARDWARE.replace("link_latency_s: 0", "link_latency_s: -1"), "link_latency_s=-1"),
    ("hardware", HARDWARE.replace("1.0e+12", "true"), "peak_flops=True"),
    ("hardware", HARDWARE.replace("1.0e+12", "1" + "0" * 400), "peak_flops="),
    ("hardware", HARDWARE.replace("1.0e+12", "'1_0'"), "peak_flops='1_0'"),
    ("hardware", HARDWARE.replace("1.0e+9", ".nan"), "link_bytes_per_s=nan"),
    ("hardware", HARDWARE.replace("1.0e+9", "0"), "link_bytes_per_s=0.0 must be above 0"),
    ("hardware", HARDWARE.replace("name: x", "name: 3"), "name=3 must be text"),
    *(("hardware", HARDWARE.replace("1.0e+12", text), words) for text, words in (("0", "peak_flops=0.0 must be above 0"), ("soon", "peak_flops='soon' is not a number"), ("[1]", "peak_flops=[1] is not a number"))),
    ("hardware", HARDWARE.replace("peak_flops: 1.0e+12\n", ""), "lacks 'peak_flops'"),
    ("hardware", HARDWARE.replace("peak_flops", "peak_flop"), "'peak_flop' is not known. Did you mean 'peak_flops'"),
    ("hardware", "just text", "hardware= … x.yaml"),
    *(("hardware", HARDWARE.replace(f"{key}: {was}", f"{key}: {value}"), f"{key}={value} … {meant}") for key, was, value, meant in (("memory_bytes", "1.0e+10", 24, "24e+9"), ("link_bytes_per_s", "1.0e+9", 25, "25e+9"), ("peak_flops", "1.0e+12", 82.6, "82.6e+12"), ("link_latency_s", "0", 10, "10e-6"))),
    *(("hardware", HARDWARE + text + "\n", text.partition(":")[0]) for text in ("link_efficiency: 1.2", "link_efficiency: 0.0", "link_lanes: 0")),
    *(
        ("hardware", HARDWARE + f"{key}: {value}\n", f"{key}=")
        for key in ("host_flops", "host_memory_bytes_per_s", "layer_overhead_s", "pass_overhead_s", "wait_overhead_s")
        for value in ("-1", ".inf", ".nan", "true", "x", "[1]")
    ),
    ("sweep", "traces: none.parquet\n", "there is no such file"),
    ("sweep", "traces: '*.nothing'\n", "the suffix='.nothing' is not known"),
    ("sweep", "traces: 7\n", "traces=7 must be a name or a list of names"),
    ("sweep", "traces: [[x]]\n", "traces="),
    ("sweep", "traces: []\n", "names no tasks"),
    ("sweep", "traces: x.csv\ntasks: tiny_arc\n", "together with `traces`"),
    ("sweep", "traces: x.csv\nlimit: 2\n", "together with `traces`"),
    ("sweep", "traces: x.csv\nmodel: moecache\n", "together with `traces`"),
    ("sweep", "traces: x.csv\nbase: {tasks: tiny_arc}\n", "has no meaning in a sweep over"),
    ("sweep", "traces: x.csv\nbase: {limit: 2}\n", "has no meaning in a sweep over"),
    ("sweep", "traces: x.csv\nruns: [{limit: 4}]\n", "limit=4 has no meaning in a sweep over `traces`"),
    ("sweep", "traces: x.csv\nbase: {pretrained: tiny}\n", "the key='pretrained' is not known"),
    ("sweep", "traces: x.csv\nbase: {evicton: lru}\n", "evicton … Did you mean 'eviction'"),
    ("sweep", "traces: x.csv\nbase: {clock: wall}\n", "the key='clock' is not known"),
    ("sweep", "traces: x.csv\nbounds: [belady, orcle]\n", "Did you mean 'oracle'"),
    ("sweep", "tasks: tiny_arc\nbase: {eviction: belady}\n", "needs to know the future"),
    *(("claims", CLAIMS + f"alpha: {value}\n", "alpha=") for value in ("0", "1", "-1", ".nan", ".inf", "true", "'0.05'")),
    ("claims", CLAIMS + "alhpa: 0.05\n", "Did you mean 'alpha'"),
    ("claims", CLAIMS.replace("id: A1", "id: a1"), "id='a1'"),
    ("claims", CLAIMS.replace("{below: 1}", "{}"), "must have `above`, `below` or both"),
    ("claims", CLAIMS.replace("{below: 1}", "{belw: 1}"), "Did you mean 'below'"),
    ("claims", CLAIMS.replace("{below: 1}", "{below: .nan}"), "below=nan"),
    ("claims", CLAIMS.replace("{below: 1}", "{below: '1'}"), "below='1'"),
    ("claims", CLAIMS.replace("{below: 1}", "{below: 1, above: 1}"), "`above` smaller than `below`"),
    ("claims", CLAIMS.replace("form: value", "form: valu"), "Did you mean 'value'"),
    ("claims", CLAIMS.replace("form: value", "form: ratio"), "must have `versus`"),
    ("claims", CLAIMS.replace("runs: results, ", ""), "one of `runs`, `rows` and `cells`"),
    ("claims", CLAIMS.replace("runs: results", "runs: results, cells: x"), "one of `runs`, `rows` and `cells`"),
    ("claims", CLAIMS + CLAIMS.partition("claims:\n")[2], "has A1 twice"),
    ("claims", "title: x\nabout: x\nclaims: []\n", "must not be empty"),
    *(("rows", text, "rows") for text in ('{"rows": []}', '{"rows": 7}', '{"rows": [7]}', '{"rows": [{"a": [1]}]}', '{"rows": [{"a": 1}, {"b": 1}]}')),
    *(("use", json.dumps({**USE, **change}), f"warm= … x.json … {words}") for change, words in (({"counts": [[1, 2], [3]]}, "must have num_layers=2 of num_experts=2"), ({"counts": [[1, -2], [3, 4]]}, "counts.0.1=-2 must be"), ({"kind": "uses"}, "kind"), ({"countz": []}, "countz"))),
    *(("use", text, "x.json") for text in ("[]", "{}", '{"format": 2}', "7", '{"counts": [[-1]]}')),
    *(("sizes", text, "x.json") for text in ("[]", "{}", "7", *(f'{{"experts_per_layer": {n}}}' for n in ("[]", "[0]", "[true]", "[1.5]", "7", "[1e30]")))),
    ("emulated", "", "must hold a mapping"),
    ("emulated", "hidden_size: 8\n", "lacks num_local_experts or num_experts"),
    ("emulated", "- 1\n", "mapping"),
    ("emulated", EMULATED.replace("hidden_size: 2048", "hidden_size: many"), "hidden_size"),
    ("emulated", EMULATED.replace("num_hidden_layers: 16", "num_hidden_layers: 100000000"), "num_hidden_layers"),
    ("emulated", EMULATED + "mlp_only_layers: 3\n", "mlp_only_layers=3 must be a list"),
    ("emulated", EMULATED + "num_expert: 64\n", "'num_expert' is not known. Did you mean 'num_experts'"),
    ("emulated", EMULATED + "quantization_config: {quant_method: mine}\n", "quant_method='mine'"),
    *(("emulated", EMULATED.replace("num_attention_heads: 16", f"num_attention_heads: {n}"), "num_attention_heads") for n in (0, -1, "x", ".inf", "true", 10**40)),
    *(("emulated", EMULATED.replace("num_experts: 64", f"num_experts: {n}"), "num_experts") for n in (0, -1, 7, 10**9, "[]")),
    ("emulated", EMULATED + "expert_bits: .inf\n", "expert_bits"),
    ("emulated", EMULATED + "first_k_dense_replace: 99\n", "none of its 16 layers has experts … first_k_dense_replace"),
    ("hardware", HARDWARE + "name: y\n", 'duplicate key "name"'),
    *(("sweep", SWEEP + f"limit: {n}\n", f"limit={n!r} must be a whole number of documents") for n in ("1:30", "1,0")),
    *(("sweep", SWEEP + f"limit: {n}\n", f"limit={told} must be") for n, told in (("ten", "'ten'"), (-1, -1), (0, 0), (".nan", "nan"), (2.5, 2.5), ("'3'", "'3'"))),
    *(("sweep", SWEEP + f"num_fewshot: {n}\n", f"num_fewshot={told} must be") for n, told in ((-1, -1), ("x", "'x'"))),
    ("sweep", SWEEP + "base: {gen_kwargs: 7}\n", "gen_kwargs=7 must be"),
    ("sweep", SWEEP + "base: {limit: ten}\n", "limit='ten' must be"),
    ("sweep", SWEEP + "base: {num_fewshot: -1}\n", "num_fewshot=-1 must be"),
    ("sweep", SWEEP + "base: {apply_chat_template: 7}\n", "apply_chat_template"),
    *(("sweep", SWEEP + f"jobs: {n}\n", f"jobs={told} must be") for n, told in ((0, 0), (1.5, 1.5), ("true", True))),
    ("sweep", SWEEP + "executor: rey\n", "Did you mean 'ray'"),
    *(("sweep", SWEEP + f"executor: {name}\nexecutor_options: {{{option}: x}}\n", f"executor_options='{option}'") for name, option in (("submitit", "local_setup"), ("submitit", "slurm_setup"), ("ray", "runtime_env"), ("local", "mem_gb"))),
    ("sweep", SWEEP + "grd: {}\n", "Did you mean 'grid'"),
    ("sweep", SWEEP + "tasks: other\n", 'duplicate key "tasks"'),
    ("sweep", SWEEP + "views: [{titel: x}]\n", "Did you mean 'title'"),
    ("sweep", SWEEP + "views: [{rows: 7}]\n", "views.0.rows=7 must be"),
    ("sweep", SWEEP + "views: 7\n", "views=7 must be a list"),
    ("views", SWEEP + "figures: [{name: f, panels: [{x: capacity, y: mis_rate}]}]\n", "column 'mis_rate' … Did you mean 'miss_rate'"),
    ("sweep", SWEEP + "figures: [{name: x}]\n", "lacks 'figures.0.panels'"),
    ("sweep", SWEEP + "figures: [{name: x, panels: []}]\n", "must not be empty"),
    ("sweep", SWEEP + "figures: [{name: ../x, panels: [{x: a, y: b}]}]\n", "figures.0.name"),
    ("sweep", SWEEP + "figures: [{name: x, panels: [{x: a, z: b}]}]\n", "field='z' is not known"),
    *(("views", SWEEP + f"views: [{text}]\n", words) for text, words in (("{title: A, rows: polcy}", "'A': rows or columns: column 'polcy'"), ("{rows: policy, values: [mis_rate]}", "Did you mean 'miss_rate'"), ("{values: [tok_per_s], sort: ['toks:desc']}", "column 'toks'"), ("{where: {capacty: 5%}}", "Did you mean 'capacity'"))),
    *(("views", SWEEP + f"figures: [{{name: f, {text}]}}]\n", words) for text, words in (("panels: [{x: seed, y: tiny_arcs}", "column 'tiny_arcs'"), ("group: polic, panels: [{x: a, y: b}", "column 'polic'"))),
    ("sweep", SWEEP + "name: ''\n", "name='' must not be empty"),
    ("sweep", SWEEP + f"name: {LONG}\n", "name="),
    ("sweep", SWEEP + "model: moecach\n", "Did you mean 'moecache'"),
    ("sweep", SWEEP + "base: [1]\n", "base=[1] must be a mapping"),
    ("sweep", "grid: {policy: specmd}\n", "names no tasks"),
    ("sweep", "tasks: 3\n", "tasks=3"),
    ("sweep", "tasks: x\ngrid: policy\n", "grid='policy'"),
    ("sweep", f"tasks: x\ngrid: {{a: {THOUSAND}, b: {THOUSAND}, c: {THOUSAND}}}\n", "make 1000000000 cells"),
    ("sweep", "tasks: x\ngrid: &g " + "{a: " + THOUSAND + "".join(f", {c}: {THOUSAND}" for c in "bcdefgh") + "}\n", "cells"),
    ("sweep", "tasks: x\ngrid: {policy: []}\n", "leaves no combination"),
    ("sweep", "tasks: x\nruns: [{capacity: 5%}]\ngrid: {capacity: [25%]}\n", "capacity is in `runs` (capacity='5%') and in `grid`"),
    ("space", SPACE.replace("lru", "lruu"), "Did you mean 'lru'"),
    ("space", SPACE.replace("{standard: {}}", "{}"), "must map algorithms"),
    ("space", SPACE.replace("{standard: {}}", "{cumsum: {p: {low: 1, high: .inf}}}"), "must be a list of choices"),
    ("space", SPACE.replace("{standard: {}}", "{cumsum: {p: {low: 0, high: 1, log: true}}}"), "must be a list of choices"),
    ("space", SPACE.replace("{standard: {}}", "{cumsum: {p: [[1]]}}"), "must be a list of choices"),
    ("space", SPACE.replace("{standard: {}}", "{cumsum: {p: {low: 2, high: 1}}}"), "low not above high"),
    ("space", SPACE.replace("{standard: {}}", "{cumsum: {q: [1]}}"), "is not known"),
    ("space", SPACE + "mis: {}\n", "Did you mean 'miss'"),
    ("space", SPACE.replace("{standard: {}}", "{cache_prior: {lamda: [1]}}"), "Did you mean 'lambda'"),
    ("space", SPACE.replace("{standard: {}}", "{cache_prior: {lambda: []}}"), "routing.cache_prior.lambda=[]"),
    ("space", SPACE.replace("{standard: {}}", "{cache_prior: {top_j: {low: 0, high: topk}}}"), "top_k"),
    ("glm_atlas.json", ATLAS.replace("export/v2", "export/v3"), "must be routing-trace-export/v2"),
    ("glm_atlas.json", ATLAS.replace('"end_row": 5', '"end_row": 6'), "prompt 0 has rows 0 to 6, 3 of them prefill, of 5"),
    *(("glm_atlas.json", ATLAS.replace(key, "of_another"), f"lacks {key!r}") for key in ("conditional", "executed_topk")),
    *(("vllm.json", _response(usage=usage), "does not say how many tokens its prompt and its answer have … `usage`") for usage in (None, {"prompt_tokens": 3}, {"completion_tokens": 3})),
    ("vllm.json", _response(num_prompt_tokens=9), "has 5 rows of routing, from token 0 on, of 9 tokens of the prompt and 3 generated … 6 are missing"),
    ("vllm.json", _response(num_prompt_tokens=-1), "num_prompt_tokens=-1 must be"),
    ("vllm.json", _response(usage={**USAGE, "completion_tokens": 1}), "2 are too many"),
    ("vllm.json", _response(usage={"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}), "8 are missing; 8 tokens of the prompt came from a cached prefix … routed_experts_prompt_start"),
    ("vllm.json", _response(routed_experts_prompt_start=4), "from token 4 on"),
    ("vllm.json", _response(choices=[{"routed_experts": IDS.tolist()}] * 2), "rows of 6 generated tokens, but `usage` counts 3"),
    ("vllm.json", _response(choices=[{"routed_experts": np.tile([1, 2, 9], (5, 4, 1)).tolist()}]), "these hold one number in every row, as those of shared experts do … 2 (9) … --top_k"),
    ("vllm.json", _response(choices=[7], routed_experts=[]), "its choices must be objects"),
    ("vllm.json", _response(choices=[{"routed_experts": "!!"}]), "routed_experts is not readable"),
    ("vllm.json", _response(broken=b"}"), "routed_experts is not readable: … EOF in multi-line"),
    *(("vllm.json", json.dumps({"nvext": {"routed_experts": given}, "usage": USAGE}), words) for given, words in (({"data": "", "shape": [0, 2, 2]}, "lacks 'dtype'"), ({"data": "AQU=", "dtype": "uint8", "shape": [1, 1, 3]}, "cannot reshape"))),
    *(("vllm.json", json.dumps({"meta_info": {**USAGE, "routed_experts": given}}), words) for given, words in (("AAAA", "is not readable: buffer size must be a multiple"), ("AQAAAA==", "is 1 ids without their shape … --model NAME"))),
    ("jsonl", '{"type": "meta", "layers_logged": [0], "top_k": 2}\n', "is a log of VLLM_LOG_MOE … --enable-return-routed-experts"),
    ("vllm.json", '{"hello": 1}', "which no format of"),
    ("jsonl", '{"layer_idx": 0, "token_idx": 0, "selected_ids": [-1, 2]}', "line 1: experts is [-1, 2], must hold 2 whole numbers"),
    ("jsonl", '{"layer_idx": true, "token_idx": 0, "selected_ids": [1, 2]}', "line 1: layer_idx=True must be"),
    ("jsonl", '{"layer_idx": 0, "token_idx": 0, "selected_ids": [true, 2]}', "line 1: experts is [True, 2], must hold 2 whole"),
    ("jsonl", '{"layer_idx": 0, "token_idx": 0, "selected_ids": [1, 2], "gate_weights": [true, 0.5]}', "one weight, a number"),
    ("jsonl", '{"layer_idx": 0, "token_idx": 0, "selected_ids": [1, 2], "gate_weights": [-0.5, 0.5]}', "weights is [-0.5, 0.5], must be 0 or more"),
    ("jsonl", "".join(f'{{"layer_idx": 0, "token_idx": {token}, "selected_ids": [1, 2]}}\n' for token in (0, 1, 3)), "line 3, layer 0, token 3: token is 3 after 1: one is missing"),
    ("vllm.json", '{"num_prompt_tokens": 1, "token_ids": [1, 2], "routed_experts": [[[1, 2]], [[true, 2]]]}', "routed_experts holds True, must hold whole"),
    ("colibri.txt", "0 0 0 1:0.5\n0 2 0 1:0.5\n", "line 2: row is 2, not 1"),
    ("colibri.txt", "0 0 0 1:0.5\n0 1 0 1:0.0.5\n", "line 2 is not `call row layer id:gate"),
    ("colibri.txt", "0 0 0 1:0.5 2:0.5\n1 0 0 1:0.5\n", "line 2: experts is [1], must hold 2"),
    ("csv", "layer,expert\n0,1\n0,2\n0,3\n1,1\n1,2\n", "are not all multiples of the top-k"),
    ("csv", "layer,expert\n" + 8 * "0,1\n0,2\n1,1\n1,2\n", "all batches have 2 rows, so that nothing tells how many tokens … --top_k"),
    ("board", BOARD + "colums: [x]\n", "Did you mean 'columns'"),
    ("board", BOARD + "where: 7\n", "where=7 must be"),
    ("board", BOARD + "where: {policy: []}\n", "where="),
    ("board", BOARD + "views: [7]\n", "views.0=7 must be a mapping"),
    ("board", "title: [x]\n", "title=['x'] must be text"),
    ("board", BOARD + "distinct: 7\n", "distinct=7 must be true or false"),
]  # fmt: skip
HEADERS: list[tuple[str, Any]] = [
    *(("version", 2), ("num_layers", "3"), ("top_k", 9), ("seed", None), ("predicted_depth", 3)),
    *(("expert_bytes", [1000]), ("expert_bytes", [1000, -1, 1000]), ("precision", "fp3")),
]
"""Invalid fields of a trace's metadata, which the refusal names."""
OF_OTHERS: list[tuple[str, str, str, str]] = [
    ("csv", "route_trace v1", "route_trace v2", "line 1"),
    ("csv", "0,1,2,0,0,0,0.6", "0,1,2,0,0,9,0.6", "line 12, layer 0, token 2: experts is [9, 2]"),
    ("csv", "0,1,2,0,0,0,0.6", "0,1,2,0,0,x,0.6", "invalid value 'x'"),
    ("csv", "0,1,2,0,1,2,0.4,1,0\n", "", "slot does not count"),
    ("csv", "0,1,2,1,0,1,0.6,1,0\n0,1,2,1,1,0,0.4,1,0\n", "", "layer"),
    ("csv", "0,1,2,0", "0,3,2,0", "phase is 3"),
    ("csv", "# layer=1 expert_bytes=80 dense_bytes=10\n", "", "lack"),
    ("jsonl", "[[1, 3]", "[[1, 3, 2]", "line 2: experts is [1, 3, 2], must hold 2"),
    ("jsonl", "[[1, 3]", "[[3, 3]", "layer 0, token 2: experts is [3, 3]"),
    ("jsonl", "[[1, 3]", "[[1, -3]", "is [1, -3], must hold 2 whole"),
    ("jsonl", "[[1, 3]", "[[1, 40000]", "is [1, 40000], must hold 2 whole numbers in 0..32767"),
    ("jsonl", '"tok": 2', '"tok": 1', "line 2, layer 0, token 1: token is 1 after 1"),
    (
        "jsonl",
        '"tok": 2',
        '"tok": 3',
        "line 2, layer 0, token 3: token is 3 after 1: one is missing",
    ),
    ("jsonl", '"tok": 2', '"tok": true', "line 2: tok=True must be a whole number"),
    ("jsonl", "[[1, 3]", "[[true, 3]", "line 2: experts is [True, 3], must hold 2 whole"),
    ("csv", "0,1,2,0,0,0,0.6", "0,1,2,0,0,0,-0.6", "line 12, layer 0, token 2: weights is [-0.6"),
    ("jsonl", '{"tok": 2', '{"tok" 2', "line 2 is not readable JSON"),
    ("jsonl", JSONL, "", "has no rows"),
]
"""Traces in foreign formats: kind, a text, its replacement, and words of the refusal."""
ARRAYS: list[tuple[dict[str, Any], str]] = [
    ({"routed": ROUTED}, "no array 'routed_experts' [tokens, layers, top_k]"),
    ({"routed_experts": ROUTED[0]}, "routed_experts is uint8 of shape [2, 2]"),
    ({"routed_experts": ROUTED[:0]}, "routed_experts is uint8 of shape [0, 2, 2]"),
    ({"routed_experts": ROUTED / 2}, "routed_experts is float64 of shape [2, 2, 2]"),
    ({"routed_experts": ROUTED.astype(int) - 1}, "experts is [-1, 2], must lie in 0..2"),
    (
        {"routed_experts": ROUTED, "num_experts": 3},
        "pass 0, layer 0, token 0: experts is [0, 3], must lie in 0..2",
    ),
    (
        {"routed_experts": ROUTED, "num_experts": [1, 2]},
        "num_experts=[1, 2] must be a whole number",
    ),
    ({"routed_experts": ROUTED, "num_experts": 0}, "num_experts=0 must be a whole number"),
    ({"routed_experts": ROUTED * 0}, "layer 0, token 0: experts is [0, 0]"),
    (
        {"routed_experts": ROUTED, "weights": 0.5 - (ROUTED > 0) * 1.0},
        "weights is [0.5, -0.5], must be 0 or more",
    ),
    ({"routed_experts": ROUTED, "weights": ROUTED * np.nan}, "must be finite"),
    ({"routed_experts": np.array([[[print]]])}, "not a readable .npz: Object arrays cannot"),
]


EDITED: list[tuple[tuple[str, ...], Any, str]] = [
    *((("run_id",), value, "run_id=") for value in ("../evil", "a/b", "a\\b", "..", "", "a\0b", LONG, 7, ["x"])),
    *((("environment",), value, "environment=") for value in ([], "x", 7)),
    *((("environment", key), value, f"environment.{key}=") for key in ("machine", "versions") for value in ([], "x", 7)),
    *((("environment", "versions", "torch"), value, "environment.versions.torch") for value in ([], {"name": "x"})),
    *((("config", "moecache", key), value, f"config.moecache.{key}=") for key in ("model", "emulate") for value in ([], "x", True)),
    *((("scores", "tiny_arc"), value, "scores.tiny_arc") for value in ([], "x", {"acc,none": [1, 0]}, {"acc,none": {"0": "x"}}, {"acc,none": {"0": [1, 2, 3]}})),
    *((("results",), value, "results") for value in ([], "x", {"tiny_arc": [1]})),
    *((("config", "moecache", "totals"), value, "config.moecache.totals") for value in ([], "x", {"tok_per_s": "fast"}, {"ttft_ms": [1]})),
    *((("config", "moecache", "hardware"), value, "config.moecache.hardware") for value in ("h200", {}, {"name": 7})),
    *((path, "a\ud800b", "is half of a surrogate pair, not a character") for path in (("label",), ("run_id",), ("configuration", "model"), ("config", "moecache", "policy", "name"))),
]  # fmt: skip
"""Edits of a run's record: the place, the new value, and words of the refusal."""
FOREIGN: list[tuple[dict[str, str] | None, str]] = [
    (None, "has no 'moecache' metadata"),
    ({"format": "pt"}, "has no 'moecache' metadata"),
    ({"moecache": "{"}, "metadata is not readable JSON"),
    ({"moecache": '{"format": 3}'}, "format version 3; this release reads 2"),
    ({"moecache": '{"format": 2, "kind": "buddies"}'}, "lacks 'model', 'num_layers'"),
]
"""Foreign metadata of safetensors files, with words of the refusal."""


def section(head: str) -> list[str]:
    """Return the lines of a section of `commands.txt`."""
    text = Path(__file__).with_name("commands.txt").read_text().partition(head)[2]
    return text.partition("\n# ")[0].splitlines()[1:]


def _commands(head: str) -> list[tuple[list[str], str]]:
    """Return the commands of a section, each with words of its refusal."""
    rows = [line.partition(" => ") for line in section(head) if line]
    return [(shlex.split(given.replace("{long}", LONG)), words) for given, _, words in rows]


LIGHT = _commands("# Before torch is imported")
"""Commands refused before torch is imported, as the import takes seconds."""
COMMANDS = [*LIGHT, *_commands("# After it")]
NASTY: tuple[Any, ...] = (
    *(math.inf, -math.inf, math.nan, 10**400, 1e30, -(10**12), {}, {"a": 1}, [[]]),
)


def parameters() -> Iterator[Bad]:
    """Yield every numeric parameter of every algorithm with each value that none accepts."""
    for axis in AXES:
        for name in algorithm_names(axis):
            for key, parameter in parameters_of(find_algorithm(axis, name)).items():
                if not any(kind in str(parameter.annotation) for kind in ("int", "float")):
                    continue
                for value in NASTY:
                    given = {axis: name, f"{axis}.{unmangle(key)}": value}
                    yield Bad("arguments", given, f"{axis}")


def table() -> Iterator[Bad]:
    """Yield every bad input."""
    yield from (Bad("arguments", {key: value}, words) for key, value, words in ARGUMENTS)
    yield from (Bad("arguments", given, words) for given, words in TOGETHER)
    yield from (Bad("trace", data, words) for data, words in _columns())
    yield Bad("trace", _trace(precision="int9"), "precision='int9' is not known")
    yield from (Bad("trace", _trace(**{field: value}), field) for field, value in HEADERS)
    sound = {"csv": CSV, "jsonl": JSONL}
    yield from (Bad(kind, sound[kind].replace(a, b), words) for kind, a, b, words in OF_OTHERS)
    yield from (Bad("npz", arrays_of(**arrays), words) for arrays, words in ARRAYS)
    whole = arrays_of(routed_experts=np.tile(ROUTED, (500, 1, 1)))
    for data in (b"", b"PK", b"\x93NUMPY", whole[:-30], whole[:90]):
        yield Bad("npz", data, "trace x.npz is not a readable .npz")
    foreign = [(save({"x": np.zeros(3)}, metadata=about), words) for about, words in FOREIGN]
    yield from (Bad("artifact", data, words) for data, words in foreign)
    yield Bad("artifact", _artifact(format=1), "format version 1; this release reads 2")
    yield Bad("artifact", _artifact(), "lacks 'digest'")
    yield from (Bad("host", {key: value}, words) for key, value, words in HOST)
    yield from (Bad("host", given, words) for given, words in UNFIT)
    yield from (Bad("host", {**WALL, key: value}, words) for key, value, words in ON_WALL)
    yield from (Bad("spec", {"policy": "sp_moe", **given}, words) for given, words in SPEC)
    yield from (Bad("drafted", {key: value}, words) for key, value, words in DRAFTED)
    yield from (Bad(*row) for row in FILES)
    for path, value, words in EDITED:
        edited: Any = json.loads(json.dumps(record("a")))
        holder = edited
        for key in path[:-1]:
            holder = holder.setdefault(key, {})
        holder[path[-1]] = value
        yield Bad("results", json.dumps(edited), words)
    yield from (Bad("command", given, words) for given, words in COMMANDS)
    yield from parameters()
