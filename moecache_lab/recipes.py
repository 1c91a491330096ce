"""Recipes of the papers' tables and figures: looked up by name, and fitted to a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from lm_eval_moecache.records.files import TINY, read_yaml, recipes_dir
from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.records.schemas import Schema, check
from lm_eval_moecache.report.runs.schema import Name
from moecache_lab.claims.schema import Compared

# Offline task -> the benchmark of the papers that it stands for.
REAL_TASKS: Mapping[str, str] = {
    "tiny_gsm8k": "gsm8k",
    "tiny_mmlu": "mmlu",
    "tiny_arc": "arc_easy",
    "tiny_truthfulqa": "truthfulqa_gen",
    "tiny_bbh": "bbh_zeroshot",
    "tiny_wikitext": "wikitext",
}
_PART = re.compile(r"\{([NKL])\*([0-9.]+)\}")


class ReproducedValue(Compared):
    """Our figure for the paper's: a metric of the one run with these settings."""

    metric: Name
    form: Literal["value", "ratio", "reduction", "difference"] = "value"


class PaperValue(Schema):
    """One number of the paper: a value, a range [from, to], or words."""

    what: Name
    paper: int | float | Annotated[list[int | float], Field(min_length=2, max_length=2)] | str
    ours: ReproducedValue | None = None
    """None where only a look at the plot or table can compare."""


class Analysis(Schema):
    """A call of `moecache analyze`, for figures that do not come from a grid of runs."""

    analysis: Name
    options: dict[str, Any] = Field(default_factory=dict)


class Recipe(Schema):
    """A recipe file, with either `sweep` (fields of a sweep file) or `analyze`."""

    paper: Name
    where: Name
    """Which table or figure, in which section."""
    title: Name
    claims: list[str] = Field(default_factory=list)
    notes: str = ""
    like: str | None = None
    """Another recipe, PAPER/FIGURE, whose `sweep` this recipe's fields override."""
    sweep: dict[str, Any] = Field(default_factory=dict)
    analyze: Analysis | None = None
    tiny: dict[str, Any] = Field(default_factory=dict)
    """Model arguments, or options of the analysis, for the shipped model only."""
    real: dict[str, Any] = Field(default_factory=dict)
    """Those used in their place for any other model."""
    real_tasks: dict[str, str] = Field(default_factory=dict)
    """Offline task -> the benchmark that it stands for, beyond the usual ones."""
    said: list[PaperValue] = Field(default_factory=list)


def recipe_names() -> list[str]:
    """Return the names of all recipes, PAPER/FIGURE."""
    paths = sorted(recipes_dir().glob("*/*.yaml"))
    return [f"{path.parent.name}/{path.stem}" for path in paths]


def load_recipe(name: str) -> Recipe:
    """Read a recipe. Raises ValueError for an unknown name or a file that does not fit."""
    names = recipe_names()
    if name not in names:
        raise unknown_name_error("reproduce", name, names)
    path = recipes_dir() / f"{name}.yaml"
    recipe = check(Recipe, read_yaml(path, f"recipe {name}"), f"recipe {name}")
    if recipe.like is not None:
        base = load_recipe(recipe.like)
        keys = ("tiny", "real", "real_tasks", "analyze")
        inherited = {key: getattr(base, key) or getattr(recipe, key) for key in keys}
        inherited["sweep"] = {**base.sweep, **recipe.sweep}
        recipe = recipe.model_copy(update=inherited)
    if bool(recipe.sweep) == (recipe.analyze is not None):
        raise ValueError(f"recipe {name} must have one of `sweep` and `analyze`.")
    return recipe


def fitted(name: str, pretrained: str, limit: int | float | None) -> Recipe:
    """Return a recipe fitted to this model: its sizes, tasks, links and the paper's numbers.

    `{N*0.5}` is half the experts of a layer, `{K*1}` top-k, `{L*0.5}` half the layers; each at
    least 1.
    """
    recipe = load_recipe(name)
    tasks = {} if pretrained == TINY else {**REAL_TASKS, **recipe.real_tasks}
    data = recipe.model_dump(exclude_unset=True)
    if _PART.search(str(data)):
        # Imported late: a list of names should not wait for torch.
        from lm_eval_moecache.harness.preflight import geometry_of

        data = _mapped(data, partial(_filled, geometry=geometry_of(pretrained)))
    data = _mapped(data, partial(_renamed, tasks=tasks))
    settings = data.get("tiny" if pretrained == TINY else "real", {})
    if recipe.analyze is not None:
        options = {"pretrained": pretrained, **data["analyze"].get("options", {}), **settings}
        if limit is not None and recipe.analyze.analysis == "predictability":
            options["limit"] = limit
        data["analyze"] = {"analysis": recipe.analyze.analysis, "options": options}
    else:
        sweep = data["sweep"]
        sweep["base"] = {"pretrained": pretrained, **sweep.get("base", {}), **settings}
        sweep.setdefault("title", recipe.title)
        if limit is not None:
            data["sweep"] = {**_without_limits(sweep), "limit": limit}
    return check(Recipe, {**data, "like": None}, f"recipe {name}")


def _without_limits(value: Any) -> Any:
    """Drop the limits of single runs and grids: the requested limit replaces them all."""
    if isinstance(value, Mapping):
        return {k: _without_limits(v) for k, v in value.items() if k != "limit"}
    return [_without_limits(item) for item in value] if isinstance(value, list) else value


def _filled(text: str, geometry: Geometry) -> Any:
    sizes = {"N": geometry.num_experts, "K": geometry.top_k, "L": geometry.num_layers}

    def number(match: re.Match[str]) -> str:
        return str(max(1, round(sizes[match[1]] * float(match[2]))))

    placeholder = _PART.fullmatch(text)
    return int(number(placeholder)) if placeholder else _PART.sub(number, text)


def _renamed(text: str, tasks: Mapping[str, str]) -> str:
    """Replace a task's name where it stands alone or after an `@`, as in `ttft_ms@tiny_gsm8k`."""
    head, at, tail = text.rpartition("@")
    return head + at + tasks.get(tail, tail)


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(k, change): _mapped(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
