"""SGLang's responses."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np

from lm_eval_moecache.trace.formats.base import (
    ROUTED,
    Options,
    Pass,
    TraceFormat,
    build,
    generation,
    responses,
    whole,
)
from lm_eval_moecache.trace.trace import Trace


class SGLang(TraceFormat):
    """SGLang's responses with `meta_info.routed_experts` (`return_routed_experts`).

    The routes of OpenAI's form have it as `sglext.routed_experts`, next to `usage`.
    Base64 of int32 [tokens, layers, top_k] without its shape. `prompt_tokens` plus
    `completion_tokens` count the tokens, the last of which never ran. The top-k is `top_k`, or else
    the largest divisor of the ids per token that gives no (token, layer) an expert twice.
    """

    suffixes = (".json", ".jsonl")
    holds = "phases, requests"
    reads_folders = True
    LEAST_GROUPS = 64
    """Fewest (token, layer) groups from which the top-k is inferred."""

    @classmethod
    def sniff(cls, head: bytes) -> bool:
        return b'"routed_experts"' in head and (b'"meta_info"' in head or b'"sglext"' in head)

    @classmethod
    def read(cls, path: Path, options: Options) -> Trace:
        passes: list[Pass] = []
        top_k = options.top_k
        for request, (what, response) in enumerate(responses(path)):
            info = response.get("meta_info")
            match response:
                case {"sglext": dict(extension), "usage": dict(usage)}:
                    info = {**usage, **extension}
            if not isinstance(info, dict) or not isinstance(info.get(ROUTED), str):
                raise ValueError(
                    f"{what} has no meta_info.routed_experts: did the request ask for it?"
                )
            prompt = whole(what, info.get("prompt_tokens"), "prompt_tokens")
            output = whole(what, info.get("completion_tokens"), "completion_tokens")
            if prompt is None or not output:
                raise ValueError(f"{what}: meta_info lacks prompt_tokens or completion_tokens.")
            try:
                ids = np.frombuffer(base64.b64decode(info[ROUTED], validate=True), dtype="<i4")
            except ValueError as error:
                raise ValueError(f"{what}: {ROUTED} is not a base64 of int32: {error}.") from None
            tokens = prompt + output - 1
            if not tokens or not len(ids) or len(ids) % tokens:
                raise ValueError(
                    f"{what}: {len(ids)} ids do not divide evenly among the {tokens} tokens that "
                    "ran."
                )
            width = len(ids) // tokens
            top_k = top_k or cls._top_k(what, ids, width)
            if width % top_k:
                raise ValueError(
                    f"{what} has {width} ids a token, not a multiple of top_k={top_k}."
                )
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
            f"{what} does not say the model's top-k, and is too short to infer it. Give it: "
            "`moecache trace convert IN OUT --top_k 8`."
        )
