"""The JSON in a trace file's metadata: the model and the requests of the run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm_eval_moecache.records.files import parse_json
from lm_eval_moecache.records.geometry import MOST_DRAFTED, Draft, Geometry
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.trace.trace import TracedRequest

if TYPE_CHECKING:
    from lm_eval_moecache.trace.schema import DraftSizes, ModelSizes

VERSION = 1
HEADER_KEY = b"moecache"
REQUESTS_KEY = b"moecache_requests"
"""Optional second key, written when a recording ends: one list per request of the ledger."""
SCANS_KEY = b"moecache_scans"
"""Optional third key: [first pass, passes] of each text routed token by token."""
DRAFTS_KEY = b"moecache_drafts"
"""Optional fourth key: [pass, drafted, accepted] of each pass that verified drafts."""
_PRECISION = re.compile(
    r"(bf16|fp16|fp32|fp8|fp4|nf4|mxfp4|nvfp4|gptq|awq|int[2348]|hqq[2348]|q[2-8]_[0-9a-z_]+"
    r"|[2-8]bit|unknown)(/g[0-9]+)?"
)
"""Precisions a header may name: our codecs, checkpoint formats, and those of importers."""
_ELEMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0, "int4": 0.5, "int2": 0.25}


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Model and columns of a trace. `predicted_depth` is 0 where it holds no predictions;
    `predicted_by` is the digest of the predictor that made them, or empty for the model's gates."""

    geometry: Geometry
    seed: int
    predicted_depth: int = 0
    predicted_by: str = ""
    proposals: tuple[str, ...] = ()
    """Prefetchers with recorded proposals: number n's are in the column `proposed_n`."""
    has_logits: bool = True
    """Whether the writer adds the column `logits` (a reader looks at the columns)."""
    draft: Draft | None = None
    """The draft model; None without one, or where drafts were copied from the prompt."""
    ranked: int = 0
    """Number of experts kept per prediction of the draft, likeliest first."""


def write_header(header: Header) -> bytes:
    """Return the JSON of the metadata key `moecache`.

    Beyond the fields every reader needs, `element_bytes`, `levels` and `compute_bytes` let a replay
    reproduce the run's times to the last digit where `precision` and `expert_bytes` do not suffice.
    """
    fields: dict[str, Any] = {"version": VERSION, **_sizes(header.geometry), "seed": header.seed}
    optional = ("predicted_depth", "predicted_by", "proposals")
    fields |= {name: value for name in optional if (value := getattr(header, name))}
    if header.draft is not None:
        draft_fields = {name: getattr(header.draft, name) for name in (*_OF_DRAFT, "targets")}
        fields["draft"] = {**_sizes(header.draft.geometry), **draft_fields, "ranked": header.ranked}
    return json.dumps(fields).encode()


_OF_MODEL = ("model", "num_layers", "num_experts", "top_k")
_OF_DRAFT = ("level", "nbytes", "tokens")


def _sizes(geometry: Geometry) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        **{name: getattr(geometry, name) for name in _OF_MODEL},
        "expert_bytes": [sizes[0] for sizes in geometry.expert_bytes],
        "dense_bytes": geometry.dense_bytes,
        "precision": ":".join(geometry.precision),
        "element_bytes": geometry.element_bytes,
        "levels": geometry.expert_bytes if len(geometry.precision) > 1 else (),
        "compute_bytes": geometry.compute_bytes,
        "hidden_size": geometry.hidden_size,
    }
    optional = ("levels", "compute_bytes", "hidden_size")
    return {name: value for name, value in sizes.items() if value or name not in optional}


def read_header(name: str, metadata: Mapping[bytes, bytes] | None) -> Header:
    """Read the metadata key `moecache`; ValueError names the field that does not fit."""
    from lm_eval_moecache.records.schemas import check
    from lm_eval_moecache.trace.schema import TraceHeader

    if metadata is None or HEADER_KEY not in metadata:
        raise ValueError(f"trace {name}: the file has no metadata key 'moecache'.")
    what = f"trace {name}: metadata 'moecache'"
    fields = check(TraceHeader, parse_json(metadata[HEADER_KEY], what), what)
    depth, drafts = fields.predicted_depth, fields.draft
    _refuse(what, fields, "predicted_depth", depth >= fields.num_layers, "must be below num_layers")
    is_apart = bool(fields.predicted_by) and depth != 1
    _refuse(what, fields, "predicted_by", is_apart, "needs predicted_depth 1 with it")
    return Header(
        geometry=_geometry(what, fields),
        seed=fields.seed,
        predicted_depth=depth,
        predicted_by=fields.predicted_by,
        proposals=tuple(fields.proposals),
        draft=None if drafts is None else _draft(f"{what}: draft", drafts, fields.num_layers),
        ranked=0 if drafts is None else drafts.ranked,
    )


def _refuse(what: str, fields: ModelSizes, field: str, is_bad: bool, rule: str) -> None:
    if is_bad:
        raise ValueError(f"{what}: {field}={shown(getattr(fields, field))} {rule}.")


