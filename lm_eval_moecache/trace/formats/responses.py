"""Reads the responses of engines that return which experts each token was routed to."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm_eval_moecache.records.files import lines_of, parse_json, read_text
from lm_eval_moecache.trace.formats.arrays import ROUTED, UNREADABLE
from lm_eval_moecache.trace.formats.base import (
    LEAST_ROWS,
    Options,
    Rows,
    check_no_bool,
    checked_ids,
    whole,
)
from lm_eval_moecache.trace.trace import Trace

_NUMPY = b"\x93NUMPY"
_NESTED = ("usage", "meta_info", "sglext", "sgl_ext", "nvext", "engine_data")
"""Objects in a response that hold the routing, or the counts of tokens."""
_STARTS = ("start", "routed_experts_prompt_start", "routed_experts_start_len")
_PROMPT = ("num_prompt_tokens", "prompt_tokens", "prompt_token_ids")
_OUTPUT = ("token_ids", "output_ids", "completion_token_ids", "completion_tokens")
"""Fields that count tokens: by a number, or as the list of them."""


def read_responses(path: Path, options: Options) -> Trace:
    """Read responses of vLLM, SGLang and dynamo: a file of one or many, or a folder of saved JSON.

    Each choice of a response is a request: its prompt is one pass, each later token another. The
    last sampled token never ran. ValueError unless the rows are as many as the tokens counted in
    the response, from its start offset on.
    """
    rows, request, model = Rows(path), 0, ""
    for what, response in _responses(path):
        model = model or str(response.get("model") or path.stem)
        choices = response.get("choices") or response.get("outputs") or [response]
        if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
            raise ValueError(f"{what}: its choices must be objects.")
        shared = _flat({key: response[key] for key in response.keys() - {"choices", "outputs"}})
        total, outputs = None, 0
        if len(choices) > 1:
            # `usage` counts the tokens of all choices together.
            total = whole(what, shared.pop("completion_tokens", None), "completion_tokens")
        for number, choice in enumerate(choices):
            text = _text(f"{what}: choice {number}", shared | _flat(choice), options, total)
            rows.add_text(text.routed, text.prompt - text.start, request=request, start=text.start)
            outputs += text.output
            request += 1
        if total not in (None, outputs):
            raise ValueError(
                f"{what}: its choices have the rows of {outputs} generated tokens, but `usage` "
                f"counts {total}."
            )
    return rows.trace(options, model=model)


def _responses(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (place, response) of a file (one, a list, or one per line) or of a folder's JSON."""
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        what = f"trace {file.name}"
        text = read_text(file, what)
        try:
            records = parse_json(text, what)
        except ValueError:
            lines = [line for line in lines_of(text) if line.strip()]
            if len(lines) < 2:
                raise
            records = [parse_json(line, f"{what}: line {n}") for n, line in enumerate(lines, 1)]
        for number, record in enumerate(records if isinstance(records, list) else [records]):
            if not isinstance(record, dict):
                raise ValueError(f"{what}: response {number} must hold an object.")
            yield f"{what}: response {number}", record


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a response that are not null, with those of its nested objects."""
    fields = {key: value for key, value in record.items() if value is not None}
    for key in _NESTED:
        if isinstance(record.get(key), dict):
            fields |= _flat(record[key])
    return fields


class _Text(NamedTuple):
    """One request: ids [tokens, layers, top_k] from token `start` on, and its counts of tokens."""

    routed: Any
    start: int
    prompt: int
    output: int


def _text(what: str, fields: Mapping[str, Any], options: Options, total: int | None) -> _Text:
    """Return the routing of one choice; ValueError where rows and tokens do not agree.

    Without a count of its own, the choice has as many tokens as rows: its response has a `total`.
    """
    value = fields.get(ROUTED)
    if value is None:
        raise ValueError(f"{what} has no {ROUTED!r}: did the request ask for it?")
    own = value if isinstance(value, dict) else {}
    start = _counted(what, {**fields, **own}, _STARTS) or 0
    prompt, output = (_counted(what, fields, names) for names in (_PROMPT, _OUTPUT))
    if prompt is None or (output is None and total is None):
        raise ValueError(
            f"{what} does not say how many tokens its prompt and its answer have, so that nothing "
            "tells whether rows are missing. Allowed: responses with `usage`, or with the ids of "
            "their tokens."
        )
    due = None if output is None else prompt + output - 1 - start
    parts = [_decoded(f"{what}: {ROUTED}", value, due, options)]
    if fields.get(f"prompt_{ROUTED}") is not None:
        what_prompt = f"{what}: prompt_{ROUTED}"
        parts.insert(0, _decoded(what_prompt, fields[f"prompt_{ROUTED}"], None, options))
    if len({part.shape[1:] for part in parts}) > 1:
        raise ValueError(f"{what}: prompt and answer have other layers or another top-k.")
    routed = np.concatenate(parts)
    missing = max(prompt - start - len(routed), 0) if due is None else due - len(routed)
    if missing or start > prompt:
        cached = fields.get("cached_tokens", fields.get("prompt_tokens_details"))
        cached = cached.get("cached_tokens") if isinstance(cached, dict) else cached
        of_output = (
            "" if output is None else f" and {output} generated, the last of which never ran"
        )
        of_cache = f"; {cached} tokens of the prompt came from a cached prefix" if cached else ""
        raise ValueError(
            f"{what} has {len(routed)} rows of routing, from token {start} on, of {prompt} tokens "
            f"of the prompt{of_output}: {abs(missing)} are "
            f"{'missing' if missing > 0 else 'too many'}{of_cache}. Record without prefix caching, "
            "or add the position of the first row as routed_experts_prompt_start."
        )
    return _Text(routed, start, prompt, len(routed) + 1 + start - prompt)


def _counted(what: str, fields: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the count of the first of these fields that is there."""
    for name in names:
        if name in fields:
            value = fields[name]
            return whole(what, len(value) if isinstance(value, list) else value, name)
    return None


