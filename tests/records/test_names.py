"""Names as people type them find their file, and no other's."""

from __future__ import annotations

import re

import pytest

from lm_eval_moecache.algorithms.policy import policy_names
from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.records.hardware import canonical_name, load_hardware
from lm_eval_moecache.records.names import Naming, find_name
from lm_eval_moecache.records.numbers import unknown_name_error

DEVICES = {
    "rtx-3060-12gb": ("rtx3060", "RTX 3060 12GB", "3060"),
    "rtx-5070-ti": ("NVIDIA GeForce RTX 5070 Ti", "5070ti"),
    "rtx-3090": ("RTX 3090 24GB",),
    "h100": ("H100 80GB",),
    "m4-pro": ("M4 Pro", "m4pro"),
    "m4-pro-24gb": ("M4 Pro 24 GB",),
    "m5-max-128gb": ("Apple M5 Max 128GB",),
    "dgx-spark": ("GB10",),
    "strix-halo": ("Ryzen AI Max+ 395",),
    "rtx-4070-ti": ("RTX 4070 Ti",),
    "rtx-4070-ti-super": ("rtx4070tisuper",),
    "rx-7900-xt": ("RX 7900 XT",),
    "rx-9070-xt": ("9070xt",),
    "a100-5GBps": ("A100-5GBPS",),
}
"""Profile -> what people type for it."""


@pytest.mark.parametrize("profile", DEVICES)
def test_a_device_is_found_as_typed(profile: str) -> None:
    for typed in DEVICES[profile]:
        assert load_hardware(typed).name == profile, typed


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("RTX 3090 12GB", "not known"),  # 24 GB it has
        ("RTX 3060 9GB", "not known"),
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


MODELS = {
    "Qwen3-30B-A3B": (
        *("qwen3-30b-a3b", "Qwen3 30B", "qwen3:30b", "Qwen/Qwen3-30B-A3B-Instruct-2507"),
        *("Qwen3-Coder-30B-A3B-Instruct", "Qwen/Qwen3-Omni-30B-A3B-Instruct"),
        "bartowski/Qwen_Qwen3-30B-A3B-GGUF",
        "huihui-ai/Huihui-Qwen3-30B-A3B-Instruct-2507-abliterated",
        "Qwen3-30B-A3B-Thinking-2507-Claude-4.5-Sonnet-Distill",
    ),
    "Qwen3.5-35B-A3B": ("Qwen3.5-35B",),
    "Qwen3.8-Flash-Next": ("qwen3.8 flash next",),
    "Mixtral-8x7B": ("mistralai/Mixtral-8x7B-Instruct-v0.1",),
    "gpt-oss-20b": ("gptoss20b",),
    "Gemma-4-26B-A4B": ("gemma-4-26b-a4b-it",),
    "DeepSeek-V3": ("deepseek r1",),
    "MiniMax-M2": ("MiniMax-M2.1",),
    "MiniMax-M3": ("MiniMaxAI/MiniMax-M3",),
    "MiniMax-Text-01": ("MiniMaxAI/MiniMax-M1-80k",),
    "Kimi-K2": ("moonshotai/Kimi-K2-Instruct-0905",),
    "Kimi-K2.6": ("Kimi-K2-Thinking",),
    "Kimi-Linear-48B-A3B": ("moonshotai/Kimi-Linear-48B-A3B-Instruct",),
    "GLM-4.5-Air": ("PrimeIntellect/INTELLECT-3",),
    "GLM-4.7": ("GLM-4.7", "zai-org/GLM-4.6", "glm4.5"),
    "GLM-4.7-Flash": ("glm-4.7-flash", "zai-org/GLM-4.7-Flash"),
    "GLM-5": ("zai-org/GLM-5.2",),
    "ERNIE-4.5-21B-A3B": ("ERNIE-4.5-21B",),
    "ERNIE-4.5-300B-A47B": ("baidu/ERNIE-4.5-300B-A47B-PT",),
    "Granite-4.0-H-Small": ("ibm-granite/granite-4.0-h-small",),
    "Jamba-Mini": ("ai21labs/AI21-Jamba-Mini-1.7", "jamba"),
    "Hunyuan-A13B": ("tencent/Hunyuan-A13B-Instruct",),
    "Ling-1T": ("inclusionAI/Ring-1T",),
    "Ling-flash-2.0": ("inclusionAI/Ring-flash-2.0",),
    "Step-3": ("stepfun-ai/step3",),
    "Step-3.5-Flash": ("stepfun-ai/Step-3.5-Flash",),
    "MiMo-V2-Flash": ("XiaomiMiMo/MiMo-V2-Flash",),
    "Trinity-Large": ("arcee-ai/Trinity-Large-Preview",),
    "dots.llm1": ("rednote-hilab/dots.llm1.inst",),
    "Llama-4-Maverick": ("meta-llama/Llama-4-Maverick-17B-128E-Instruct",),
    "Nemotron-3-Super-120B-A12B": ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",),
}
"""Model -> what people type for it, and names of the hub."""


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_found_as_typed_and_as_the_hub_names_it(model: str) -> None:
    for typed in MODELS[model]:
        assert load_real_model(typed).name == model, typed


