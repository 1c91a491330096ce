"""The YAML files in policies/: each is documented and runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lm_eval_moecache.algorithms.policy import load_policy, policy_names
from lm_eval_moecache.engine.virtual.engine import VirtualEngine
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.records.files import policies_dir
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.testing.streams import make_geometry, run


@pytest.mark.parametrize("name", policy_names())
def test_a_composition_says_where_it_comes_from_and_survives_being_printed(
    name: str, tmp_path: Path
) -> None:
    text, policy = (policies_dir() / f"{name}.yaml").read_text(), load_policy(name)
    assert text.startswith("# ") and policy.name == name and policy.source
    printed = policy.as_dict()
    copy = tmp_path / "copy.yaml"
    copy.write_text(yaml.safe_dump(printed))
    assert load_policy(str(copy)).as_dict() == printed


@pytest.mark.parametrize("name", policy_names())
def test_a_composition_runs(name: str) -> None:
    policy = load_policy(name)
    for capacity in ("15%" if policy.per_layer else "5%", "50%"):
        served = run(policy, make_geometry(top_k=6 if "deepseek" in name else 4), capacity).engine
        assert served.ledger.passes
        assert len(served.pools) == (served.geometry.num_layers if policy.per_layer else 1)


@pytest.mark.parametrize("name", ["mixture_cache", "cumsum", "max_rank"])
def test_cache_conditional_compositions_are_the_papers(name: str) -> None:
    """They act only while decoding, with a cache per layer, whatever the capacity's form."""
    policy, geometry = load_policy(name), make_geometry(num_layers=3, num_experts=8)
    assert policy.phases == "decode"
    size = geometry.expert_bytes[0][0]
    for text, slots in (("25%", 2), ("14", 4), ("2/layer", 2)):
        parts = parse_capacity(text, geometry, per_layer=policy.per_layer).bytes_by_partition
        assert parts == (slots * size,) * 3
    with pytest.raises(ValueError, match="too small for one expert in each of 3 layers"):
        parse_capacity("2experts", geometry, per_layer=True)
    with pytest.raises(ValueError, match="chooses between layers"):
        read_config({"policy": name, "eviction": "fld"})


@pytest.mark.parametrize("name", ["fiddler", "ktransformers"])
def test_host_compositions_start_from_placed_experts(name: str) -> None:
    geometry = replace(make_geometry(num_layers=8, num_experts=64), model="tiny")
    setting = read_config({"policy": name, "capacity": "25%"}).setting(geometry)
    assert setting.warm is not None and setting.warm.model == "tiny"
    assert len(VirtualEngine(geometry, setting).pools[0].resident) == 128
    with pytest.raises(ValueError, match=f"{name}.*no profile ships. Give warm=PROFILE"):
        read_config({"policy": name}).setting(replace(geometry, model="some/other"))


def test_pre_gated_prefetches_what_it_decided_and_adapmoe_one_expert_a_layer_and_token() -> None:
    passes = run(load_policy("pre_gated"), make_geometry(), "100%").engine.ledger.passes
    assert all(p.predicted_right == p.predicted == p.predictable for p in passes)
    assert sum(p.predicted for p in passes) > 50
    passes = run(load_policy("adapmoe"), make_geometry(), "100%").engine.ledger.passes
    # Two of the three layers have a layer before them.
    assert {p.predicted for p in passes if p.phase == "decode"} == {2}


def test_a_parameter_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eviction\.=1 names no parameter"):
        load_policy("on_demand", {"eviction.": 1})
