"""What `moecache analyze` reads, prints and draws."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.harness.arguments import as_arguments_error
from lm_eval_moecache.records.command import Options, Report, with_options
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.numbers import finite, unknown_name_error
from lm_eval_moecache.records.ranges import Count, Range, Share
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
"""Analysis -> options with defaults; each is a function of a module of `analyses/`, its own or:"""
_MODULES = dict.fromkeys(("locality", "optimal_expert", "sensitivity"), "cache_conditional")
_OPTIONS: Mapping[str, tuple[Any, str]] = {
    "text": (str, "a plain text, or a .jsonl with one per line (tiny: its held-out pages)"),
    "max_tokens": (Count, "tokens of it to read"),
    "tasks": (str, "a,b (tiny: its tasks that generate)"),
    "limit": (Count, "documents of each task"),
    "profile": (str, "the predictor (tiny has its own)"),
    "seeds": (Count, "draws per swapped rank"),
    "rank": (int, "whose choices are tried"),
    "capacity": (str, "the cache of each layer"),
    "policies": (str, "a,b"),
    "layer": (int, "the MoE layer to draw"),
    "alpha": (Share, "share of co-activations in a buddy list"),
    "k_max": (Count, "the longest buddy list"),
    "sample_tokens": (Count, "tokens on which outputs are compared"),
    "draft": (str, "the draft model"),
    "lambda": (float, "of cache_prior"),
}
_OF_A_MODEL = {"layer": Range(least=0, below="num_layers"), "rank": Range(least=1, most="top_k")}


def _options() -> Options:
    """Return the options of all analyses, each with the analyses that read it."""
    options = {}
    for key, (kind, text) in _OPTIONS.items():
        owners = {name: own[key] for name, own in ANALYSES.items() if key in own}
        of = [name if value is None else f"{name} {value}" for name, value in owners.items()]
        options[key] = (kind, None, f"{text} ({', '.join(of)})")
    return options


@with_options(_options())
def analyze(
    analysis: str,
    *,
    pretrained: str = "tiny",
    trust_remote_code: bool | None = None,
    out: str | None = None,
    **given: Any,
) -> Report:
    """Analyse a model as the papers do: sensitivity, locality, coactivation and others.

    Args:
        analysis: coactivation, divergence, drafting, locality, optimal_expert, predictability or
            sensitivity
        pretrained: tiny, a folder or a hub id
        trust_remote_code: run the model's own modelling code: true
        out: folder for the JSON, the table and the pictures
    """
    if analysis not in ANALYSES:
        raise unknown_name_error("analysis", analysis, ANALYSES)
    options, trusted = _settled(analysis, given), {"trust_remote_code": bool(trust_remote_code)}
    # Imported late: a wrong option should not wait for torch.
    module = importlib.import_module(f"moecache_lab.analyses.{_MODULES.get(analysis, analysis)}")
    is_predicted = analysis == _PREDICTED
    subject = pretrained if is_predicted else _read(pretrained, options, **trusted)
    found = getattr(module, analysis)(subject, options, **(trusted if is_predicted else {}))
    tables = {"rows": found.tables[analysis]} if analysis in found.tables else found.tables
    if out:
        from lm_eval_moecache.report.plots import save_as

        folder = Path(out)
        for table, rows in found.tables.items():
            text = json.dumps(finite({"model": pretrained, "rows": rows}), indent=2) + "\n"
            write_whole(folder / f"{table}.json", text)
            write_whole(folder / f"{table}.md", rows_as_markdown(rows))
        figure = found.draw()
        title = f"{found.title} ({', '.join(filter(None, (pretrained, found.about)))})"
        # matplotlib cuts off titles wider than the figure.
        figure.suptitle("\n".join(wrap(title, int(10 * figure.get_figwidth()))))
        save_as(figure, folder / analysis)
    text = "\n".join(map(rows_as_markdown, found.tables.values()))
    return Report({"model": pretrained, **tables}, text)


def _read(model: str, options: Mapping[str, Any], **trusted: bool) -> Any:
    """Return the model with its text; options are checked before weights are loaded."""
    from lm_eval_moecache.harness.preflight import geometry_of
    from moecache_lab.analyzed_model import AnalyzedModel, read_texts

    _check_sizes(options, geometry_of(model, **trusted))
    texts = read_texts(model, options["text"])
    with as_arguments_error(model):
        return AnalyzedModel(model, texts, options["max_tokens"], **trusted)


def _settled(analysis: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return this analysis' options. Raises ValueError for options that only others read."""
    given = {key: value for key, value in sorted(asked.items()) if value is not None}
    for key, value in given.items():
        if key not in ANALYSES[analysis]:
            owners = " and ".join(name for name, defaults in ANALYSES.items() if key in defaults)
            raise ValueError(
                f"{key}={value!r} has no effect on analyze {analysis}: it belongs to analyze "
                f"{owners}. Leave it out."
            )
    options = {**ANALYSES[analysis], **given}
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
    for key, allowed in _OF_A_MODEL.items():
        allowed.check(key, options.get(key), geometry)
    if "capacity" in options:
        parse_capacity(options["capacity"], geometry)