@pytest.mark.parametrize(
    ("typed", "name", "bits"),
    [
        ("Qwen/Qwen3-30B-A3B-FP8", "fp8", 8),
        ("qwen3:30b-a3b-q4_K_M", "q4_k_m", 4.87),
        ("unsloth/Qwen3-30B-A3B-Instruct-2507-UD-Q4_K_XL-GGUF", "ud-q4_k_xl", 4.87),
        ("mlx-community/Qwen3-30B-A3B-4bit", "4bit", 4.5),
        ("cpatonn/Qwen3-30B-A3B-AWQ-4bit", "awq", 4.16),
        ("unsloth/Qwen3-30B-A3B-bnb-4bit", "nf4", 4.5),
        ("RedHatAI/Qwen3-30B-A3B-quantized.w4a16", "gptq", 4.16),
        ("Intel/Qwen3-30B-A3B-int4-AutoRound", "int4", 4.5),
    ],
)
def test_a_name_says_how_its_files_are_stored(typed: str, name: str, bits: float) -> None:
    model = load_real_model(typed)
    assert (model.name, model.stored.name) == ("Qwen3-30B-A3B", name)
    assert model.stored.expert_bits == pytest.approx(bits, abs=0.01) and model.is_as_stored


SIBLINGS = (
    *("GLM-4.8", "GLM-4.7-Air", "Kimi-K3", "DeepSeek-V4", "gpt-oss", "Qwen3-30B-A6B", "../x/y"),
    *(
        "cerebras/GLM-4.5-Air-REAP-82B-A12B",
        "DavidAU/Qwen3-42B-A3B-2507",
        "x/Qwen3-30B-A3B-REAP",
        "Qwen3-30B-A3B-eagle3",
    ),
)


@pytest.mark.parametrize("typed", SIBLINGS)
def test_a_model_is_not_taken_for_its_sibling(typed: str) -> None:
    with pytest.raises(ValueError, match=r"model='.*not known"):
        load_real_model(typed, "model")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("my_model", "model='my_model' is not known, and there is no such file or folder"),
        *(
            (name, f"model='{name}' is a dense model")
            for name in (
                *("Llama-3-8B", "meta-llama/Llama-3.1-8B-Instruct", "llama3:8b", "Qwen3-8B"),
                *("mistralai/Mistral-7B-v0.1", "gemma3:12b", "phi-4", "gpt2"),
                "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
            )
        ),
    ],
)
def test_a_name_that_is_none_of_ours_is_said_to_be_dense_or_missing(typed: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
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


def test_of_many_names_a_message_has_the_nearest_and_how_many_others_there_are() -> None:
    names = policy_names()
    said = str(unknown_name_error("policy", "specmd_7", names, "`moecache policies`"))
    near, _, rest = said.partition("Allowed: ")[2].partition(" and ")
    assert {f"specmd_{i}" for i in range(1, 5)} <= set(near.split(", ")) and len(near) < 120
    assert rest == f"{len(names) - 8} more, which `moecache policies` lists."
    assert str(unknown_name_error("clock", "x", ["virtual", "wall"])).endswith("virtual, wall.")
