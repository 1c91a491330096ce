"""vLLM's responses with `routed_experts`: a file of one or many, or a folder of saved JSON."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.records.files import parse_json, read_text
from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.trace.formats.array import check_routed
from lm_eval_moecache.trace.formats.base import Options, Pass, TraceFormat, build, generation
from lm_eval_moecache.trace.trace import Trace

ROUTED, PROMPT = "routed_experts", "prompt_routed_experts"
START = "routed_experts_prompt_start"


class VLLM(TraceFormat):
    """Each choice of a response is a request: its prompt is one pass, then each token another.

    Base64 of an `.npy` [tokens, layers, top_k]; the last token that was sampled never ran. Where
    prompt and generation are one array, the response has to say how long the prompt is
    (`usage.prompt_tokens`, `num_prompt_tokens`, or its `prompt_token_ids`).
    """

    suffixes = (".json", ".jsonl")
    holds = "phases, requests"
    reads_folders = True

    @classmethod
    def sniff(cls, head: bytes, path: Path) -> bool:
        return b'routed_experts"' in head and b'"meta_info"' not in head

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        passes: list[Pass] = []
        request = 0
        for what, response in responses(path):
            choices = response.get("choices") or response.get("outputs") or [response]
            for number, choice in enumerate(choices):
                if not isinstance(choice, Mapping):
                    raise ValueError(f"{what}: choice {number} must hold an object.")
                passes += _passes(f"{what}: choice {number}", response, choice, request)
                request += 1
        return build(path.name, _model(path), passes, options)


def _passes(
    what: str, response: Mapping[str, Any], choice: Mapping[str, Any], request: int
) -> Iterator[Pass]:
    def told(key: str) -> Any:
        return choice.get(key, response.get(key))

    if choice.get(ROUTED) is None:
        raise ValueError(f"{what} has no {ROUTED!r}: was it asked for?")
    own = _array(f"{what}: {ROUTED}", choice[ROUTED])
    start = whole(what, told(START), START) or 0
    if told(PROMPT) is not None:
        prompt = _array(f"{what}: {PROMPT}", told(PROMPT))
        yield from generation(prompt, own, request, start)
        return
    ids, usage = told("prompt_token_ids"), response.get("usage") or {}
    length = told("num_prompt_tokens")
    length = usage.get("prompt_tokens") if length is None else length
    length = len(ids) if length is None and isinstance(ids, list) else length
    if length is None:
        raise ValueError(
            f"{what} does not say how many of its {len(own)} rows are the prompt's. Allowed: "
            "responses with `usage` or `prompt_token_ids`, or with num_prompt_tokens added."
        )
    rows = (whole(what, length, "num_prompt_tokens") or 0) - start
    if not 0 <= rows <= len(own):
        raise ValueError(f"{what}: {len(own)} rows of a prompt of {length} tokens from {start} on.")
    yield from generation(own[:rows], own[rows:], request, start)


def _array(what: str, value: Any) -> Any:
    try:
        if isinstance(value, str):
            found = np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
        else:
            found = np.asarray(value)
    except (ValueError, EOFError, OSError, binascii.Error) as error:
        raise ValueError(f"{what} is no base64 of an .npy: {error}.") from None
    check_routed(what, found)
    return found


def whole(what: str, value: Any, key: str) -> int | None:
    """Return a whole number from 0 on, or None where there is none."""
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise ValueError(f"{what}: {key}={shown(value)} must be a whole number, 0 or more.")
    return value


def responses(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the responses of a file (one, a list, or one a line), or of a folder's JSON."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    for file in files:
        what = f"trace {file.name}"
        text = read_text(file, what)
        try:
            found = parse_json(text, what)
        except ValueError:
            lines = [line for line in text.splitlines() if line.strip()]
            if len(lines) < 2:
                raise
            found = [parse_json(line, f"{what}: line {n}") for n, line in enumerate(lines, 1)]
        for number, each in enumerate(found if isinstance(found, list) else [found]):
            if not isinstance(each, dict):
                raise ValueError(f"{what}: response {number} must hold an object.")
            yield f"{what}: response {number}", each


def _model(path: Path) -> str:
    _, first = next(responses(path))
    return str(first.get("model") or path.stem)
