"""Our keys of `--model_args` in one line each, for `moecache eval --help`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

MEANINGS: Mapping[str, str] = {
    "policy": "a name that `moecache policies` lists, or a YAML file (default: specmd)",
    "routing": "replace this axis of the policy; parameters as routing.NAME=value",
    "prefetch": "the same for prefetching",
    "eviction": "the same for eviction; a name with a dot is the path of a class of yours",
    "miss": "the same for what becomes of absent experts",
    "capacity": "of the cache: 5% of all expert bytes, 2GiB, 51 experts, 30/layer (default: 25%)",
    "precision": "how experts are stored, best first: int8, int8:int4:int2 (default: the model's)",
    "hardware": "profile to emulate, or a YAML of one (see `moecache policies`)",
    "bandwidth": "of the link, in place of the profile's: 5GB/s",
    "link": "priority: demands first, stale prefetches withdrawn; or fifo (default: priority)",
    "emulate": "charge each layer as one of this model: a name, a folder or a YAML",
    "warm": "fill the cache before the first request: a trace, or a JSON of `profile use`",
    "phases": "all, or decode: lossy algorithms act only while decoding (default: the policy's)",
    "seed": "of algorithms that draw (default: 0)",
    "trace": "folder to record a routing trace into, for `moecache replay`",
    "trace_keep": "lossless (default), routing (experts alone) or all (also for lossy replays)",
    "store_dir": "folder of what store=disk converts, once (default: ~/.cache/lm-eval-moecache)",
    "encoded_dir": "with precision: keep encoded experts there for later loads (default: nowhere)",
    "clock": "virtual, or wall: real transfers on this machine, measured (default: virtual)",
    "store": "with clock=wall: far experts lie in ram or on disk (default: ram)",
    "scoring": "parallel, or scan: scored text is routed as if it were decoded (default: parallel)",
    "cache_reset": "never, or request: each request starts as the first one did (default: never)",
    "draft": "moecache-spec, prefetch=draft: a model, self:int4, prompt_lookup (self:int4)",
    "draft_tokens": "moecache-spec: tokens drafted for each verify pass (default: 1)",
}


def help_text() -> str:
    """Return the section that stands below lm-eval's own help."""
    lines = ["keys of --model_args (--model moecache and moecache-spec), beside those of `hf`:", ""]
    lead = " " * 16
    for key, meaning in MEANINGS.items():
        lines.append(
            textwrap.fill(meaning, 98, initial_indent=f"  {key:14s}", subsequent_indent=lead)
        )
    return "\n".join([*lines, ""])
