"""Analyse a model as the papers do: sensitivity, locality, coactivation and others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.files import write_whole
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.sizes import is_per_layer, parse_capacity
from lm_eval_moecache.report.render import rows_as_markdown

ANALYSES = (
    *("coactivation", "drafting", "locality", "optimal_expert", "predictability"),
    "sensitivity",
)
_TEXT = {"text": None, "max_tokens": 4096}
# The options that not every analysis looks at, and their defaults.
_OWN: dict[str, dict[str, Any]] = {
    "coactivation": {**_TEXT, "layer": 1, "alpha": 0.95, "k_max": 16, "sample_tokens": 256},
    "drafting": {**_TEXT, "draft": "self:int4"},
    "locality": {**_TEXT, "capacity": "8/layer", "layer": 0, "lambda_": 0.5},
    "optimal_expert": {"text": None, "max_tokens": 256, "rank": 2},
    "predictability": {"tasks": None, "limit": 100, "profile": None},
    "sensitivity": {**_TEXT, "seeds": 3},
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("analysis", help=" or ".join(ANALYSES))
    parser.add_argument("--pretrained", default="tiny", help="tiny, a folder or a hub id")
    parser.add_argument("--text", help="a plain text file (default for tiny: its held-out pages)")
    parser.add_argument("--max_tokens", type=int | None, help="how much of it to read (4096)")
    parser.add_argument(
        "--tasks", type=str | None, help="predictability: a,b (tiny: its tasks that generate)"
    )
    parser.add_argument(
        "--limit", type=int | None, help="predictability: documents of each task (100)"
    )
    parser.add_argument(
        "--profile", type=str | None, help="predictability: the predictor (tiny has its own)"
    )
    parser.add_argument("--out", help="folder for the JSON, the table and the pictures")
    _add_own(parser)


def _add_own(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--seeds", type=int | None, help="sensitivity: draws per swapped rank (default: 3)"
    )
    parser.add_argument(
        "--rank", type=int | None, help="optimal_expert: whose choices are tried (default: 2)"
    )
    parser.add_argument(
        "--capacity", type=str | None, help="locality: the cache of each layer (default: 8/layer)"
    )
    parser.add_argument(
        "--layer",
        type=int | None,
        help="the MoE layer to draw (locality: 0, coactivation: 1)",
    )
    parser.add_argument(
        "--alpha", type=float | None, help="coactivation: what a buddy list covers (default: 0.95)"
    )
    parser.add_argument(
        "--k_max", type=int | None, help="coactivation: the longest buddy list (default: 16)"
    )
    parser.add_argument(
        "--sample_tokens",
        type=int | None,
        help="coactivation: tokens on which outputs are compared (default: 256)",
    )
    parser.add_argument(
        "--draft", type=str | None, help="drafting: the draft model (default: self:int4)"
    )
    parser.add_argument(
        "--lambda",
        dest="lambda_",
        type=float | None,
        help="locality: of cache_prior (default: 0.5)",
    )


def run(arguments: Namespace) -> int:
    if arguments.analysis not in ANALYSES:
        raise unknown("analysis", arguments.analysis, ANALYSES)
    _settle(arguments)
    if arguments.analysis == "predictability":
        _predictability(arguments)
        return 0
    # Imported late: they bring torch, and a misspelt analysis should not wait for it.
    from lm_eval_moecache.analysis.analyzed_model import AnalyzedModel, read_texts
    from lm_eval_moecache.harness.preflight import geometry_of

    # Before the weights are loaded, which takes a real model minutes.
    _check_sizes(arguments, geometry_of(arguments.pretrained))
    texts = read_texts(arguments.pretrained, arguments.text)
    analyzed = AnalyzedModel(arguments.pretrained, texts, arguments.max_tokens)
    rows = _RUN[arguments.analysis](analyzed, arguments)
    if arguments.json:
        sys.stdout.write(json.dumps({"model": analyzed.name, "rows": rows}, indent=2) + "\n")
    else:
        sys.stdout.write(rows_as_markdown(rows))
    if arguments.out:
        _write(Path(arguments.out), arguments.analysis, {"model": analyzed.name, "rows": rows})
    return 0


def _settle(arguments: Namespace) -> None:
    """Fill in the defaults of this analysis; refuse the options that only others look at."""
    own = _OWN[arguments.analysis]
    for key in sorted({key for options in _OWN.values() for key in options}):
        value = getattr(arguments, key)
        if key in own:
            setattr(arguments, key, own[key] if value is None else value)
        elif value is not None:
            owners = " and ".join(name for name in ANALYSES if key in _OWN[name])
            raise ValueError(
                f"{key.strip('_')}={value!r} has no effect on analyze {arguments.analysis}: "
                f"it belongs to analyze {owners}. Leave it out."
            )
    if arguments.analysis == "coactivation":
        if not 0 < arguments.alpha <= 1:
            raise ValueError(f"alpha={arguments.alpha} must be above 0 and at most 1.")
        for key in ("k_max", "sample_tokens"):
            if getattr(arguments, key) < 1:
                raise ValueError(f"{key}={getattr(arguments, key)} must be 1 or more.")
    for key in ("seeds", "limit", "max_tokens"):
        if key in own and getattr(arguments, key) < 1:
            raise ValueError(f"{key}={getattr(arguments, key)} must be 1 or more.")
    if arguments.analysis == "locality" and not is_per_layer(arguments.capacity):
        raise ValueError(
            f"capacity={arguments.capacity!r} is one cache for all layers, but analyze locality "
            "looks at a cache per layer. Allowed: like '8/layer'."
        )


def _check_sizes(arguments: Namespace, geometry: Geometry) -> None:
    """Refuse what this model is too small for."""
    if arguments.layer is not None and not 0 <= arguments.layer < geometry.num_layers:
        last = geometry.num_layers - 1
        raise ValueError(f"layer={arguments.layer} must lie between 0 and {last}.")
    if arguments.rank is not None and not 1 <= arguments.rank <= geometry.top_k:
        raise ValueError(
            f"rank={arguments.rank} must lie between 1 and the router's top_k={geometry.top_k}."
        )
    if arguments.capacity is not None:
        parse_capacity(arguments.capacity, geometry)


def _predictability(arguments: Namespace) -> None:
    from lm_eval_moecache.analysis import predictability

    tasks = [name for name in (arguments.tasks or "").split(",") if name]
    if not tasks and arguments.pretrained != "tiny":
        raise ValueError("tasks: name tasks that generate text, such as gsm8k: --tasks gsm8k.")
    name = arguments.pretrained
    found = predictability.analyze(
        name,
        tasks or predictability.TINY_TASKS,
        limit=arguments.limit,
        profile=arguments.profile,
    )
    tables = {
        "certainty": found.certainty,
        "layers": found.layers,
        "correlations": found.correlations,
        "replacement": found.replacement,
    }
    if arguments.json:
        sys.stdout.write(json.dumps({"model": name, **tables}, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(rows_as_markdown(rows) for rows in tables.values()))
    if not arguments.out:
        return
    folder = Path(arguments.out)
    for table, rows in tables.items():
        _write(folder, table, {"model": name, "rows": rows})
    for suffix in ("svg", "png"):
        title = f"{predictability.TITLE} ({name})"
        predictability.draw(found.certainty, title, str(folder / f"predictability.{suffix}"))


def _sensitivity(analyzed: Any, arguments: Namespace) -> list[dict[str, Any]]:
    from lm_eval_moecache.analysis import sensitivity

    rows = sensitivity.analyze(analyzed, arguments.seeds)
    if arguments.out:
        for suffix in ("svg", "png"):
            path = f"{arguments.out}/sensitivity.{suffix}"
            sensitivity.draw(rows, f"{sensitivity.TITLE} ({analyzed.name})", path)
    return rows


def _locality(analyzed: Any, arguments: Namespace) -> list[dict[str, Any]]:
    from lm_eval_moecache.analysis import locality

    cache_prior = {"routing": "cache_prior", "routing.lambda": arguments.lambda_}
    routings = {"standard": {}, f"cache_prior (lambda {arguments.lambda_:g})": cache_prior}
    rows, maps = locality.analyze(analyzed, arguments.capacity, routings, arguments.layer)
    if arguments.out:
        for suffix in ("svg", "png"):
            path = f"{arguments.out}/locality.{suffix}"
            locality.draw(maps, f"{locality.TITLE} ({analyzed.name}, {arguments.capacity})", path)
    return rows


def _coactivation(analyzed: Any, arguments: Namespace) -> list[dict[str, Any]]:
    from lm_eval_moecache.analysis import coactivation

    found = coactivation.observe(analyzed, arguments.sample_tokens)
    similarity = found.similarity()
    rows = coactivation.analyze(found.counts, similarity, arguments.alpha, arguments.k_max)
    if arguments.out:
        title = f"{coactivation.TITLE} ({analyzed.name}, MoE layer {arguments.layer})"
        for suffix in ("svg", "png"):
            path = f"{arguments.out}/coactivation.{suffix}"
            coactivation.draw(found.counts, similarity, arguments.layer, title, path)
    return rows


def _optimal_expert(analyzed: Any, arguments: Namespace) -> list[dict[str, Any]]:
    from lm_eval_moecache.analysis import optimal_expert

    rows = optimal_expert.analyze(analyzed, arguments.rank)
    if arguments.out:
        for suffix in ("svg", "png"):
            path = f"{arguments.out}/optimal_expert.{suffix}"
            title = f"{optimal_expert.TITLE} ({analyzed.name}, rank {arguments.rank})"
            optimal_expert.draw(rows, title, path)
    return rows


def _drafting(analyzed: Any, arguments: Namespace) -> list[dict[str, Any]]:
    from lm_eval_moecache.analysis import drafting

    rows = drafting.analyze(analyzed, arguments.draft)
    if arguments.out:
        for suffix in ("svg", "png"):
            path = f"{arguments.out}/drafting.{suffix}"
            drafting.draw(rows, f"{drafting.TITLE} ({analyzed.name}, {arguments.draft})", path)
    return rows


_RUN = {
    "coactivation": _coactivation,
    "drafting": _drafting,
    "locality": _locality,
    "optimal_expert": _optimal_expert,
    "sensitivity": _sensitivity,
}


def _write(folder: Path, name: str, found: dict[str, Any]) -> None:
    write_whole(folder / f"{name}.json", (json.dumps(found, indent=2) + "\n").encode())
    write_whole(folder / f"{name}.md", rows_as_markdown(found["rows"]).encode())
