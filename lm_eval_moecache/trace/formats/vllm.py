"""vLLM's responses."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.trace.formats.base import (
    ROUTED,
    UNREADABLE,
    Options,
    Pass,
    TraceFormat,
    build,
    check_no_bool,
    check_routed,
    generation,
    responses,
    whole,
)
from lm_eval_moecache.trace.trace import Trace


class VLLM(TraceFormat):
    """vLLM's responses with `routed_experts`: a file of one or many, or a folder of saved JSON.

    Each choice of a response is a request: its prompt is one pass, each later token another. Base64
    of an `.npy` [tokens, layers, top_k]; the last sampled token never ran. Where prompt and
    generation share one array, the response must give the prompt's length (`usage.prompt_tokens`,
    `num_prompt_tokens`, or its `prompt_token_ids`).
    """

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
                both = {**response, **choice}
                passes += cls._passes(f"{what}: choice {number}", both, choice.get(ROUTED), request)
                request += 1
        return build(path.name, model, passes, options)

    @classmethod
    def _passes(
        cls, what: str, response: Mapping[str, Any], routed: Any, request: int
    ) -> Iterator[Pass]:
        if routed is None:
            raise ValueError(f"{what} has no {ROUTED!r}: did the request ask for it?")
        rows = cls._array(f"{what}: {ROUTED}", routed)
        key = "routed_experts_prompt_start"
        start = whole(what, response.get(key), key) or 0
        if response.get("prompt_routed_experts") is not None:
            prompt = cls._array(f"{what}: prompt_routed_experts", response["prompt_routed_experts"])
            return generation(prompt, rows, request, start)
        ids, length = response.get("prompt_token_ids"), response.get("num_prompt_tokens")
        length = (response.get("usage") or {}).get("prompt_tokens") if length is None else length
        length = len(ids) if length is None and isinstance(ids, list) else length
        if length is None:
            raise ValueError(
                f"{what} does not say how many of its {len(rows)} rows are the prompt's. Allowed: "
                "responses with `usage` or `prompt_token_ids`, or with num_prompt_tokens added."
            )
        num_prompt = (whole(what, length, "num_prompt_tokens") or 0) - start
        if not 0 <= num_prompt <= len(rows):
            raise ValueError(
                f"{what}: {len(rows)} rows of a prompt of {length} tokens from {start} on."
            )
        return generation(rows[:num_prompt], rows[num_prompt:], request, start)

    @staticmethod
    def _array(what: str, value: Any) -> Any:
        try:
            if isinstance(value, str):
                data = io.BytesIO(base64.b64decode(value, validate=True))
                array = np.load(data, allow_pickle=False)
            else:
                check_no_bool(what, value)
                array = np.asarray(value)
        except UNREADABLE as error:
            if str(error).startswith(what):
                raise
            raise ValueError(f"{what} is not a base64 of an .npy: {error}.") from None
        check_routed(what, array)
        return array
