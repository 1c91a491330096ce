"""Train SiDA's data-aware network, which reads a text's tokens and foretells all layers' experts.

The prompts are those of `moecache profile predictor`: documents that `--tasks` are trained on
(never what they are tested on) or files; `tiny` has its own generator's where neither is given.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.profiling._texts import check_prompt_options, collect_prompts
from lm_eval_moecache.records.artifact import DATA_AWARE, Artifact, write_artifact
from lm_eval_moecache.records.paths import TINY

_COUNTS = ("limit", "tokens", "prompts_per_batch", "width", "truncate", "batch_size", "max_epochs")
_SCHEDULE = ("learning_rate", "batch_size", "max_epochs", "patience", "seed")
_RECIPE = ("width", "truncate", "hard_weight", *_SCHEDULE)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str, required=True, help="the network: NAME.safetensors")
    parser.add_argument("--pretrained", type=str, default=TINY, help="tiny, a folder or a hub id")
    parser.add_argument("--tasks", type=str | None, help="their training documents: a,b,c")
    parser.add_argument("--data", type=str | None, help="files of prompts: a.txt,b.jsonl")
    parser.add_argument("--include_path", type=str | None, help="folder with more tasks")
    parser.add_argument("--limit", type=int, default=200, help="documents of each task")
    parser.add_argument("--tokens", type=int, default=40, help="generated tokens of each prompt")
    parser.add_argument("--prompts_per_batch", type=int, default=64, help="generated together")
    parser.add_argument("--width", type=int, default=128, help="of the network")
    parser.add_argument("--truncate", type=int, default=30, help="experts distilled per router")
    parser.add_argument("--hard_weight", type=float, default=0.1, help="of the chosen experts")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="of Adam")
    parser.add_argument("--batch_size", type=int, default=16, help="texts of a training step")
    parser.add_argument("--max_epochs", type=int, default=60, help="most epochs")
    parser.add_argument(
        "--patience", type=int, default=5, help="epochs without gain until it stops"
    )
    parser.add_argument("--seed", type=int, default=42, help="of the 80/20 split and the training")


def run(arguments: Namespace) -> int:
    """Record, train, judge on the held-out prompts, write."""
    check_prompt_options(arguments, (*_COUNTS, "patience"))
    if not arguments.hard_weight >= 0:
        raise ValueError(f"hard_weight={arguments.hard_weight} must be 0 or more.")
    prompts, data = collect_prompts(arguments)
    artifact = _make(arguments, prompts, data)
    write_artifact(arguments.out, artifact)
    _report(arguments, artifact.made_from["layers"])
    return 0


def _make(arguments: Namespace, prompts: list[str], data: dict[str, Any]) -> Artifact:
    # Imported late: they bring torch, and a wrong option should not wait for it.
    import transformers

    from lm_eval_moecache.harness.preflight import geometry_of
    from lm_eval_moecache.model.checkpoint import model_path
    from lm_eval_moecache.model.moe_layers import describe, find_moe_layers, router_digest
    from lm_eval_moecache.model.predictor.learn_data_aware import Recipe, record_texts, train

    geometry_of(arguments.pretrained)  # says what cannot be read
    path = model_path(arguments.pretrained)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    layers = find_moe_layers(model)
    geometry = describe(model, layers, arguments.pretrained)
    recipe = Recipe(**{name: getattr(arguments, name) for name in _RECIPE})
    texts = record_texts(
        model,
        transformers.AutoTokenizer.from_pretrained(path),
        layers,
        prompts,
        num_tokens=arguments.tokens,
        batch_size=arguments.prompts_per_batch,
        truncate=max(recipe.truncate, geometry.top_k),
    )
    found = train(texts, model.get_input_embeddings(), geometry, recipe)
    counts = {"prompts": len(prompts), "tokens": sum(len(text.ids) for text in texts)}
    return Artifact(
        kind=DATA_AWARE,
        model=geometry.model,
        num_layers=geometry.num_layers,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        router_digest=router_digest(layers),
        made_from=data | dataclasses.asdict(recipe) | counts | found.told(),
        arrays={name: value.half().numpy() for name, value in found.network.state_dict().items()},
    )


def _report(arguments: Namespace, rows: list[dict[str, Any]]) -> None:
    if arguments.json:
        sys.stdout.write(json.dumps({"out": arguments.out, "layers": rows}, indent=2) + "\n")
        return
    from lm_eval_moecache.report.render import rows_as_markdown

    title = "share of the experts named rightly, on held-out prompts"
    sys.stdout.write(f"{arguments.out}: {title}\n\n{rows_as_markdown(rows)}")
