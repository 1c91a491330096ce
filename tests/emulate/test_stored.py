"""Precisions by the names that people and files give them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lm_eval_moecache.emulate.models import as_stored, load_real_model
from lm_eval_moecache.emulate.stored import load_stored, published_files
from lm_eval_moecache.records.real_model import RealModel
from tests.records.test_names import NAMES


@pytest.mark.parametrize("typed", NAMES["precisions"])
def test_a_precision_is_known_by_the_name_people_use(typed: str) -> None:
    stored, (name, *bits) = load_stored(typed), NAMES["precisions"][typed]
    assert stored.name == name
    assert [stored.expert_bits, stored.dense_bits, stored.vocab_bits] == bits
    assert load_stored(stored.name) == stored


def test_a_file_with_another_vocabulary_is_otherwise_as_its_type() -> None:
    for name in ("q2_k", "q3_k_l", "q4_k_m"):
        larger, usual = load_stored(f"{name[:4]}_xl"), load_stored(name)
        assert larger[1:3] == usual[1:3] and larger.vocab_bits == 8.5


def test_other_names_are_refused_with_what_is_allowed() -> None:
    for typed in NAMES["no_precisions"]:
        with pytest.raises(ValueError, match="precision="):
            load_stored(typed)


def test_files_of_a_published_size() -> None:
    """Qwen3-30B-A3B as files of that type have it, in GB: the vocabulary in its bits, too."""
    model = load_real_model("Qwen3-30B-A3B")
    published = {"Q8_0": 32.48, "Q6_K": 25.1, "Q5_K_S": 21.1, "Q4_K_M": 18.6, "IQ4_XS": 16.6}
    for typed, gigabytes in published.items():
        sized = replace(model, stored=load_stored(typed))
        assert _bytes(sized) / 1e9 == pytest.approx(gigabytes, rel=0.03)


def test_dynamic_files_have_the_sizes_that_are_published() -> None:
    """Of 54, each as it is, and by its type alone 31 within 3%, all within 14."""
    errors = []
    for (name, typed), size in published_files().items():
        model, stored = load_real_model(name), load_stored(typed)
        assert _bytes(as_stored(model, stored)) == pytest.approx(size, rel=1e-3)
        errors.append(abs(_bytes(replace(model, stored=stored)) / size - 1))
    assert len(errors) == 54 and max(errors) < 0.14
    assert sum(error < 0.03 for error in errors) >= 31


def _bytes(model: RealModel) -> int:
    return model.all_expert_bytes + model.dense_bytes