def _draft(what: str, fields: DraftSizes, num_layers: int) -> Draft:
    geometry, targets = _geometry(what, fields), tuple(fields.targets)
    is_other = bool(targets) and len(targets) != geometry.num_layers
    _refuse(what, fields, "targets", is_other, "must hold a layer for each of the draft's")
    is_beyond = max(targets, default=-1) >= num_layers
    _refuse(what, fields, "targets", is_beyond, f"must lie below num_layers={num_layers}")
    is_unstored = fields.level >= len(geometry.precision)
    _refuse(what, fields, "level", is_unstored, "must be one of its precisions")
    return Draft(
        geometry=geometry, targets=targets, **{name: getattr(fields, name) for name in _OF_DRAFT}
    )


def _geometry(what: str, fields: ModelSizes) -> Geometry:
    precision = tuple(fields.precision.split(":"))
    element_bytes = fields.element_bytes or _ELEMENT_BYTES.get(precision[0])
    levels = fields.levels or [[size] for size in fields.expert_bytes]
    is_known = all(map(_PRECISION.fullmatch, precision))
    rule = "is not known. Allowed: names like bf16, fp8, int4, nf4, int2/g16, q4_k, unknown"
    _refuse(what, fields, "precision", not is_known, rule)
    rule = f"needs one of {', '.join(_ELEMENT_BYTES)} or element_bytes"
    _refuse(what, fields, "precision", element_bytes is None, rule)
    is_short = any(len(sizes) != len(precision) for sizes in levels)
    _refuse(what, fields, "levels", is_short, "must hold one size per precision for each layer")
    is_other = [sizes[0] for sizes in levels] != fields.expert_bytes
    _refuse(what, fields, "levels", is_other, "must begin with the sizes of expert_bytes")
    try:
        return Geometry(
            **{name: getattr(fields, name) for name in (*_OF_MODEL, "hidden_size")},
            expert_bytes=tuple(map(tuple, levels)),
            dense_bytes=tuple(fields.dense_bytes),
            precision=precision,
            element_bytes=float(element_bytes or 0),
            compute_bytes=tuple(fields.compute_bytes),
        )
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def write_requests(requests: Sequence[RequestRecord]) -> bytes:
    """Return the JSON of the metadata key `moecache_requests`."""
    rows: list[tuple[Any, ...]] = []
    for r in requests:
        document = () if r.document is None else (r.document, r.place)
        passes = [p.index for p in r.passes]
        rows.append((r.task, r.kind, r.prompt_tokens, r.output_tokens, passes, *document))
    return _dumped(rows)


def write_settled(
    scans: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]
) -> dict[bytes, bytes]:
    """Return the metadata keys `moecache_scans` and `moecache_drafts`, without empty ones."""
    rows_by_key = {SCANS_KEY: scans, DRAFTS_KEY: drafts}
    return {key: _dumped(rows) for key, rows in rows_by_key.items() if rows}


def _dumped(rows: Sequence[Sequence[Any]]) -> bytes:
    return json.dumps(list(rows), separators=(",", ":")).encode()


Listed = tuple[
    tuple[TracedRequest, ...] | None, tuple[tuple[int, int], ...], dict[int, tuple[int, int]]
]
"""The requests of a trace, None where it lists none; its scans; and pass -> drafted, accepted."""


def read_listed(name: str, metadata: Mapping[bytes, bytes], num_passes: int) -> Listed:
    """Read the optional keys. ValueError names the key and the entry that does not fit."""

    def rows(key: bytes, kind: Any) -> list[Any]:
        from lm_eval_moecache.records.schemas import check_as

        what = f"trace {name}: metadata {key.decode()!r}"
        return check_as(list[kind], metadata[key], what) if key in metadata else []

    def refuse(key: bytes, row: object, rule: str) -> None:
        what = f"trace {name}: metadata {key.decode()!r}"
        raise ValueError(f"{what}: {shown(row)} must be {rule} below {num_passes}.")

    requests = rows(REQUESTS_KEY, TracedRequest)
    for request in requests:
        numbers = (request.prompt_tokens, request.output_tokens or 0, *request.passes)
        if min(numbers) < 0 or max(request.passes, default=-1) >= num_passes:
            refuse(REQUESTS_KEY, request, "of numbers from 0 on, and of passes")
    scans, end = rows(SCANS_KEY, tuple[int, int]), 0
    for first, count in scans:
        if not end <= first < first + count <= num_passes:
            refuse(SCANS_KEY, [first, count], "[first pass, passes], in order and")
        end = first + count
    settled: dict[int, tuple[int, int]] = {}
    before = -1
    for index, drafted, accepted in rows(DRAFTS_KEY, tuple[int, int, int]):
        if not (before < index < num_passes and 0 <= accepted <= drafted <= MOST_DRAFTED):
            rule = f"[pass, drafted (at most {MOST_DRAFTED}), accepted of them], in order and"
            refuse(DRAFTS_KEY, [index, drafted, accepted], rule)
        settled[index], before = (drafted, accepted), index
    listed = tuple(requests) if REQUESTS_KEY in metadata else None
    return listed, tuple(scans), settled
