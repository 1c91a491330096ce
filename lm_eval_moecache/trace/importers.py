"""The table of trace formats: a file's format is detected from its content, and read."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lm_eval_moecache.records import plugins
from lm_eval_moecache.records.errors import MoECacheError
from lm_eval_moecache.records.files import is_file, read_head
from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.trace.formats import arrays, export, lines, responses
from lm_eval_moecache.trace.formats.base import Options, TraceFormat, reading
from lm_eval_moecache.trace.trace import Trace

if TYPE_CHECKING:
    from lm_eval_moecache.trace.file import StreamedTrace

MOST_BYTES = 1 << 40
"""Largest trace file that is read."""
HEAD_BYTES = 1 << 20
"""Size of the file head from which its format is detected."""


_FRONT = re.compile(rb"(?:\s*#[^\n]*\n)*\s*")
"""What may stand in front of a trace. Matched by itself: no pattern is tried at all its ends."""


def _begins(pattern: str) -> Callable[[bytes], bool]:
    """Whether a file begins so, blank lines and lines of `#` in front of it left out."""
    begins = re.compile(pattern.encode())

    def sniff(head: bytes) -> bool:
        front = _FRONT.match(head)
        return begins.match(head, front.end() if front else 0) is not None

    return sniff


def _has(*fields: str) -> str:
    """Return the pattern of a first line that is a JSON object with these fields."""
    return r"\{" + "".join(rf'(?=[^\n]*"{field}"\s*:)' for field in fields)


def _read_parquet(path: Path, options: Options) -> Trace:
    # Imported late: pyarrow is slow to import, and most runs read no trace.
    from lm_eval_moecache.trace.file import read_trace

    return read_trace(path, logits=options.logits, predicted=options.predicted)


_ROUTED = '(?s:(?=.*routed_experts"))'
_FORMATS = {
    "parquet": TraceFormat(
        "This package's own, of `trace=DIR`: Parquet with all that a run records, or its stream.",
        (".parquet", ".partial"),
        "weights, phases, requests, sizes; logits, predictions, drafts where recorded",
        lambda head: head.startswith((b"PAR1", b"\xff\xff\xff\xff")),
        _read_parquet,
        export.write_parquet,
        says_sizes=True,
    ),
    "route_trace": TraceFormat(
        "BigMoeOnEdge's `route_trace v1` CSV: a line per (token, layer, slot), sizes in comments.",
        (".csv",),
        "weights, phases, turns, sizes of each layer",
        lambda head: head.startswith(b"# route_trace"),
        lines.read_route_trace,
        export.write_route_trace,
        says_sizes=True,
    ),
    "activations": TraceFormat(
        "`layer,expert` CSV of llama.cpp's moe-trace: a row for each expert that ran, in order.",
        (".csv",),
        "phases by the size of a batch",
        _begins(r"(layer, *expert|[0-9]+ *, *[0-9]+)\s*(\n|$)"),
        lines.read_activations,
    ),
    "cache_lab": TraceFormat(
        "moe-cache-lab routing JSONL, version 1: one text, its prompt and what was generated.",
        (".jsonl",),
        "probabilities of the chosen as weights, phases",
        _begins(rf'\{{[^\n]*"format"\s*:\s*"{lines.CACHE_LAB}"'),
        lines.read_cache_lab,
        export.write_cache_lab,
    ),
    "colibri": TraceFormat(
        "colibri's `ROUTE_TRACE`: lines `call row layer id:gate id:gate ...`.",
        (".txt", ".trace", ".log"),
        "gates of the chosen as weights, phases by the number of rows",
        _begins(rf"{lines.CALL.pattern}(\n|$)"),
        lines.read_colibri,
    ),
    "lattice": TraceFormat(
        "lattice's JSON lines `{layer_idx, token_idx, selected_ids, gate_weights}`.",
        (".jsonl",),
        "gate weights of the chosen; no phases",
        _begins(_has("layer_idx", "token_idx", "selected_ids")),
        lines.read_lattice,
    ),
    "megatron": TraceFormat(
        "Megatron's RouterTracer: JSON lines of one record per (step, layer, rank).",
        (".jsonl",),
        "phases by the tokens of a step; no weights",
        _begins(_has("step", "layer", "top_indices")),
        lines.read_megatron,
    ),
    "token_jsonl": TraceFormat(
        'JSON lines `{"tok": n, "layers": [[ids] ...]}`, one decode step each (warp, moe-stream).',
        (".jsonl",),
        "nothing more: every token is a decode step",
        _begins(_has("tok", "layers")),
        lines.read_token_jsonl,
    ),
    "array": TraceFormat(
        "`.npy` and `.npz`: `routed_experts` [tokens, layers, top_k], the prompt's length or not.",
        (".npz", ".npy"),
        "num_prompt_tokens, weights [tokens, layers, top_k] and num_experts where it has them",
        lambda head: head.startswith((b"PK\x03\x04", b"\x93NUMPY")),
        arrays.read_array,
    ),
    "glm_atlas": TraceFormat(
        "GLM-5.2's routing atlas (`routing-trace-export/v2`): ids by layer, rows by prompt.",
        (".json",),
        "phases, requests, the number of experts",
        lambda head: arrays.ATLAS.search(head) is not None,
        arrays.read_atlas,
    ),
    "sglang": TraceFormat(
        "SGLang's responses with `routed_experts` (`return_routed_experts`), whose shape is given.",
        (".json", ".jsonl"),
        "phases, requests",
        _begins(_ROUTED + '(?s:(?=.*"(?:meta_info|sglext|sgl_ext)"))'),
        responses.read_responses,
        reads_folders=True,
    ),
    "dynamo": TraceFormat(
        "dynamo's responses with `nvext.routed_experts`.",
        (".json", ".jsonl"),
        "phases, requests",
        _begins(_ROUTED + '(?s:(?=.*"nvext"))'),
        responses.read_responses,
        reads_folders=True,
    ),
    "vllm": TraceFormat(
        "vLLM's responses with `routed_experts`: a file of one or many, or a folder of saved JSON.",
        (".json", ".jsonl"),
        "phases, requests",
        _begins(_ROUTED),
        responses.read_responses,
        reads_folders=True,
    ),
}
"""Name -> format; the first whose `sniff` takes a file is its own."""
_is_log = _begins(f"(?:{_has('layers_logged')}|{_has('topk_ids')})")
"""Whether a file is of vLLM's VLLM_LOG_MOE."""


