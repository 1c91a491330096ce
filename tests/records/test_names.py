"""Names as people type them find their file, and no other's."""

from __future__ import annotations

import pytest

from lm_eval_moecache.records.emulation import load_real_model
from lm_eval_moecache.records.hardware import canonical_name, load_hardware
from lm_eval_moecache.records.names import Naming, find_name


@pytest.mark.parametrize(
    ("typed", "profile"),
    [
        ("rtx3060", "rtx-3060-12gb"),
        ("RTX 3060 12GB", "rtx-3060-12gb"),
        ("3060", "rtx-3060-12gb"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx-5070-ti"),
        ("5070ti", "rtx-5070-ti"),
        ("RTX 3090 24GB", "rtx-3090"),
        ("H100 80GB", "h100"),
        ("M4 Pro", "m4-pro"),
        ("m4pro", "m4-pro"),
        ("GB10", "dgx-spark"),
        ("Ryzen AI Max+ 395", "strix-halo"),
        ("RTX 4070 Ti", "rtx-4070-ti"),
        ("rtx4070tisuper", "rtx-4070-ti-super"),
        ("RX 7900 XT", "rx-7900-xt"),
        ("9070xt", "rx-9070-xt"),
        ("M4 Pro 24 GB", "m4-pro-24gb"),
        ("Apple M5 Max 128GB", "m5-max-128gb"),
        ("A100-5GBPS", "a100-5GBps"),
    ],
)
def test_a_device_is_found_as_typed(typed: str, profile: str) -> None:
    assert load_hardware(typed).name == profile


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("RTX 3090 12GB", "not known"),  # 24 GB it has
        ("RTX 3060 8GB", "not known"),
        ("rtx", "not known"),
        ("RTX 3060 Super", "not known"),
        ("a100", "any of several. Allowed: a100-40gb, a100-80gb"),
        *((path, "not known") for path in ("", "../hardware/h100", "./h100")),
    ],
)
def test_a_device_that_is_none_of_ours_is_not_taken_for_a_similar_one(
    typed: str, said: str
) -> None:
    with pytest.raises(ValueError, match=f"hardware='{typed}'.*{said}"):
        canonical_name(typed)


@pytest.mark.parametrize(
    ("typed", "model"),
    [
        ("qwen3-30b-a3b", "Qwen3-30B-A3B"),
        ("Qwen3 30B", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("Qwen3-Coder-30B-A3B-Instruct", "Qwen3-30B-A3B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("gptoss20b", "gpt-oss-20b"),
        ("gemma-4-26b-a4b-it", "Gemma-4-26B-A4B"),
        ("deepseek r1", "DeepSeek-V3"),
        ("MiniMax-M2.1", "MiniMax-M2"),
        ("moonshotai/Kimi-K2-Instruct-0905", "Kimi-K2"),
        ("Kimi-K2-Thinking", "Kimi-K2.6"),
        ("zai-org/GLM-5.2", "GLM-5"),
        ("qwen3.8 flash next", "Qwen3.8-Flash-Next"),
        ("ERNIE-4.5-21B", "ERNIE-4.5-21B-A3B"),
    ],
)
def test_a_model_is_found_as_typed_and_as_the_hub_names_it(typed: str, model: str) -> None:
    assert load_real_model(typed).name == model


@pytest.mark.parametrize("typed", ["GLM-4.5", "DeepSeek-V2", "gpt-oss", "Qwen3-30B-A6B", "../x/y"])
def test_a_model_is_not_taken_for_its_sibling(typed: str) -> None:
    with pytest.raises(ValueError, match=r"model='.*not known"):
        load_real_model(typed, "model")


def test_an_optional_end_may_be_missing_on_either_side_and_must_not_differ() -> None:
    naming = Naming(optional="-[0-9]+-gb?$", filler="-card")
    names = ["x-1-8gb", "x-1-16gb", "x-2"]

    def has(name: str, words: str) -> bool:
        return (name, words) == ("x-2", "-4-gb")

    assert find_name("key", "Card X1 8GB", names, naming, has) == "x-1-8gb"
    assert find_name("key", "x2 4gb", names, naming, has) == "x-2"
    for typed, message in (
        ("x1", "could be any of several. Allowed: x-1-16gb, x-1-8gb"),
        ("x2 8gb", "Did you mean"),
        ("x1 4gb", "not known"),
    ):
        with pytest.raises(ValueError, match=message):
            find_name("key", typed, names, naming, has)
