"""The papers' tables and figures: all are readable and fit a model, and one is reproduced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_eval_moecache.cli.main import main
from lm_eval_moecache.report.runs.files import load_runs
from lm_eval_moecache.sweep.run import check_cells
from lm_eval_moecache.sweep.spec import read_sweep
from moecache_lab.recipes import ReproducedValue, fitted, recipe_names
from moecache_lab.reproduce import our_value
from tests.conftest import Checkpoint

PAPERS = {"specmd", "sp_moe", "buddymoe", "commitmoe", "cache_conditional"}


@pytest.mark.slow
@pytest.mark.parametrize("paper", sorted(PAPERS))
def test_every_recipe_fits_the_shipped_model(tmp_path: Path, paper: str) -> None:
    for name in recipe_names():
        if not name.startswith(paper):
            continue
        recipe = fitted(name, "tiny", 1)
        assert recipe.said, name
        if recipe.analyze is not None:
            continue
        path = tmp_path / f"{name.replace('/', '-')}.yaml"
        path.write_text(yaml.safe_dump(recipe.sweep))
        assert check_cells(read_sweep(path).cells()), name


def test_another_model_gets_its_own_sizes_links_and_tasks(checkpoint: Checkpoint) -> None:
    folder = str(checkpoint("mixtral"))
    recipe = fitted("buddymoe/table_2", folder, None)
    assert recipe.sweep["base"]["capacity"] == "6/layer"
    assert "emulate" not in recipe.sweep["base"]
    tasks = [axes["tasks"] for axes in recipe.sweep["grid"]]
    assert tasks == [["arc_easy"], ["wikitext"], ["gsm8k"]]
    assert recipe.said[0].ours is not None and recipe.said[0].ours.metric == "arc_easy"


def test_an_analysis_has_options_of_the_shipped_model_alone(checkpoint: Checkpoint) -> None:
    analyses = [
        fitted("sp_moe/figure_2", model, None).analyze
        for model in ("tiny", str(checkpoint("mixtral")))
    ]
    assert [analysis is not None and analysis.options.get("draft") for analysis in analyses] == [
        "tiny-draft",
        None,
    ]


def test_a_limit_that_is_asked_for_holds_for_every_cell(tmp_path: Path) -> None:
    recipe = fitted("buddymoe/table_2", "tiny", 3)
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(recipe.sweep))
    assert {cell.options["limit"] for cell in read_sweep(path).cells()} == {3}


def test_a_figure_is_made_again_with_the_papers_numbers_and_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "specmd/figure_4", "--limit=1"]) == 0
    folder = tmp_path / "reproduced" / "specmd" / "figure_4"
    for name in ("sweep.yaml", "table.md", "table.csv", "plots/figure.svg", "paper.md"):
        assert (folder / name).stat().st_size, name
    runs = load_runs(folder)
    rates: dict[str, Any] = {
        run.moecache["policy"]["eviction"]["name"]: run.moecache["totals"]["collision_miss_rate"]
        for run in runs
        if not str(run.label).startswith("knows the future")
    }
    where = {"policy": "specmd", "eviction": "lru"}
    lru_value = ReproducedValue(metric="collision_miss_rate", where=where)
    assert our_value(lru_value, runs) == rates["lru"]
    against = {"versus": {"eviction": "score"}, "form": "difference"}
    difference = ReproducedValue.model_validate(
        {**lru_value.model_dump(exclude_unset=True), **against}
    )
    assert our_value(difference, runs) == rates["lru"] - rates["score"]
    text = (folder / "paper.md").read_text()
    assert "0.045 to 0.126" in text and f"{rates['lru']:.4g}" in text
    with pytest.raises(ValueError, match="picks 4 runs"):
        our_value(ReproducedValue(metric="miss_rate", where={"policy": "specmd"}), runs)
