"""Formats that hold arrays of ids: numpy files, and the responses of vLLM and SGLang."""

from __future__ import annotations

import base64
import io
import logging
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.files import parse_json, read_text
from lm_eval_moecache.records.numbers import shown
from lm_eval_moecache.trace.formats.base import MOST_EXPERT, Options, Pass, TraceFormat, build
from lm_eval_moecache.trace.trace import Trace

logger = logging.getLogger(__name__)
ROUTED = "routed_experts"
_MOST_BYTES = 1 << 32
"""Of one array once unpacked: a small file may say that it holds any number of zeros."""
_UNREADABLE = (
    *(ValueError, OSError, EOFError, zlib.error),
    *(zipfile.BadZipFile, NotImplementedError, tokenize.TokenError),  # versions, broken headers
)
"""What numpy raises for arrays that are damaged."""


def generation(prompt: Any, steps: Any, request: int, first_token: int = 0) -> Iterator[Pass]:
    """Yield the passes of one request: its prompt's tokens at once, then one for each other.

    `prompt` and `steps` are ids [tokens, layers, top_k].
    """
    if len(prompt):
        ids = list(np.moveaxis(prompt, 1, 0))
        yield Pass(experts=ids, request=request, phase=PREFILL, first_token=first_token)
    for token, step in enumerate(steps, start=first_token + len(prompt)):
        yield Pass(experts=list(step[:, None]), request=request, first_token=token)


def check_routed(what: str, routed: Any) -> None:
    """Refuse an array that is not [tokens, layers, top_k] of whole numbers."""
    if routed.ndim != 3 or not routed.size or not np.issubdtype(routed.dtype, np.integer):
        raise ValueError(
            f"{what} is {routed.dtype} of shape {list(routed.shape)}, must be whole numbers of "
            "shape [tokens, layers, top_k] with none of them 0."
        )


class Array(TraceFormat):
    """`.npy` and `.npz`: `routed_experts` [tokens, layers, top_k], with the prompt's length or not.

    One request. The first `num_prompt_tokens` tokens are one prefill pass, others steps.
    """

    name = "array"
    suffixes = (".npz", ".npy")
    holds = "num_prompt_tokens, weights [tokens, layers, top_k] and num_experts where it has them"
    ARRAYS = (ROUTED, "num_experts", "num_prompt_tokens", "weights")

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        return head.startswith((b"PK\x03\x04", b"\x93NUMPY"))

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        what, arrays = f"trace {path.name}", cls._arrays(path)
        if ROUTED not in arrays:
            raise ValueError(
                f"{what} has no array {ROUTED!r} [tokens, layers, top_k]; it holds "
                f"{', '.join(map(repr, arrays)) or 'none'}."
            )
        unknown = sorted(set(arrays) - set(cls.ARRAYS))
        if unknown:
            logger.warning("%s: left out its arrays %s.", what, ", ".join(unknown))
        routed = arrays[ROUTED]
        check_routed(f"{what}: {ROUTED}", routed)

        def told(key: str, most: int, least: int = 0) -> int | None:
            array = arrays.get(key)
            if array is None:
                return None
            if array.size != 1 or not np.issubdtype(array.dtype, np.integer):
                raise ValueError(
                    f"{what}: {key} is {array.dtype} of shape {list(array.shape)}, must be one "
                    "whole number."
                )
            value = int(array.reshape(-1)[0])
            if not least <= value <= most:
                raise ValueError(f"{what}: {key}={value} must be in {least}..{most}.")
            return value

        count = told("num_experts", MOST_EXPERT + 1, least=1)
        prompt = told("num_prompt_tokens", len(routed)) or 0
        passes = list(generation(routed[:prompt], routed[prompt:], 0))
        if "weights" in arrays:
            weights = arrays["weights"]
            if weights.shape != routed.shape:
                raise ValueError(
                    f"{what}: weights has the shape {list(weights.shape)}, {ROUTED} has "
                    f"{list(routed.shape)}."
                )
            own = generation(weights[:prompt], weights[prompt:], 0)
            passes = [replace(p, weights=w.experts) for p, w in zip(passes, own, strict=True)]
        layers = routed.shape[1]

        def where(row: int) -> str:
            token, layer = divmod(row, layers)
            if row < prompt * layers:
                layer, token = divmod(row, prompt)
            return f"{ROUTED}[{token}, {layer}]"

        return build(path.name, path.stem, passes, options, num_experts=count, where=where)

    @classmethod
    def _arrays(cls, path: Path) -> dict[str, Any]:
        """Return the arrays that are ours to read; the others by name, and empty."""
        try:
            if path.suffix == ".npy":
                return {ROUTED: np.load(path, allow_pickle=False, mmap_mode="r")}
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    if info.file_size > _MOST_BYTES:
                        raise ValueError(f"{info.filename} has {info.file_size} bytes unpacked")
            with np.load(path, allow_pickle=False) as found:
                return {n: found[n] if n in cls.ARRAYS else np.zeros(0) for n in found.files}
        except _UNREADABLE as error:
            raise ValueError(f"trace {path.name} is no readable {path.suffix}: {error}.") from None


