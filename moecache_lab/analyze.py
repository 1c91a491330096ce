"""Analyse a model as the papers do: sensitivity, locality, coactivation and others."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.cli.main import print_result
from lm_eval_moecache.harness.arguments import as_arguments_error
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.numbers import finite, unknown_name_error
from lm_eval_moecache.records.sizes import is_per_layer, parse_capacity
from lm_eval_moecache.report.tables.text import rows_as_markdown

_LOSSY = "big_moe_on_edge_drop_cold,ik_llama_cpp_ser,mixture_cache"
_OF_A_TEXT = {"text": None, "max_tokens": 4096}
_LISTS = {"layer": 1, "alpha": 0.95, "k_max": 16, "sample_tokens": 256}
_PREDICTED = "predictability"
ANALYSES: Mapping[str, Mapping[str, Any]] = {
    "coactivation": {**_OF_A_TEXT, **_LISTS},
    "divergence": {**_OF_A_TEXT, "capacity": "8/layer", "policies": _LOSSY},
    "drafting": {**_OF_A_TEXT, "draft": "self:int4"},
    "locality": {**_OF_A_TEXT, "capacity": "8/layer", "layer": 0, "lambda": 0.5},
    "optimal_expert": {**_OF_A_TEXT, "max_tokens": 256, "rank": 2},
    _PREDICTED: {"tasks": None, "limit": 100, "profile": None},
    "sensitivity": {**_OF_A_TEXT, "seeds": 3},
}
"""Analysis -> options with defaults; each is a module of `analyses/` with `run(model, options)`."""
_OPTIONS: Mapping[str, tuple[type, str]] = {
    "text": (
        str,
        "a plain text, or a .jsonl with one per line (default for tiny: its held-out pages)",
    ),
    "max_tokens": (int, "tokens of it to read (4096)"),
    "tasks": (str, "predictability: a,b (tiny: its tasks that generate)"),
    "limit": (int, "predictability: documents of each task (100)"),
    "profile": (str, "predictability: the predictor (tiny has its own)"),
    "seeds": (int, "sensitivity: draws per swapped rank (default: 3)"),
    "rank": (int, "optimal_expert: whose choices are tried (default: 2)"),
    "capacity": (str, "locality, divergence: the cache of each layer (default: 8/layer)"),
    "policies": (str, f"divergence: a,b (default: {_LOSSY})"),
    "layer": (int, "the MoE layer to draw (locality: 0, coactivation: 1)"),
    "alpha": (float, "coactivation: share of co-activations in a buddy list (default: 0.95)"),
    "k_max": (int, "coactivation: the longest buddy list (default: 16)"),
    "sample_tokens": (int, "coactivation: tokens on which outputs are compared (default: 256)"),
    "draft": (str, "drafting: the draft model (default: self:int4)"),
    "lambda": (float, "locality: of cache_prior (default: 0.5)"),
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("analysis", help=" or ".join(ANALYSES))
    parser.add_argument("--pretrained", default="tiny", help="tiny, a folder or a hub id")
    trust = "run the modelling code that comes with the model"
    parser.add_argument("--trust_remote_code", type=bool, default=False, help=trust)
    parser.add_argument("--out", help="folder for the JSON, the table and the pictures")
    for name, (kind, text) in _OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind | None, help=text)


def run(arguments: Namespace) -> int:
    name, model = arguments.analysis, arguments.pretrained
    if name not in ANALYSES:
        raise unknown_name_error("analysis", name, ANALYSES)
    options = _settled(name, arguments)
    analysis = _analyzed(name, model, options, trust_remote_code=arguments.trust_remote_code)
    tables = {"rows": analysis.tables[name]} if name in analysis.tables else analysis.tables
    text = "\n".join(map(rows_as_markdown, analysis.tables.values()))
    print_result(arguments.json, {"model": model, **tables}, text)
    if arguments.out:
        from lm_eval_moecache.report.plots import save_as

        folder = Path(arguments.out)
        for table, rows in analysis.tables.items():
            text = json.dumps(finite({"model": model, "rows": rows}), indent=2) + "\n"
            write_whole(folder / f"{table}.json", text)
            write_whole(folder / f"{table}.md", rows_as_markdown(rows))
        save_as(analysis.draw(analysis.title), folder / name)
    return 0


def _analyzed(name: str, model: str, options: Mapping[str, Any], **trusted: bool) -> Any:
    """Return the `Analysis`; errors in the options are raised before weights are loaded."""
    # Imported late: a misspelt analysis should not wait for torch.
    module = importlib.import_module(f"moecache_lab.analyses.{name}")
    if name == _PREDICTED:
        return module.run(model, options, **trusted)
    from lm_eval_moecache.harness.preflight import geometry_of
    from moecache_lab.analyzed_model import AnalyzedModel, read_texts

    _check_sizes(options, geometry_of(model, **trusted))
    texts = read_texts(model, options["text"])
    with as_arguments_error(model):
        analyzed = AnalyzedModel(model, texts, options["max_tokens"], **trusted)
    return module.run(analyzed, options)


def _settled(analysis: str, arguments: Namespace) -> dict[str, Any]:
    """Return this analysis' options. Raises ValueError for options that only others read."""
    options = dict(ANALYSES[analysis])
    for key in sorted(_OPTIONS):
        value = arguments[key]
        if value is not None and key not in options:
            owners = " and ".join(name for name, defaults in ANALYSES.items() if key in defaults)
            raise ValueError(
                f"{key}={value!r} has no effect on analyze {analysis}: it belongs to analyze "
                f"{owners}. Leave it out."
            )
        if value is not None:
            options[key] = value
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
    """Raise ValueError for a layer, rank or capacity that this model does not have."""
    if "layer" in options and not 0 <= options["layer"] < geometry.num_layers:
        last = geometry.num_layers - 1
        raise ValueError(f"layer={options['layer']} must lie between 0 and {last}.")
    if "rank" in options and not 1 <= options["rank"] <= geometry.top_k:
        raise ValueError(
            f"rank={options['rank']} must lie between 1 and the router's top_k={geometry.top_k}."
        )
    if "capacity" in options:
        parse_capacity(options["capacity"], geometry)
