"""Train SiDA's data-aware network, which reads a text's tokens and predicts all layers' experts.

The prompts are those of `moecache profile predictor`: documents that `--tasks` are trained on
(never what they are tested on) or files; `tiny` has its own generator's where neither is given.
"""

from __future__ import annotations

import dataclasses

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.profiling._texts import (
    add_options,
    add_training_options,
    check_training,
    collect_prompts,
    say,
)
from lm_eval_moecache.records.artifact import DATA_AWARE, artifact_of, write_artifact


def add_arguments(parser: ArgumentParser) -> None:
    defaults = {"limit": 200, "tokens": 40, "batch_size": 16, "max_epochs": 60}
    add_training_options(parser, "network", learning_rate=1e-3, **defaults)
    add_options(
        parser,
        ("width", 128, "of the network"),
        ("truncate", 30, "experts distilled per router"),
        ("hard_weight", 0.1, "of the chosen experts"),
    )


def run(arguments: Namespace) -> int:
    """Record, train, judge on the held-out prompts, write."""
    check_training(arguments, "width", "truncate")
    if not arguments.hard_weight >= 0:
        raise ValueError(f"hard_weight={arguments.hard_weight} must be 0 or more.")
    prompts, data = collect_prompts(arguments)
    # Imported late: they bring torch, and a wrong option should not wait for it.
    from lm_eval_moecache.harness.preflight import geometry_of
    from lm_eval_moecache.model.checkpoint import load_model
    from lm_eval_moecache.model.moe_layers import describe, find_moe_layers, router_digest
    from lm_eval_moecache.model.predictor.training import TextRecipe, record_texts, train_on_texts
    from lm_eval_moecache.report.tables.text import rows_as_markdown

    trusted = {"trust_remote_code": arguments.trust_remote_code}
    geometry_of(arguments.pretrained, **trusted)  # says what cannot be read
    model, tokenizer = load_model(arguments.pretrained, **trusted)
    layers = find_moe_layers(model)
    geometry = describe(model, layers, arguments.pretrained)
    recipe = TextRecipe(
        **{f.name: getattr(arguments, f.name) for f in dataclasses.fields(TextRecipe)}
    )
    texts = record_texts(
        model,
        tokenizer,
        layers,
        prompts,
        num_tokens=arguments.tokens,
        batch_size=arguments.prompts_per_batch,
        truncate=max(recipe.truncate, geometry.top_k),
    )
    network, summary = train_on_texts(texts, model.get_input_embeddings(), geometry, recipe)
    counts = {"prompts": len(prompts), "tokens": sum(len(text.ids) for text in texts)}
    made_from = data | dataclasses.asdict(recipe) | counts | summary
    arrays = {name: value.half().numpy() for name, value in network.state_dict().items()}
    artifact = artifact_of(DATA_AWARE, geometry, router_digest(layers), made_from, arrays)
    write_artifact(arguments.out, artifact)
    rows = artifact.made_from["layers"]
    title = "share of the experts named rightly, on held-out prompts"
    lines = [f"{arguments.out}: {title}", "", rows_as_markdown(rows).rstrip("\n")]
    return say({"out": arguments.out, "layers": rows}, lines, arguments.json)
