"""Analyse a model as the papers do: sensitivity, locality, coactivation and others."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.sizes import is_per_layer, parse_capacity
from lm_eval_moecache.report.render import rows_as_markdown

_OF_A_TEXT = ("coactivation", "divergence", "drafting", "locality", "optimal_expert", "sensitivity")
ANALYSES = tuple(sorted((*_OF_A_TEXT, "predictability")))
_LOSSY = "big_moe_on_edge_drop_cold,ik_llama_cpp_ser,mixture_cache"
# Option -> its type, its help, and the analyses that look at it with their defaults.
_OPTIONS: Mapping[str, tuple[type, str, Mapping[str, Any]]] = {
    "text": (
        str,
        "a plain text, or a .jsonl with one a line (default for tiny: its held-out pages)",
        dict.fromkeys(_OF_A_TEXT),
    ),
    "max_tokens": (
        int,
        "how much of it to read (4096)",
        {**dict.fromkeys(_OF_A_TEXT, 4096), "optimal_expert": 256},
    ),
    "tasks": (str, "predictability: a,b (tiny: its tasks that generate)", {"predictability": None}),
    "limit": (int, "predictability: documents of each task (100)", {"predictability": 100}),
    "profile": (
        str,
        "predictability: the predictor (tiny has its own)",
        {"predictability": None},
    ),
    "seeds": (int, "sensitivity: draws per swapped rank (default: 3)", {"sensitivity": 3}),
    "rank": (int, "optimal_expert: whose choices are tried (default: 2)", {"optimal_expert": 2}),
    "capacity": (
        str,
        "locality, divergence: the cache of each layer (default: 8/layer)",
        {"locality": "8/layer", "divergence": "8/layer"},
    ),
    "policies": (
        str,
        f"divergence: a,b (default: {_LOSSY})",
        {"divergence": _LOSSY},
    ),
    "layer": (
        int,
        "the MoE layer to draw (locality: 0, coactivation: 1)",
        {"locality": 0, "coactivation": 1},
    ),
    "alpha": (
        float,
        "coactivation: what a buddy list covers (default: 0.95)",
        {"coactivation": 0.95},
    ),
    "k_max": (int, "coactivation: the longest buddy list (default: 16)", {"coactivation": 16}),
    "sample_tokens": (
        int,
        "coactivation: tokens on which outputs are compared (default: 256)",
        {"coactivation": 256},
    ),
    "draft": (str, "drafting: the draft model (default: self:int4)", {"drafting": "self:int4"}),
    "lambda": (float, "locality: of cache_prior (default: 0.5)", {"locality": 0.5}),
}
Rows = list[dict[str, Any]]
Found = tuple[dict[str, Rows], str, Callable[[str], Any]]
"""Tables by name, the picture's title, and what draws it under a title."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("analysis", help=" or ".join(ANALYSES))
    parser.add_argument("--pretrained", default="tiny", help="tiny, a folder or a hub id")
    parser.add_argument("--out", help="folder for the JSON, the table and the pictures")
    for name, (kind, text, _) in _OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind | None, help=text)


