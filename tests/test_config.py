"""Every bad input is a ValueError before the weights are loaded, and it says what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import transformers
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import simple_parse_args_string

from lm_eval_moecache.algorithms.policy import load_policy
from lm_eval_moecache.algorithms.registry import AXES
from lm_eval_moecache.harness.arguments import KEYS, read_config, split_arguments
from lm_eval_moecache.harness.lm import MoECacheLM
from lm_eval_moecache.records.geometry import Geometry
from tests.conftest import Checkpoint
from tests.engine.scripted import OldestFirst, make_geometry
from tests.models import byte_tokenizer


@pytest.fixture(autouse=True)
def _loading_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(HFLM, "_create_model", loaded)


def refusal(**arguments: Any) -> str:
    """Return the message of the ValueError that these model arguments cause."""
    with pytest.raises(ValueError) as caught:
        MoECacheLM(device="cpu", **arguments)
    return str(caught.value)


def says(message: str, *parts: str) -> None:
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"


def test_good_arguments_reach_the_loading(checkpoint: Checkpoint) -> None:
    with pytest.raises(AssertionError, match="the weights were loaded"):
        MoECacheLM(pretrained=str(checkpoint("olmoe")), device="cpu", capacity="25%")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            {"prefetch": "score", "prefetch.percentile": 101},
            ["prefetch.percentile=101", "between 0 and 100"],
        ),
        ({"prefetch": "next_gate", "prefetch.overfetch": 0}, ["prefetch.overfetch=0", "above 0"]),
        ({"prefetch": "next_gate", "prefetch.depth": 0}, ["prefetch.depth=0", "1 or more"]),
        (
            {"prefetch": "next_gate", "prefetch.depth": 99},
            ["prefetch.depth=99", "reaches past the last of the"],
        ),
    ],
    ids=str,
)
def test_parameters_out_of_range_are_refused_before_loading(
    arguments: dict[str, Any], parts: list[str], checkpoint: Checkpoint
) -> None:
    says(refusal(pretrained=str(checkpoint("olmoe")), **arguments), *parts)


@pytest.mark.parametrize(
    ("capacity", "dtype", "said"),
    [
        ("1%", "bfloat16", "too small for one expert of 3072 bytes"),
        ("3000B", "bfloat16", "too small for one expert of 3072 bytes"),
        # The same experts take twice the bytes at twice the width.
        ("5000B", "float32", "too small for one expert of 6144 bytes"),
        ("9/layer", "bfloat16", "more than the 8 experts"),
    ],
)
def test_capacities_too_small_for_this_model_are_refused(
    checkpoint: Checkpoint, capacity: str, dtype: str, said: str
) -> None:
    message = refusal(pretrained=str(checkpoint("olmoe")), capacity=capacity, dtype=dtype)
    says(message, f"capacity={capacity!r}", said)


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    ).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    says(refusal(pretrained=str(tmp_path)), "LlamaForCausalLM is a dense model", "--model hf")


@pytest.mark.parametrize(
    "config",
    [
        transformers.DbrxConfig(
            d_model=16,
            n_heads=2,
            n_layers=1,
            max_seq_len=64,
            vocab_size=300,
            ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
            attn_config={"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": None},
        ),
        transformers.JetMoeConfig(
            vocab_size=300,
            hidden_size=16,
            num_hidden_layers=1,
            num_key_value_heads=2,
            kv_channels=8,
            intermediate_size=16,
            num_local_experts=4,
        ),
    ],
    ids=["dbrx", "jetmoe"],
)
def test_a_moe_model_without_the_experts_interface_is_refused(config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    message = refusal(pretrained=str(tmp_path))
    says(message, "Mixture-of-Experts", "experts interface", "use_experts_implementation")


GOOD_POLICY = {"routing": "standard", "prefetch": "none", "eviction": "lru", "miss": "fetch"}


def test_an_outside_algorithm_is_taken_by_its_class_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    mine = {"class_path": "tests.engine.scripted.OldestFirst"}
    path.write_text(yaml.safe_dump({**GOOD_POLICY, "eviction": mine}))
    policy = load_policy(str(path))
    assert policy.name == "mine"
    assert policy.as_dict()["eviction"] == mine


def test_a_name_with_a_dot_is_a_class_path_on_any_axis() -> None:
    policy = load_policy("on_demand", {"eviction": "tests.engine.scripted.OldestFirst"})
    assert policy.as_dict()["eviction"] == {"class_path": "tests.engine.scripted.OldestFirst"}
    config = read_config({"policy": "on_demand", "eviction": SIZED, "eviction.size": 3})
    assert config.policy.as_dict()["eviction"] == {"class_path": SIZED, "size": 3, "slack": 0}
    says(refusal(eviction="no.such.Thing"), "'no.such.Thing' cannot be imported")


def test_a_policy_may_be_a_mapping_of_the_form_of_its_file() -> None:
    given = {"name": "mine", **GOOD_POLICY, "eviction": {"class_path": SIZED, "size": 3}}
    policy = read_config({"policy": given}).policy
    assert policy.name == "mine"
    assert policy.eviction.parameters == {"size": 3, "slack": 0}
    assert read_config({"policy": GOOD_POLICY}).policy.name == "custom"
    says(refusal(policy={**GOOD_POLICY, "evictoin": "lru"}), "policy mapping", "'evictoin'")
    says(refusal(policy={"eviction": "lru"}), "policy mapping lacks 'routing'")
    says(refusal(policy="on_demand", eviction={"order": 1}), "eviction={'order': 1}", "`name`")


def test_a_policy_is_named_after_what_runs() -> None:
    def name(**overrides: Any) -> str:
        return load_policy("on_demand", overrides).name

    assert name() == "on_demand"
    assert name(routing="standard") == "on_demand"
    assert name(routing="pruning") == "on_demand + routing=pruning"
    assert name(miss="drop", routing="pruning") == "on_demand + routing=pruning + miss=drop"
    replaced = load_policy("on_demand", {"eviction": "lfu"}).as_dict()
    assert (replaced["name"], replaced["composition"]) == ("on_demand + eviction=lfu", "on_demand")
    assert "composition" not in load_policy("on_demand").as_dict()


class Sized(OldestFirst):
    """An outside algorithm with a parameter that has no default, and one that has no type."""

    def __init__(
        self, geometry: Geometry, *, size: int, slack=0, seed: int = 0, **more: Any
    ) -> None:
        super().__init__(geometry)
        self.size, self.slack = size, slack


SIZED = "tests.test_config.Sized"


def sized(folder: Path, **fields: Any) -> str:
    """Write a policy with `Sized` for its eviction and return its path."""
    path = folder / "mine.yaml"
    eviction = {"class_path": SIZED, **fields}
    path.write_text(yaml.safe_dump({**GOOD_POLICY, "eviction": eviction}))
    return str(path)


@pytest.mark.parametrize("form", [{"size": 3}, {"init_args": {"size": 3}}], ids=str)
def test_a_required_parameter_reaches_the_outside_algorithm(
    tmp_path: Path, form: dict[str, Any]
) -> None:
    policy = load_policy(sized(tmp_path, **form))
    assert policy.as_dict()["eviction"] == {"class_path": SIZED, "size": 3, "slack": 0}
    built = policy.eviction.build(make_geometry(), 0)
    assert (built.size, built.slack) == (3, 0)


def test_an_override_goes_before_init_args(tmp_path: Path) -> None:
    path = sized(tmp_path, init_args={"size": 3})
    policy = load_policy(path, {"eviction.size": 4, "eviction.slack": 2})
    assert policy.as_dict()["eviction"] == {"class_path": SIZED, "size": 4, "slack": 2}


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({}, ["eviction.size must be given", SIZED]),
        ({"slack": 1}, ["eviction.size must be given"]),
        ({"size": "big"}, ["eviction.size='big'", "does not fit"]),
        ({"size": 3, "more": 1}, ["eviction.more=1", "is not used"]),
        ({"init_args": 3}, ["eviction.init_args=3 must be a mapping"]),
        ({"init_args": None}, ["eviction.init_args=None must be a mapping"]),
    ],
    ids=str,
)
def test_an_outside_algorithm_given_wrongly_is_refused(
    tmp_path: Path, fields: dict[str, Any], parts: list[str]
) -> None:
    says(refusal(policy=sized(tmp_path, **fields)), *parts)


def test_none_as_the_harness_reads_it_is_the_name_of_no_prefetching() -> None:
    given = simple_parse_args_string("policy=specmd,prefetch=none")
    assert given["prefetch"] is None
    assert read_config(given).policy.prefetch.name == "none"


@pytest.mark.parametrize("key", [k for k in KEYS if k not in AXES])
def test_none_for_another_key_is_not_given(key: str) -> None:
    assert read_config({key: None}) == read_config({})


def test_none_for_a_parameter_is_not_given() -> None:
    given = {"policy": "on_demand", "eviction": "least_stale"}
    assert read_config({**given, "eviction.order": None}) == read_config(given)


def test_replacing_an_algorithm_drops_the_parameters_of_the_old_one() -> None:
    policy = load_policy("specmd", {"prefetch": "next_gate", "prefetch.depth": 2})
    found = policy.as_dict()["prefetch"]
    assert (found["name"], found["depth"]) == ("next_gate", 2)
    assert "percentile" in load_policy("specmd").as_dict()["prefetch"]
    assert "percentile" not in found


def test_overrides_may_come_in_any_order() -> None:
    overrides = {"eviction.order": "fifo", "eviction": "least_stale"}
    reverse = dict(reversed(overrides.items()))
    assert load_policy("on_demand", overrides) == load_policy("on_demand", reverse)


def test_defaults_are_those_of_the_design() -> None:
    config = read_config({})
    assert config.policy.name == "specmd"
    assert config.capacity == "25%"
    assert config.hardware.name == "a100-5GBps"
    assert (config.clock, config.scoring, config.cache_reset) == ("virtual", "parallel", "never")


def test_arguments_are_divided_between_us_and_the_host() -> None:
    given = {"policy": "specmd", "eviction.order": "fifo", "dtype": "float32", "device_map": "x"}
    ours, theirs = split_arguments(given, ["dtype", "batch_size"])
    assert ours == {"policy": "specmd", "eviction.order": "fifo"}
    assert theirs == {"dtype": "float32", "device_map": "x"}
