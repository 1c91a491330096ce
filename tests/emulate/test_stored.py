"""Precisions by the names that people and files give them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.emulate.stored import load_stored


@pytest.mark.parametrize(
    ("typed", "name", "bits"),
    [
        ("Q4_K_M", "q4_k_m", (4.87, 4.87, 4.87)),
        ("q4-k-m", "q4_k_m", (4.87, 4.87, 4.87)),
        ("UD-Q4_K_XL", "ud-q4_k_xl", (4.87, 8.5, 8.5)),
        ("Q6_K_L", "q6_k_l", (6.58, 6.58, 8.5)),
        ("Q3_K_XL", "q3_k_xl", (4.2979, 4.2979, 8.5)),
        ("UD-Q3_K_XL", "ud-q3_k_xl", (4.0, 8.5, 8.5)),
        ("IQ3_S", "iq3_s", (3.6606,) * 3),
        ("UD-IQ1_M", "ud-iq1_m", (2.146, 8.5, 8.5)),
        ("Q5_K_M", "q5_k_m", (5.70,) * 3),
        ("Q8_0", "q8_0", (8.5,) * 3),
        ("NVFP4", "nvfp4", (4.5, 16, 16)),
        ("AWQ", "awq", (4 + 20 / 128, 4 + 20 / 128, 16)),
        ("MXFP4", "mxfp4", (4.25, 16, 16)),
        ("MXFP4_MOE", "mxfp4_moe", (4.25, 8.5, 8.5)),
        ("exl3:4.0", "exl3:4", (4, 4, 6)),
        ("EXL3 4.05bpw", "exl3:4.05", (4.05, 4.05, 6)),
        ("4.5bpw", "4.5bpw", (4.5, 4.5, 4.5)),
        ("~2.5 bpw", "2.5bpw", (2.5, 2.5, 2.5)),
        ("MLX 4-bit", "4bit", (4.5, 4.5, 4.5)),
        ("F16", "bf16", (16, 16, 16)),
    ],
)
def test_a_precision_is_known_by_the_name_people_use(
    typed: str, name: str, bits: tuple[float, float, float]
) -> None:
    stored = load_stored(typed)
    assert stored.name == name
    assert (stored.expert_bits, stored.dense_bits, stored.vocab_bits) == bits
    assert load_stored(stored.name) == stored


@pytest.mark.parametrize("typed", ["q9", "ud-int4", "q9_k", "exl3", "exl3:0", "99bpw", "", "17bit"])
def test_other_names_are_refused_with_what_is_allowed(typed: str) -> None:
    with pytest.raises(ValueError, match="precision="):
        load_stored(typed)


def test_files_of_a_published_size() -> None:
    """Qwen3-30B-A3B as files of that type have it, in GB."""
    model = load_real_model("Qwen3-30B-A3B")
    for typed, gigabytes in (("Q8_0", 32.48), ("Q6_K", 25.10), ("Q5_K_S", 21.10), ("IQ4_XS", 16.6)):
        sized = replace(model, stored=load_stored(typed))
        experts = sized.num_layers * sized.num_experts * sized.expert_bytes
        assert (experts + sized.dense_bytes) / 1e9 == pytest.approx(gigabytes, rel=0.03)
