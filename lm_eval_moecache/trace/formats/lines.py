"""Formats of text lines: JSON lines of one selection or one step each, and two of plain text."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from lm_eval_moecache.records.event import DECODE, PHASES, PREFILL
from lm_eval_moecache.records.files import parse_json, read_text, write_whole
from lm_eval_moecache.records.numbers import read_count
from lm_eval_moecache.trace.formats.base import (
    MOST_EXPERT,
    Options,
    Pass,
    TraceFormat,
    build,
    one_request,
)
from lm_eval_moecache.trace.trace import Trace

Layers = Mapping[int, Sequence[tuple[Any, Any]]]
"""Layer -> for each token its ids, and their weights or None."""


def numbered(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that hold something with their numbers, from 1."""
    text = read_text(path, f"trace {path.name}")
    return ((n, line) for n, line in enumerate(text.splitlines(), start=1) if line.strip())


def objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines with their line numbers."""
    for number, line in numbered(path):
        record = parse_json(line, f"trace {path.name}: line {number}")
        if not isinstance(record, dict):
            raise ValueError(f"trace {path.name}: line {number} must hold an object.")
        yield number, record


def pass_of(layers: Layers, request: int, phase: str, first_token: int) -> Pass:
    """Return a pass through these layers; it has weights where every row has."""
    rows = [layers[layer] for layer in sorted(layers)]
    weighted = all(weights for layer in rows for _, weights in layer)
    return Pass(
        experts=[[ids for ids, _ in layer] for layer in rows],
        weights=[[weights for _, weights in layer] for layer in rows] if weighted else None,
        request=request,
        phase=phase,
        first_token=first_token,
    )


def in_turn(steps: Iterable[tuple[int, Layers]]) -> list[Pass]:
    """Return the passes of (request, layers), where each goes on behind its request's last token.

    A pass of several tokens reads a text, one of a single token decodes it.
    """
    passes, done = [], Counter[int]()
    for request, layers in steps:
        tokens = len(layers[min(layers)])
        phase = PREFILL if tokens > 1 else DECODE
        passes.append(pass_of(layers, request, phase, done[request]))
        done[request] += tokens
    return passes


class JsonLines(TraceFormat):
    """A format that is told by the fields of its first line."""

    suffixes = (".jsonl",)
    fields: ClassVar[frozenset[str]]

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        return cls.fields <= first_object(head).keys()


def first_object(head: bytes) -> dict[str, Any]:
    """Return the JSON object on a file's first line; empty where there is none."""
    try:
        found = parse_json(head.lstrip().split(b"\n", 1)[0], "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class CacheLab(JsonLines):
    """moe-cache-lab routing JSONL, version 1: one text, its prompt and what was generated.

    Selections stand in the order of need: the prompt layer by layer, then token by token.
    """

    name = "cache_lab"
    holds = "probabilities of the chosen as weights, phases"
    written = True
    FORMAT = "moe-cache-lab.routing-jsonl"
    NAMES: ClassVar = {"prompt": PREFILL, "generated": DECODE}

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        return first_object(head).get("format") == cls.FORMAT

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        what, lines = f"trace {path.name}", objects(path)
        _, about = next(lines)
        if about.get("format_version") != 1:
            raise ValueError(
                f"{what}: format_version={about.get('format_version')!r} of {cls.FORMAT} is not "
                "read. Allowed: 1."
            )
        texts: dict[tuple[str, int], dict[int, list[tuple[int, Any, Any]]]] = {}
        for number, record in lines:
            match record:
                case {
                    "record_type": "routing_selection",
                    "phase": "prompt" | "generated" as phase,
                    "token_position": int(token),
                    "layer": int(layer),
                    "selected_experts": [_, *_] as ids,
                }:
                    layers = texts.setdefault((phase, 0 if phase == "prompt" else token), {})
                    row = (token, ids, record.get("selected_probabilities"))
                    layers.setdefault(layer, []).append(row)
                case _:
                    raise ValueError(f"{what}: line {number} is no routing selection.")
        passes = []
        for (phase, _), layers in texts.items():
            first = min(layers)
            begin, served = layers[first][0][0], [token for token, _, _ in layers[first]]
            if served != list(range(begin, begin + len(served))):
                raise ValueError(f"{what}: the prompt's tokens of layer {first} have gaps.")
            for layer in sorted(layers):
                if [token for token, _, _ in layers[layer]] != served[-len(layers[layer]) :]:
                    raise ValueError(f"{what}: layer {layer} serves other tokens.")
            rows = {layer: [row[1:] for row in found] for layer, found in layers.items()}
            passes.append(pass_of(rows, 0, cls.NAMES[phase], begin))
        count = about.get("num_experts")
        if count is not None:
            count = read_count(f"{what}: num_experts", count, least=1, most=MOST_EXPERT + 1)
        model = str(about.get("model_id"))
        return build(path.name, model, passes, options, num_experts=count)

    @classmethod
    def write(cls, trace: Trace, path: Path) -> None:
        what, columns = f"out={str(path)!r}", trace.columns
        one_request(trace, what)
        if len({*columns.request.tolist()}) > 1:
            raise ValueError(
                f"{what}: this format holds one request, and trace {trace.name} has "
                f"{len(trace.requests)}. Allowed: --request NUMBER."
            )
        names = {PHASES.index(ours): theirs for theirs, ours in cls.NAMES.items()}
        if not set(columns.phase.tolist()) <= set(names):
            raise ValueError(f"{what}: this format has no passes that verify drafts.")
        about = {
            "record_type": "metadata",
            "format": cls.FORMAT,
            "format_version": 1,
            "model_id": trace.geometry.model or trace.name,
            "num_experts": trace.geometry.num_experts,
            "experts_per_token": trace.geometry.top_k,
            "capture_method": f"lm-eval-moecache, from {trace.name}",
        }
        weights = None if columns.weights is None else columns.weights.tolist()
        if weights is not None and any(not 0 <= w <= 1 for row in weights for w in row):
            raise ValueError(f"{what}: weights outside of 0..1 are no probabilities.")
        selections = (
            {
                "record_type": "routing_selection",
                "phase": names[int(columns.phase[row])],
                "token_position": int(columns.token[row]),
                "layer": int(columns.layer[row]),
                "selected_experts": experts,
                "selected_probabilities": [] if weights is None else weights[row],
            }
            for row, experts in enumerate(columns.experts.tolist())
        )
        lines = (
            json.dumps(each, sort_keys=True, separators=(",", ":")) for each in (about, *selections)
        )
        write_whole(path, "\n".join(lines) + "\n")


class Lattice(JsonLines):
    """lattice's JSON lines `{layer_idx, token_idx, selected_ids, gate_weights}`.

    Every token is a decode step: the format says no phases. A token seen again begins a text.
    """

    name = "lattice"
    holds = "gate weights of the chosen; no phases"
    fields = frozenset({"layer_idx", "token_idx", "selected_ids"})

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        seen = Counter[tuple[int, int]]()
        steps: dict[tuple[int, int], dict[int, list[tuple[Any, Any]]]] = {}
        for number, record in objects(path):
            match record:
                case {"layer_idx": int(layer), "token_idx": int(token), "selected_ids": [_, *_]}:
                    text = seen[layer, token]
                    seen[layer, token] += 1
                    row = (record["selected_ids"], record.get("gate_weights"))
                    steps.setdefault((text, token), {})[layer] = [row]
                case _:
                    wanted = ", ".join(sorted(cls.fields))
                    raise ValueError(f"trace {path.name}: line {number} must hold {wanted}.")
        passes = [
            pass_of(layers, text, DECODE, token) for (text, token), layers in sorted(steps.items())
        ]
        return build(path.name, path.stem, passes, options)


class Megatron(JsonLines):
    """Megatron's RouterTracer: JSON lines of one record per (step, layer, rank).

    A step of several tokens reads a text (prefill); steps of one token decode it. The format does
    not say whose tokens a step has, so a step's tokens count as one text's; ids stand in ascending
    order. Records of multi-token prediction (`block: mtp`) are left out.
    """

    name = "megatron"
    holds = "phases by the tokens of a step; no weights"
    fields = frozenset({"step", "layer", "top_indices"})

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        what = f"trace {path.name}"
        steps: dict[tuple[int, int], dict[int, Any]] = {}
        for number, record in objects(path):
            if record.get("block") == "mtp":
                continue
            match record:
                case {"step": int(step), "layer": int(layer), "top_indices": [_, *_] as ids}:
                    layers = steps.setdefault((int(record.get("rank", 0)), step), {})
                case _:
                    raise ValueError(
                        f"{what}: line {number} must hold step, layer and top_indices."
                    )
            if layer in layers:
                raise ValueError(f"{what}: line {number}: layer {layer} of the step again.")
            layers[layer] = [(of_token, None) for of_token in ids]
        texts: list[tuple[int, Layers]] = []
        request, before = -1, None
        for (rank, _), layers in sorted(steps.items()):
            request += len(layers[min(layers)]) > 1 or rank != before
            before = rank
            texts.append((request, layers))
        return build(path.name, path.stem, in_turn(texts), options)


class TokenJsonl(JsonLines):
    """JSON lines `{"tok": n, "layers": [[ids] ...]}`, one decode step each (warp, moe-stream).

    The format gives neither weights nor sizes nor the number of experts.
    """

    name = "token_jsonl"
    holds = "nothing more: every token is a decode step"
    fields = frozenset({"tok", "layers"})

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        steps: list[Pass] = []
        lines: list[int] = []
        shape: list[int] = []
        for number, record in objects(path):
            line = f"trace {path.name}: line {number}"
            match record:
                case {"tok": int(token), "layers": [[_, *_], *_] as layers, **rest} if not rest:
                    pass
                case _:
                    raise ValueError(
                        f"{line} must hold a number `tok` and a list of lists `layers`."
                    )
            for index, ids in enumerate(layers):
                if not isinstance(ids, list) or not all(
                    type(e) is int and 0 <= e <= MOST_EXPERT for e in ids
                ):
                    raise ValueError(
                        f"{line}: layers [{index}] is {ids!r}, must hold ids in 0..{MOST_EXPERT}."
                    )
            own = [len(ids) for ids in layers]
            shape = shape or own
            if len(set(own)) > 1 or own != shape:
                raise ValueError(
                    f"{line}: layers must hold as many lists of as many ids as line 1."
                )
            if steps and token <= steps[-1].first_token:
                raise ValueError(f"{line}: tok is {token} after {steps[-1].first_token}.")
            steps.append(Pass(experts=[[ids] for ids in layers], first_token=token))
            lines.append(number)

        def where(row: int) -> str:
            return f"line {lines[row // len(shape)]}, layer {row % len(shape)}"

        return build(path.name, path.stem, steps, options, where=where)


class Colibri(TraceFormat):
    """colibri's `ROUTE_TRACE`: lines `call row layer id:gate id:gate ...`.

    A call of several rows is a prefill, of a new request where one has decoded before.
    """

    name = "colibri"
    suffixes = (".txt", ".trace", ".log")
    holds = "gates of the chosen as weights, phases by the number of rows"
    GATE = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    LINE = re.compile(rf"([0-9]+)\s+([0-9]+)\s+([0-9]+)((?:\s+[0-9]+:{GATE})+)\s*")

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        lines = (line for line in head.decode("utf-8", "replace").splitlines() if line.strip())
        first = next((line for line in lines if not line.startswith("#")), "")
        return cls.LINE.fullmatch(first) is not None

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        what = f"trace {path.name}"
        calls: dict[tuple[int, int], list[tuple[list[int], list[float]]]] = {}
        for number, line in numbered(path):
            if line.startswith("#"):
                continue
            match = cls.LINE.fullmatch(line)
            if match is None:
                raise ValueError(f"{what}: line {number} is not `call row layer id:gate ...`.")
            call, row, layer = (int(match[n]) for n in (1, 2, 3))
            rows = calls.setdefault((call, layer), [])
            if row != len(rows):
                raise ValueError(f"{what}: line {number}: row is {row}, not {len(rows)}.")
            pairs = [pair.split(":") for pair in match[4].split()]
            rows.append(([int(e) for e, _ in pairs], [float(g) for _, g in pairs]))
        # A pass runs the layers upwards.
        steps: list[dict[int, Any]] = []
        for (_, layer), rows in calls.items():
            if not steps or layer <= max(steps[-1]):
                steps.append({})
            steps[-1][layer] = rows
        texts: list[tuple[int, Layers]] = []
        request, decodes = 0, False
        for layers in steps:
            reads = len(layers[min(layers)]) > 1
            request += reads and decodes
            decodes = not reads
            texts.append((request, layers))
        return build(path.name, path.stem, in_turn(texts), options)


class Activations(TraceFormat):
    """`layer,expert` CSV of llama.cpp's moe-trace: a row for each expert that ran, in its order.

    Rows of one layer in a row are one batch: as many tokens as it holds top-k's. The top-k is
    `top_k`, or else the least batch: one decoded token. Batches of more tokens are prefill; the
    header line again begins another request, as in files that were joined.
    """

    name = "activations"
    suffixes = (".csv",)
    holds = "phases by the size of a batch"
    HEADER = "layer,expert"

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        return head.split(b"\n", 1)[0].strip().replace(b" ", b"") == cls.HEADER.encode()

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        what = f"trace {path.name}"
        texts: list[list[tuple[int, int]]] = []
        for number, line in numbered(path):
            plain = line.replace(" ", "")
            if plain == cls.HEADER:
                texts.append([])
                continue
            layer, _, expert = plain.partition(",")
            if not (plain.isascii() and layer.isdigit() and expert.isdigit()):
                raise ValueError(f"{what}: line {number} is not `layer,expert`.")
            texts[-1].append((int(layer), int(expert)))
        batches = [
            [(layer, [e for _, e in rows]) for layer, rows in groupby(text, lambda row: row[0])]
            for text in texts
            if text
        ]
        sizes = [len(ids) for text in batches for _, ids in text]
        if not sizes:
            raise ValueError(f"{what} holds no rows.")
        top_k = options.top_k or min(sizes)
        if math.gcd(*sizes, top_k) != top_k:
            raise ValueError(
                f"{what}: batches of {min(sizes)} to {max(sizes)} rows are not all multiples of "
                f"the top-k {top_k}. Give it: `moecache trace convert IN OUT --top_k 8`."
            )
        layers = sorted({layer for text in batches for layer, _ in text})
        steps: list[tuple[int, Layers]] = []
        for request, text in enumerate(batches):
            for begin in range(0, len(text), len(layers)):
                step = text[begin : begin + len(layers)]
                if [layer for layer, _ in step] != layers:
                    raise ValueError(
                        f"{what}: request {request}: the batch from layer {step[0][0]} on does "
                        f"not run the layers {layers[0]} to {layers[-1]} in order."
                    )
                rows = {
                    layer: [(ids[n : n + top_k], None) for n in range(0, len(ids), top_k)]
                    for layer, ids in step
                }
                steps.append((request, rows))
        return build(path.name, path.stem, in_turn(steps), options)
