"""The YAML files in policies/: what the papers compose, and that each of them runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lm_eval_moecache.algorithms.policy import load_policy, policy_names
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.records.files import policies_dir
from lm_eval_moecache.records.sizes import parse_capacity
from lm_eval_moecache.testing.streams import make_geometry, run

PAPERS = {
    # SpecMD Table 1.
    "specmd_1": ("standard", "next_gate", "lru", "fetch"),
    "specmd_2": ("standard", "score", "score", "substitute_score"),
    "specmd_3": ("standard", "next_gate", "lhu", "cascade"),
    "hobbit": ("standard", "next_gate", "lhu", "cascade"),
    # SpecMD section 5.4 and Figure 7.
    "specmd_fetch_priority": ("standard", "score", "least_stale", "fetch_priority"),
    "specmd_4": ("cache_prior", "none", "lru", "fetch"),
    "specmd": ("standard", "score", "least_stale", "fetch"),
    "mixtral_offloading": ("standard", "next_gate", "lru", "fetch"),
    "importance_scheduling": ("standard", "score", "score", "substitute_score"),
    # Mixture of Cache-Conditional Experts section 4.2: all with LRU and no prefetch.
    "mixture_cache": ("cache_prior", "none", "lru", "fetch"),
    "max_rank": ("max_rank", "none", "lru", "fetch"),
    "cumsum": ("cumsum", "none", "lru", "fetch"),
    "pruning": ("pruning", "none", "lru", "fetch"),
    # BuddyMoE section 5.1.
    "buddymoe": ("standard", "next_gate", "lru", "buddy"),
    "buddy_random": ("standard", "next_gate", "lru", "substitute_random"),
    # CommitMoE sections 4, 5.1 and 5.3.
    "commitmoe": ("commit", "predictor", "lfu", "fetch"),
    "commitmoe_neutral_owa": ("commit", "predictor", "lfu", "fetch"),
    "commitmoe_no_owa": ("commit", "predictor", "lfu", "fetch"),
    "commitmoe_mixtral": ("commit", "predictor", "lfu", "fetch"),
    "commitmoe_prefetch": ("standard", "predictor", "lfu", "fetch"),
    "promoe": ("standard", "predictor", "lru", "fetch"),
    # Systems the five papers compare with.
    "moe_infinity": ("standard", "history", "lfu", "fetch"),
    "adapmoe": ("sensitivity", "next_gate", "lru", "fetch"),
    "fiddler": ("standard", "none", "lru", "host"),
    "ktransformers": ("standard", "none", "lru", "host"),
    "llama_cpp_cpu_moe": ("standard", "none", "lru", "host"),
    "hybrimoe": ("standard", "next_gate", "score", "host"),
    "finemoe": ("standard", "expert_map", "lfu", "fetch"),
    "sida": ("standard", "data_aware", "fifo", "fetch"),
    "swapmoe": ("cumsum", "importance", "importance", "fetch"),
    "fate": ("standard", "next_gate", "shallow_first", "fetch"),
    "edgemoe": ("standard", "none", "frequency_layer", "fetch"),
    "pre_gated": ("pre_gated", "next_gate", "lru", "fetch"),
    # Engines of the field, as those projects run.
    "big_moe_on_edge": ("standard", "none", "tail_lru", "fetch_cached_first"),
    "big_moe_on_edge_drop_cold": ("standard", "none", "tail_lru", "drop_cold"),
    "big_moe_on_edge_substitute": ("cache_prior", "none", "tail_lru", "fetch_cached_first"),
    "colibri": ("standard", "none", "pinned_lru", "fetch"),
    "colibri_degrade_zero": ("standard", "none", "pinned_lru", "degrade_zero"),
    "llama_cpp_expert_cache": ("standard", "none", "lru", "bounded_insertion"),
    "freetoken": ("standard", "none", "lru", "host"),
    "ik_llama_cpp_ser": ("skip_ratio", "none", "lru", "fetch"),
    "speculating_experts": ("pre_gated", "next_gate", "lru", "fetch"),
    "moe_spec": ("standard", "none", "lru", "expert_budget"),
}


@pytest.mark.parametrize("name", PAPERS)
def test_a_composition_is_what_its_paper_says(name: str) -> None:
    policy = load_policy(name)
    assert tuple(getattr(policy, axis).name for axis in AXES) == PAPERS[name]


@pytest.mark.parametrize("name", policy_names())
def test_a_composition_says_where_it_comes_from_and_survives_being_printed(
    name: str, tmp_path: Path
) -> None:
    text = (policies_dir() / f"{name}.yaml").read_text()
    policy = load_policy(name)
    assert text.startswith("# ") and policy.name == name and policy.source
    printed = policy.as_dict()
    copy = tmp_path / "copy.yaml"
    copy.write_text(yaml.safe_dump(printed))
    assert load_policy(str(copy)).as_dict() == printed


@pytest.mark.parametrize("name", [*PAPERS, "on_demand"])
def test_a_composition_runs(name: str) -> None:
    policy = load_policy(name)
    for capacity in ("15%" if policy.per_layer else "5%", "50%"):
        served = run(policy, make_geometry(top_k=4), capacity).engine
        assert served.ledger.passes
        assert len(served.pools) == (served.geometry.num_layers if policy.per_layer else 1)


@pytest.mark.parametrize("name", ["mixture_cache", "cumsum", "max_rank"])
def test_cache_conditional_compositions_are_the_papers(name: str) -> None:
    """They act while decoding only, with a cache per layer, whatever form the capacity has."""
    policy, geometry = load_policy(name), make_geometry(num_layers=3, num_experts=8)
    assert policy.phases == "decode"
    size = geometry.expert_bytes[0][0]
    for text, slots in (("25%", 2), ("14", 4), ("2/layer", 2)):
        parts = parse_capacity(text, geometry, per_layer=policy.per_layer).bytes_by_partition
        assert parts == (slots * size,) * 3
    with pytest.raises(ValueError, match="too small for one expert in each of 3 layers"):
        parse_capacity("2", geometry, per_layer=True)
    with pytest.raises(ValueError, match="chooses between layers"):
        read_config({"policy": name, "eviction": "fld"})


@pytest.mark.parametrize("name", ["fiddler", "ktransformers"])
def test_host_compositions_start_from_placed_experts(name: str) -> None:
    geometry = replace(make_geometry(num_layers=8, num_experts=64), model="tiny")
    setting = read_config({"policy": name, "capacity": "25%"}).setting(geometry)
    assert setting.warm is not None and setting.warm.model == "tiny"
    assert len(Engine(geometry, setting).pools[0].resident) == 128
    with pytest.raises(ValueError, match=f"{name}.*no profile ships. Give warm=PROFILE"):
        read_config({"policy": name}).setting(replace(geometry, model="some/other"))


def test_pre_gated_prefetches_what_it_decided_and_adapmoe_one_expert_a_layer_and_token() -> None:
    passes = run(load_policy("pre_gated"), make_geometry(), "100%").engine.ledger.passes
    assert all(p.predicted_right == p.predicted == p.predictable for p in passes)
    assert sum(p.predicted for p in passes) > 50
    passes = run(load_policy("adapmoe"), make_geometry(), "100%").engine.ledger.passes
    # Two of three layers have one before them.
    assert {p.predicted for p in passes if p.phase == "decode"} == {2}