@cache
def trace_formats() -> dict[str, TraceFormat]:
    """Return all formats by name: ours, then what packages add."""
    formats = dict(_FORMATS)
    for name, point in plugins.added("formats", formats.keys()).items():
        formats[name] = plugins.load(point)
        if not isinstance(formats[name], TraceFormat):
            raise MoECacheError(f"{plugins.described(point)} is no TraceFormat.")
    return formats


def find_format(file: str) -> str:
    """Return the name of the format of a file, or of a folder of files.

    The content decides. Failing that, the only format with the file's suffix is taken, so that its
    reader reports the error; ValueError where there is no such format.
    """
    path = head_of = Path(file)
    formats = trace_formats()
    suffixes = {suffix for row in formats.values() for suffix in row.suffixes}
    is_folder = os.path.isdir(file)  # False for a name that no file can have
    if is_folder:
        files = sorted(path.glob("*.json"))
        if not files:
            raise ValueError(f"trace {file!r}: a folder of responses has .json files in it.")
        head_of = files[0]
    elif path.suffix not in suffixes:
        raise unknown_name_error(f"trace {file!r}: the suffix", path.suffix, suffixes)
    head = read_head(head_of, f"trace {file!r}", HEAD_BYTES, MOST_BYTES)
    for name, row in formats.items():
        with _naming_the_importer(name, row.sniff, head_of.name):
            if (row.reads_folders or not is_folder) and row.sniff(head):
                return name
    if _is_log(head):
        raise ValueError(
            f"trace {file!r} is a log of VLLM_LOG_MOE, which names neither a token's request nor "
            "its pass, and by default one layer alone. Allowed: vLLM's responses, of a server with "
            "--enable-return-routed-experts."
        )
    by_suffix = [name for name, row in formats.items() if head_of.suffix in row.suffixes]
    if len(by_suffix) == 1 and not is_folder:
        return by_suffix[0]
    if not head.strip():
        raise ValueError(f"trace {file!r} has no rows.")
    first = head[:60].decode("utf-8", "replace").splitlines() or [""]
    raise ValueError(
        f"trace {file!r} begins with {first[0]!r}, which no format of {head_of.suffix} "
        f"files does ({', '.join(by_suffix)}). `moecache trace formats` shows them."
    )


def load_trace(
    file: str,
    *,
    logits: bool = False,
    predicted: bool = False,
    expert_bytes: int | None = None,
    top_k: int | None = None,
    num_layers: int | None = None,
) -> Trace:
    """Read a trace of any known format, detected from its content.

    `expert_bytes` is the size of one expert for formats without sizes; the default is one byte.
    `top_k` and `num_layers` are for formats without a shape. Raises ValueError for a file that is
    missing or does not fit.
    """
    name, path = find_format(file), Path(file)
    row = trace_formats()[name]
    if expert_bytes is not None and row.says_sizes:
        raise ValueError(
            f"expert_bytes={expert_bytes}: trace {path.name} says itself how large experts are."
        )
    options = Options(
        expert_bytes=expert_bytes,
        top_k=top_k,
        num_layers=num_layers,
        logits=logits,
        predicted=predicted,
    )
    with _naming_the_importer(name, row.read, path.name):
        read = row.read(path, options)
        if not isinstance(read, Trace):
            raise TypeError(
                f"read returned {type(read).__name__}. Expected: a Trace, as of `Rows.trace`"
            )
        return read


@contextmanager
def _naming_the_importer(name: str, called: Callable[..., object], file: str) -> Iterator[None]:
    """Turn whatever an importer raises into a ValueError that names the trace and the importer.

    With the line of the trace that it was reading, where it reads by `numbered` or `objects`, and
    the importer's own line. A refusal that names the trace itself passes as it is.
    """
    reading.set(None)
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # whatever an importer's own code raises
        line = reading.get()
        if isinstance(error, ValueError) and file in str(error):
            raise
        source = inspect.getfile(called)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame.lineno for frame in frames if frame.filename == source]
        place = f"{source}, line {own[-1]}" if own else source
        raise ValueError(
            f"trace {file}{'' if line is None else f': line {line}'}: the importer of {name!r} "
            f"failed: {type(error).__name__}: {error} ({place})."
        ) from error


def open_any(
    file: str, *, logits: bool = False, predicted: bool = False, expert_bytes: int | None = None
) -> Trace | StreamedTrace:
    """As `load_trace`, but a large Parquet trace is opened and read during its replay."""
    from lm_eval_moecache.trace.file import open_trace

    path = Path(file)
    if path.suffix == ".parquet" and is_file(path) and expert_bytes is None:
        return open_trace(path, logits=logits, predicted=predicted)
    return load_trace(file, logits=logits, predicted=predicted, expert_bytes=expert_bytes)
