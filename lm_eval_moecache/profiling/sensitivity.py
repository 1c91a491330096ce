"""Measure how sensitive each layer is to lost experts, for AdapMoE's gating (routing=sensitivity).

The text is what `--tasks` are trained on (never what they are tested on), or plain text files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.profiling._texts import read_file, task_examples
from lm_eval_moecache.records.artifact import SENSITIVITY, Artifact, write_artifact
from lm_eval_moecache.records.paths import TINY
from lm_eval_moecache.records.sensitivity import LAYERS, THRESHOLDS


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str, required=True, help="the profile: NAME.safetensors")
    parser.add_argument("--pretrained", type=str, default=TINY, help="tiny, a folder or a hub id")
    parser.add_argument("--tasks", type=str | None, help="their training documents: a,b,c")
    parser.add_argument("--data", type=str | None, help="plain text files: a.txt,b.txt")
    parser.add_argument("--include_path", type=str | None, help="folder with more tasks")
    parser.add_argument("--limit", type=int, default=50, help="documents of each task")
    parser.add_argument("--max_tokens", type=int, default=20_000, help="how much text to read")


def run(arguments: Namespace) -> int:
    """Profile and write; print each layer's sensitivity and some thresholds."""
    texts, data = _collect(arguments)
    # Imported late: they bring torch, and a wrong option should not wait for it.
    from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel
    from lm_eval_moecache.analysis.fisher import Fisher
    from lm_eval_moecache.model.moe_layers import router_digest

    analyzed = AnalyzedModel(arguments.pretrained, texts, arguments.max_tokens)
    if analyzed.geometry.top_k < 2:
        raise ValueError(
            f"pretrained={arguments.pretrained!r} has one expert per token: none to leave out."
        )
    fisher = Fisher(analyzed)
    fisher.read()
    artifact = Artifact(
        kind=SENSITIVITY,
        model=arguments.pretrained,
        num_layers=analyzed.geometry.num_layers,
        num_experts=analyzed.geometry.num_experts,
        top_k=analyzed.geometry.top_k,
        router_digest=router_digest(analyzed.layers),
        made_from=data | {"tokens": fisher.num_tokens},
        arrays={LAYERS: fisher.sensitivity, THRESHOLDS: fisher.thresholds()},
    )
    write_artifact(arguments.out, artifact)
    _report(arguments, artifact)
    return 0


def _collect(arguments: Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return the texts, and what to write down of where they come from."""
    if not (arguments.tasks or arguments.data):
        raise ValueError("tasks, data: give --tasks, --data or both: a profile needs text.")
    if Path(arguments.out).suffix != ".safetensors":
        raise ValueError(f"out={arguments.out!r} must end in .safetensors.")
    for name in ("limit", "max_tokens"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"{name}={getattr(arguments, name)} must be 1 or more.")
    tasks = [name for name in (arguments.tasks or "").split(",") if name]
    files = [name for name in (arguments.data or "").split(",") if name]
    examples = task_examples(tasks, arguments.limit, arguments.include_path) if tasks else []
    texts = [example.text for example in examples] + [read_file("data", name) for name in files]
    return texts, {"tasks": tasks, "data": [Path(name).name for name in files]}


def _report(arguments: Namespace, artifact: Artifact) -> None:
    layers: list[float] = artifact.arrays[LAYERS].tolist()
    known: list[float] = artifact.arrays[THRESHOLDS].tolist()
    shares = {f"{share}%": known[share] for share in (10, 25, 50)}
    tokens = artifact.made_from["tokens"]
    found = {"out": arguments.out, "tokens": tokens, "sensitivity": layers, "thresholds": shares}
    if arguments.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    lines = [f"{arguments.out}: sensitivity from {tokens} tokens, in nats per token:"]
    lines += [f"  layer {layer}: {value:.4g}" for layer, value in enumerate(layers)]
    lines += [f"  {share} of the activations below {value:.4g}" for share, value in shares.items()]
    sys.stdout.write("\n".join(lines) + "\n")
