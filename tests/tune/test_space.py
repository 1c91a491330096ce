"""What a space file may say, and what is drawn from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.testing.streams import make_geometry
from lm_eval_moecache.tune.space import DEFAULT_SPACE, Space, read_space

GEOMETRY = make_geometry(num_layers=2, num_experts=8, top_k=2)


def write(folder: Path, **axes: Any) -> Path:
    usual = {"routing": "standard", "prefetch": "none", "eviction": "lru", "miss": "fetch"}
    plain = {axis: {name: {}} for axis, name in usual.items()}
    path = folder / "space.yaml"
    path.write_text(yaml.safe_dump({**plain, **axes}))
    return path


def test_the_shipped_space_names_algorithms_that_exist_and_draws_policies() -> None:
    space = read_space(DEFAULT_SPACE).fit(GEOMETRY)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = set()
    for _ in range(60):
        overrides = space.suggest(study.ask())
        try:
            policy = load_policy("on_demand", overrides)
        except ValueError as error:
            assert "does not go with" in str(error)
            continue
        drawn.add((policy.routing.name, policy.miss.name))
        for key, value in overrides.items():
            axis, _, parameter = key.partition(".")
            if parameter:
                assert getattr(policy, axis).as_dict()[parameter] == value
    assert len(drawn) > 6


def test_sizes_of_the_model_stand_in_for_their_names(tmp_path: Path) -> None:
    path = write(tmp_path, routing={"max_rank": {"M": {"low": "top_k", "high": "num_experts"}}})
    space = read_space(path)
    assert space.fit(GEOMETRY).axes["routing"]["max_rank"]["M"] == {"low": 2, "high": 8}


def test_whole_numbers_draw_whole_numbers_and_others_do_not(tmp_path: Path) -> None:
    ranges = {"lambda": {"low": 0.5, "high": 1}, "top_j": {"low": 0, "high": 2}}
    path = write(tmp_path, routing={"cache_prior": ranges})
    overrides = read_space(path).suggest(optuna.create_study().ask())
    assert isinstance(overrides["routing.top_j"], int)
    assert isinstance(overrides["routing.lambda"], float)
    assert overrides["routing"] == "cache_prior"


@pytest.mark.parametrize(("depth", "reach"), [([1, 3, 2], 3), ({"low": 1, "high": 4}, 4)])
def test_the_furthest_look_ahead_is_known(tmp_path: Path, depth: Any, reach: int) -> None:
    path = write(tmp_path, prefetch={"none": {}, "next_gate": {"depth": depth}})
    assert read_space(path).max_depth == reach
    assert Space({"prefetch": {}}).max_depth == 1