def run(arguments: Namespace) -> int:
    name, model = arguments.analysis, arguments.pretrained
    if name not in ANALYSES:
        raise unknown("analysis", name, ANALYSES)
    options = _settled(name, arguments)
    if name == "predictability":
        tables, title, draw = _predictability(model, options)
    else:
        tables, title, draw = _of_a_text(name, model, options)
    if arguments.json:
        found = {"rows": tables[name]} if name in tables else tables
        sys.stdout.write(json.dumps({"model": model, **found}, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(map(rows_as_markdown, tables.values())))
    if arguments.out:
        from lm_eval_moecache.report.mpl_style import save_as

        folder = Path(arguments.out)
        for table, rows in tables.items():
            text = json.dumps({"model": model, "rows": rows}, indent=2) + "\n"
            write_whole(folder / f"{table}.json", text)
            write_whole(folder / f"{table}.md", rows_as_markdown(rows))
        save_as(draw(title), folder / name)
    return 0


def _settled(analysis: str, arguments: Namespace) -> dict[str, Any]:
    """Return this analysis' options; refuse those that only others look at."""
    options = {}
    for key in sorted(_OPTIONS):
        value, defaults = arguments[key], _OPTIONS[key][2]
        if analysis in defaults:
            options[key] = defaults[analysis] if value is None else value
        elif value is not None:
            owners = " and ".join(name for name in ANALYSES if name in defaults)
            raise ValueError(
                f"{key}={value!r} has no effect on analyze {analysis}: it belongs to analyze "
                f"{owners}. Leave it out."
            )
    if not 0 < options.get("alpha", 1) <= 1:
        raise ValueError(f"alpha={options['alpha']} must be above 0 and at most 1.")
    for key in ("k_max", "sample_tokens", "seeds", "limit", "max_tokens"):
        if options.get(key, 1) < 1:
            raise ValueError(f"{key}={options[key]} must be 1 or more.")
    for policy in options["policies"].split(",") if "policies" in options else ():
        load_policy(policy)
    if "capacity" in options and not is_per_layer(options["capacity"]):
        raise ValueError(
            f"capacity={options['capacity']!r} is one cache for all layers, but analyze {analysis} "
            "looks at a cache per layer. Allowed: like '8/layer'."
        )
    return options


def _check_sizes(options: Mapping[str, Any], geometry: Geometry) -> None:
    """Refuse what this model is too small for."""
    if "layer" in options and not 0 <= options["layer"] < geometry.num_layers:
        last = geometry.num_layers - 1
        raise ValueError(f"layer={options['layer']} must lie between 0 and {last}.")
    if "rank" in options and not 1 <= options["rank"] <= geometry.top_k:
        raise ValueError(
            f"rank={options['rank']} must lie between 1 and the router's top_k={geometry.top_k}."
        )
    if "capacity" in options:
        parse_capacity(options["capacity"], geometry)


def _predictability(model: str, options: Mapping[str, Any]) -> Found:
    from lm_eval_moecache.analysis import predictability

    tasks = [name for name in (options["tasks"] or "").split(",") if name]
    if not tasks and model != "tiny":
        raise ValueError("tasks: name tasks that generate text, such as gsm8k: --tasks gsm8k.")
    found = predictability.analyze(
        model,
        tasks or predictability.TINY_TASKS,
        limit=options["limit"],
        profile=options["profile"],
    )
    draw = partial(predictability.draw, found["certainty"])
    return found, f"{predictability.TITLE} ({model})", draw


def _of_a_text(name: str, model: str, options: Mapping[str, Any]) -> Found:
    # Imported late: they bring torch, and a misspelt analysis should not wait for it.
    from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel, read_texts
    from lm_eval_moecache.harness.preflight import geometry_of

    # Before the weights are loaded, which takes a real model minutes.
    _check_sizes(options, geometry_of(model))
    texts = read_texts(model, options["text"])
    analyzed = AnalyzedModel(model, texts, options["max_tokens"])
    rows, title, draw = _RUN[name](analyzed, options)
    return rows if isinstance(rows, dict) else {name: rows}, title, draw


Analysed = tuple[Rows | dict[str, Rows], str, Callable[[str], Any]]


def _sensitivity(analyzed: Any, options: Mapping[str, Any]) -> Analysed:
    from lm_eval_moecache.analysis import sensitivity

    rows = sensitivity.analyze(analyzed, options["seeds"])
    return rows, f"{sensitivity.TITLE} ({analyzed.name})", partial(sensitivity.draw, rows)


def _locality(analyzed: Any, options: Mapping[str, Any]) -> Analysed:
    from lm_eval_moecache.analysis import locality

    capacity, share = options["capacity"], options["lambda"]
    cache_prior = {"routing": "cache_prior", "routing.lambda": share}
    routings = {"standard": {}, f"cache_prior (lambda {share:g})": cache_prior}
    rows, maps = locality.analyze(analyzed, capacity, routings, options["layer"])
    return rows, f"{locality.TITLE} ({analyzed.name}, {capacity})", partial(locality.draw, maps)


def _divergence(analyzed: Any, options: Mapping[str, Any]) -> Analysed:
    from lm_eval_moecache.analysis import divergence

    capacity = options["capacity"]
    policies = {name: {"policy": name} for name in options["policies"].split(",")}
    rows = divergence.analyze(analyzed, policies, capacity)
    title = f"{divergence.TITLE} ({analyzed.name}, {capacity})"
    return rows, title, partial(divergence.draw, rows)


def _coactivation(analyzed: Any, options: Mapping[str, Any]) -> Analysed:
    from lm_eval_moecache.analysis import coactivation

    found, layer = coactivation.observe(analyzed, options["sample_tokens"]), options["layer"]
    similarity = found.similarity()
    rows = coactivation.analyze(found.counts, similarity, options["alpha"], options["k_max"])
    title = f"{coactivation.TITLE} ({analyzed.name}, MoE layer {layer})"
    return rows, title, partial(coactivation.draw, found.counts, similarity, layer)


def _optimal_expert(analyzed: Any, options: Mapping[str, Any]) -> Analysed:
    from lm_eval_moecache.analysis import optimal_expert

    rows = optimal_expert.analyze(analyzed, options["rank"])
    title = f"{optimal_expert.TITLE} ({analyzed.name}, rank {options['rank']})"
    return rows, title, partial(optimal_expert.draw, rows)


def _drafting(analyzed: Any, options: Mapping[str, Any]) -> Analysed:
    from lm_eval_moecache.analysis import drafting

    tables = drafting.analyze(analyzed, options["draft"])
    title = f"{drafting.TITLE} ({analyzed.name}, {options['draft']})"
    return tables, title, partial(drafting.draw, tables["drafting"])


_RUN: Mapping[str, Callable[[Any, Mapping[str, Any]], Analysed]] = {
    "coactivation": _coactivation,
    "divergence": _divergence,
    "drafting": _drafting,
    "locality": _locality,
    "optimal_expert": _optimal_expert,
    "sensitivity": _sensitivity,
}