def responses(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the responses of a file (one, a list, or one a line), or of a folder's JSON."""
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
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


def _whole(what: str, value: Any, key: str) -> int | None:
    """Return a whole number from 0 on, or None where there is none."""
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise ValueError(f"{what}: {key}={shown(value)} must be a whole number, 0 or more.")
    return value


class VLLM(TraceFormat):
    """vLLM's responses with `routed_experts`: a file of one or many, or a folder of saved JSON.

    Each choice of a response is a request: its prompt is one pass, then each token another. Base64
    of an `.npy` [tokens, layers, top_k]; the last token that was sampled never ran. Where prompt
    and generation are one array, the response has to say how long the prompt is
    (`usage.prompt_tokens`, `num_prompt_tokens`, or its `prompt_token_ids`).
    """

    name = "vllm"
    suffixes = (".json", ".jsonl")
    holds = "phases, requests"
    reads_folders = True

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        return b'routed_experts"' in head and b'"meta_info"' not in head

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        passes: list[Pass] = []
        request, model = 0, ""
        for what, response in responses(path):
            model = model or str(response.get("model") or path.stem)
            choices = response.get("choices") or response.get("outputs") or [response]
            for number, choice in enumerate(choices):
                if not isinstance(choice, Mapping):
                    raise ValueError(f"{what}: choice {number} must hold an object.")
                told = {**response, **choice}
                passes += cls._passes(f"{what}: choice {number}", told, choice.get(ROUTED), request)
                request += 1
        return build(path.name, model, passes, options)

    @classmethod
    def _passes(
        cls, what: str, told: Mapping[str, Any], routed: Any, request: int
    ) -> Iterator[Pass]:
        if routed is None:
            raise ValueError(f"{what} has no {ROUTED!r}: was it asked for?")
        own = cls._array(f"{what}: {ROUTED}", routed)
        start = _whole(what, told.get("routed_experts_prompt_start"), "routed_experts_prompt_start")
        start = start or 0
        if told.get("prompt_routed_experts") is not None:
            prompt = cls._array(f"{what}: prompt_routed_experts", told["prompt_routed_experts"])
            return generation(prompt, own, request, start)
        ids, length = told.get("prompt_token_ids"), told.get("num_prompt_tokens")
        length = (told.get("usage") or {}).get("prompt_tokens") if length is None else length
        length = len(ids) if length is None and isinstance(ids, list) else length
        if length is None:
            raise ValueError(
                f"{what} does not say how many of its {len(own)} rows are the prompt's. Allowed: "
                "responses with `usage` or `prompt_token_ids`, or with num_prompt_tokens added."
            )
        rows = (_whole(what, length, "num_prompt_tokens") or 0) - start
        if not 0 <= rows <= len(own):
            raise ValueError(
                f"{what}: {len(own)} rows of a prompt of {length} tokens from {start} on."
            )
        return generation(own[:rows], own[rows:], request, start)

    @staticmethod
    def _array(what: str, value: Any) -> Any:
        try:
            if isinstance(value, str):
                data = io.BytesIO(base64.b64decode(value, validate=True))
                found = np.load(data, allow_pickle=False)
            else:
                found = np.asarray(value)
        except _UNREADABLE as error:
            raise ValueError(f"{what} is no base64 of an .npy: {error}.") from None
        check_routed(what, found)
        return found


class SGLang(TraceFormat):
    """SGLang's `/generate` responses with `meta_info.routed_experts` (`return_routed_experts`).

    Base64 of int32 [tokens, layers, top_k] without its shape. `prompt_tokens` and
    `completion_tokens` give the tokens, of which the last never ran. The top-k is `top_k`, or else
    the largest that divides the rest and names no expert twice for a token.
    """

    name = "sglang"
    suffixes = (".json", ".jsonl")
    holds = "phases, requests"
    reads_folders = True
    LEAST_GROUPS = 64
    """Of tokens and layers, below which `top_k` is not told from the ids."""

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        return b'"meta_info"' in head and b'"routed_experts"' in head

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        passes: list[Pass] = []
        top_k = options.top_k
        for request, (what, response) in enumerate(responses(path)):
            info = response.get("meta_info")
            if not isinstance(info, dict) or not isinstance(info.get(ROUTED), str):
                raise ValueError(f"{what} has no meta_info.routed_experts: was it asked for?")
            prompt = _whole(what, info.get("prompt_tokens"), "prompt_tokens")
            output = _whole(what, info.get("completion_tokens"), "completion_tokens")
            if prompt is None or not output:
                raise ValueError(f"{what}: meta_info lacks prompt_tokens or completion_tokens.")
            try:
                ids = np.frombuffer(base64.b64decode(info[ROUTED], validate=True), dtype="<i4")
            except ValueError as error:
                raise ValueError(f"{what}: {ROUTED} is no base64 of int32: {error}.") from None
            tokens = prompt + output - 1
            if not tokens or not len(ids) or len(ids) % tokens:
                raise ValueError(
                    f"{what}: {len(ids)} ids of {tokens} tokens that ran do not go up."
                )
            width = len(ids) // tokens
            top_k = top_k or cls._top_k(what, ids, width)
            if width % top_k:
                raise ValueError(f"{what} has {width} ids a token, no multiple of top_k={top_k}.")
            routed = ids.reshape(tokens, -1, top_k)
            passes += generation(routed[:prompt], routed[prompt:], request)
        return build(path.name, path.stem, passes, options)

    @classmethod
    def _top_k(cls, what: str, ids: Any, width: int) -> int:
        for top_k in range(min(width, 64), 0, -1):
            if width % top_k == 0 and ids.size // top_k >= cls.LEAST_GROUPS:
                groups = np.sort(ids.reshape(-1, top_k), axis=-1)
                if not (groups[:, 1:] == groups[:, :-1]).any():
                    return top_k
        raise ValueError(
            f"{what} does not say the model's top-k, and is too short to tell it. Give it: "
            "`moecache trace convert IN OUT --top_k 8`."
        )