def _decoded(what: str, value: Any, due: int | None, options: Options) -> Any:
    """Return ids [tokens, layers, top_k] given as a list, as base64, or with their shape."""
    try:
        if isinstance(value, list):
            check_no_bool(what, value)
            return checked_ids(what, np.asarray(value), options)
        if isinstance(value, dict):  # dynamo's
            flat = np.frombuffer(base64.b64decode(value["data"], validate=True), value["dtype"])
            return checked_ids(what, flat.reshape(value["shape"]), options)
        data = base64.b64decode(value, validate=True)
        if data.startswith(_NUMPY):  # vLLM's
            return checked_ids(what, np.load(io.BytesIO(data), allow_pickle=False), options)
        ids = np.frombuffer(data, "<i4")
    except (KeyError, TypeError, *UNREADABLE) as error:
        if str(error).startswith(what):
            raise
        lacks = f"lacks {error}" if isinstance(error, KeyError) else f"is not readable: {error}"
        raise ValueError(f"{what} {lacks}.") from None
    return _shaped(what, ids, due, options)


def _shaped(what: str, ids: Any, due: int | None, options: Options) -> Any:
    """Return SGLang's ids, which come without a shape, as [due tokens, layers, top_k]."""
    top_k, layers = options.top_k, options.num_layers
    if top_k is None or due is None:
        raise ValueError(
            f"{what} is {len(ids)} ids without their shape, and nothing else tells the layers and "
            "the experts per token. Give them: `moecache trace convert IN OUT --model NAME`, or "
            "--top_k 8."
        )
    if due < 1 or not len(ids) or len(ids) % due:
        raise ValueError(
            f"{what}: {len(ids)} ids do not divide evenly among the {due} tokens that ran."
        )
    of_token = ids.reshape(due, -1)
    width, constant = of_token.shape[1], (of_token == of_token[0]).all(axis=0)
    if layers is None and due >= LEAST_ROWS and constant.any():
        raise ValueError(
            f"{what}: of {width} ids a token {constant.sum()} never change, as those of shared "
            "experts, which no router chooses. Give --model NAME: its layers and top-k tell which "
            "they are."
        )
    layers = layers or width // top_k
    if layers and width % layers == 0:
        routed = checked_ids(what, ids.reshape(due, layers, -1), options)
        if routed.shape[-1] == top_k:
            return routed
    model = f"{layers} layers of " if options.num_layers else ""
    raise ValueError(
        f"{what} has {width} ids a token, which are not those of {model}top_k={top_k}."
    )
