"""Count how often each expert was used, in a trace or in an engine's counts: warm=PROFILE."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.profiling._counts import read_counts
from lm_eval_moecache.profiling._texts import say
from lm_eval_moecache.records.artifact import bare_name, write_use
from lm_eval_moecache.trace.use import load_use


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        type=str,
        help="a trace of any format, or counts: .coli_usage, imatrix .gguf, SGLang's .pt",
    )
    parser.add_argument("--out", type=str, required=True, help="the profile: NAME.json")
    text = "model of the profile (default: the trace's)"
    parser.add_argument("--model", type=str | None, help=text)


def run(arguments: Namespace) -> int:
    """Count and write; print how uneven the use is."""
    if Path(arguments.out).suffix != ".json":
        raise ValueError(f"out={arguments.out!r} must end in .json.")
    profile = read_counts(arguments.trace, "trace") or load_use(arguments.trace, key="trace")
    if arguments.model is not None:
        profile = replace(profile, model=bare_name(arguments.model))
    write_use(Path(arguments.out), profile)
    flat = sorted((count for layer in profile.counts for count in layer), reverse=True)
    total = max(sum(flat), 1)
    shares = {f"{p}%": sum(flat[: len(flat) * p // 100]) / total for p in (10, 25, 50)}
    found = {
        "out": arguments.out,
        "model": profile.model,
        "uses": sum(flat),
        "experts": len(flat),
        "never_used": flat.count(0),
        "share_of_the_most_used": shares,
    }
    lines = [
        f"{arguments.out}: {found['uses']} uses of {found['experts']} experts of "
        f"{profile.model or 'a model that is not named'}, {found['never_used']} of them never used:"
    ]
    lines += [f"  the {part} most used: {share:.1%}" for part, share in shares.items()]
    say(found, lines, arguments.json)
    return 0
