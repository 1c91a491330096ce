"""The papers' tables and figures as recipes: found by name, and turned into sweeps for a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.files import read_yaml
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.paths import TINY, recipes_dir
from lm_eval_moecache.records.schemas.base import check
from lm_eval_moecache.records.schemas.inputs import Recipe

# What each offline task stands for, with the paper's own benchmark in its place.
REAL_TASKS: Mapping[str, str] = {
    "tiny_gsm8k": "gsm8k",
    "tiny_mmlu": "mmlu",
    "tiny_arc": "arc_easy",
    "tiny_truthfulqa": "truthfulqa_gen",
    "tiny_bbh": "bbh_zeroshot",
    "tiny_wikitext": "wikitext",
}
_PART = re.compile(r"\{([NKL])\*([0-9.]+)\}")


def recipe_names() -> list[str]:
    """Return the names of all recipes, PAPER/FIGURE."""
    paths = sorted(recipes_dir().glob("*/*.yaml"))
    return [f"{path.parent.name}/{path.stem}" for path in paths]


def load_recipe(name: str) -> Recipe:
    """Read a recipe. Raises ValueError for an unknown name or a file that does not fit."""
    names = recipe_names()
    if name not in names:
        raise unknown("reproduce", name, names)
    path = recipes_dir() / f"{name}.yaml"
    recipe = check(Recipe, read_yaml(path, f"recipe {name}"), f"recipe {name}")
    if recipe.like is not None:
        base = load_recipe(recipe.like)
        inherited = {"tiny": base.tiny, "real": base.real, "real_tasks": base.real_tasks}
        changes: dict[str, Any] = {k: v or getattr(recipe, k) for k, v in inherited.items()}
        changes["sweep"] = {**base.sweep, **recipe.sweep}
        changes["analyze"] = recipe.analyze or base.analyze
        recipe = recipe.model_copy(update=changes)
    if bool(recipe.sweep) == (recipe.analyze is not None):
        raise ValueError(f"recipe {name} must have one of `sweep` and `analyze`.")
    return recipe


def fit(name: str, pretrained: str, limit: int | float | None) -> Recipe:
    """Return a recipe for this model: sizes, tasks, links and the paper's numbers with them.

    `{N*0.5}` is half the experts of a layer, `{K*1}` as many as a token takes, `{L*0.5}` half the
    layers; each at least 1.
    """
    recipe = load_recipe(name)
    tasks = {} if pretrained == TINY else {**REAL_TASKS, **recipe.real_tasks}
    data = recipe.model_dump(exclude_unset=True)
    if _PART.search(str(data)):
        # Imported late: it brings torch, and a list of names should not wait for it.
        from lm_eval_moecache.harness.preflight import geometry_of

        data = _filled(data, geometry_of(pretrained))
    data = _renamed(data, tasks)
    own = data.get("tiny" if pretrained == TINY else "real", {})
    if recipe.analyze is not None:
        options = {"pretrained": pretrained, **data["analyze"].get("options", {}), **own}
        if limit is not None and recipe.analyze.analysis == "predictability":
            options["limit"] = limit
        data["analyze"] = {"analysis": recipe.analyze.analysis, "options": options}
    else:
        sweep = data["sweep"]
        sweep["base"] = {"pretrained": pretrained, **sweep.get("base", {}), **own}
        sweep.setdefault("title", recipe.title)
        if limit is not None:
            data["sweep"] = {**_without_limits(sweep), "limit": limit}
    return check(Recipe, {**data, "like": None}, f"recipe {name}")


def _without_limits(value: Any) -> Any:
    """Leave out the limits of single runs and grids: the one that is asked for holds for all."""
    if isinstance(value, Mapping):
        return {k: _without_limits(v) for k, v in value.items() if k != "limit"}
    return [_without_limits(item) for item in value] if isinstance(value, list) else value


def _filled(value: Any, geometry: Geometry) -> Any:
    sizes = {"N": geometry.num_experts, "K": geometry.top_k, "L": geometry.num_layers}

    def number(match: re.Match[str]) -> str:
        return str(max(1, round(sizes[match[1]] * float(match[2]))))

    def fill(text: str) -> Any:
        whole = _PART.fullmatch(text)
        return int(number(whole)) if whole else _PART.sub(number, text)

    return _mapped(value, fill)


def _renamed(value: Any, tasks: Mapping[str, str]) -> Any:
    """Replace task names where they stand alone or after an `@`, as in `ttft_ms@tiny_gsm8k`."""

    def rename(text: str) -> str:
        head, at, tail = text.rpartition("@")
        return head + at + tasks.get(tail, tail)

    return _mapped(value, rename)


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(k, change): _mapped(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
