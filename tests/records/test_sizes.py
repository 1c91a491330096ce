"""Sizes as users type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_moecache.records.geometry import Geometry
from lm_eval_moecache.records.sizes import (
    check_capacity,
    is_per_layer,
    parse_bandwidth,
    parse_bytes,
    parse_capacity,
)
from tests.engine.scripted import make_geometry

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@given(number=st.integers(0, 10**6), unit=st.sampled_from(sorted(UNITS)), space=st.booleans())
def test_every_unit_is_read_as_what_it_says(number: int, unit: str, space: bool) -> None:
    assert parse_bytes(f"{number}{' ' * space}{unit}", "x") == number * UNITS[unit]


@given(number=st.integers(0, 2**50))
def test_a_bare_number_is_bytes_exactly(number: int) -> None:
    assert parse_bytes(str(number), "x") == number


def test_fractions_and_exponents_are_numbers_too() -> None:
    assert parse_bytes("1.5GiB", "x") == 3 * 2**29
    assert parse_bytes(".5kB", "x") == 500
    assert parse_bytes("2e3", "x") == 2000


@pytest.mark.parametrize(
    "text", ["", "five", "5 XB", "-5GB", "5GB/s", "nan", "inf", "1,000", "5GBGB"]
)
def test_what_is_no_size_is_named_with_its_key(text: str) -> None:
    with pytest.raises(ValueError, match="link=") as caught:
        parse_bytes(text, "link")
    assert repr(text) in str(caught.value)
    assert "GiB" in str(caught.value)


@given(rate=st.integers(1, 10**6))
def test_bandwidths_may_say_per_second(rate: int) -> None:
    assert parse_bandwidth(f"{rate}MB/s") == parse_bandwidth(f"{rate}MB") == rate * 1e6


@pytest.mark.parametrize(
    "text", ["0GB/s", "0.5B/s", "fast", "-1GB/s", "5GB/h", "5XB/s", "9e999GB/s"]
)
def test_what_is_no_bandwidth_is_refused_as_it_was_typed(text: str) -> None:
    with pytest.raises(ValueError, match="bandwidth=") as caught:
        parse_bandwidth(text)
    assert repr(text) in str(caught.value)
    assert "5GB/s" in str(caught.value)


@pytest.mark.parametrize("text", ["5", "0", "5.0", "5e9", "5/s"])
def test_a_bandwidth_without_a_unit_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=rf"bandwidth='{text}' has no unit.*'5GB/s'"):
        parse_bandwidth(text)


@given(percent=st.integers(9, 100))
def test_a_share_is_of_all_expert_bytes(percent: int) -> None:
    geometry = make_geometry()  # 3 layers x 4 experts x 100 bytes = 1200 bytes
    assert parse_capacity(f"{percent}%", geometry).bytes_by_partition == (percent * 12,)


@given(slots=st.integers(1, 12))
def test_a_number_counts_experts(slots: int) -> None:
    for text in (slots, str(slots)):
        assert parse_capacity(text, make_geometry()).bytes_by_partition == (slots * 100,)


@pytest.mark.parametrize("given", [51.0, "51.0", "5.1e1", 51, " 51 "])
def test_a_whole_number_counts_experts_however_the_harness_writes_it(given: object) -> None:
    capacity = parse_capacity(given, make_geometry(num_experts=20))
    assert (capacity.text, capacity.total_bytes) == ("51", 5100)


def test_a_million_is_a_number_of_experts_in_both_spellings() -> None:
    # lm-eval reads `capacity=1e6` as the float 1000000.0.
    assert parse_capacity(1e6, make_geometry()) == parse_capacity("1000000", make_geometry())


@given(slots=st.integers(1, 4))
def test_per_layer_makes_one_cache_for_each_layer(slots: int) -> None:
    capacity = parse_capacity(f"{slots}/layer", make_geometry())
    assert capacity.bytes_by_partition == (slots * 100,) * 3
    assert (capacity.per_layer, capacity.total_bytes) == (True, slots * 300)


def test_a_size_is_bytes_for_all_layers() -> None:
    capacity = parse_capacity("1kB", make_geometry())
    assert (capacity.bytes_by_partition, capacity.per_layer) == ((1000,), False)


def test_a_number_counts_experts_of_the_largest_layer() -> None:
    geometry = Geometry(
        model="uneven",
        num_layers=2,
        num_experts=4,
        top_k=1,
        expert_bytes=((100,), (300,)),
        dense_bytes=(0, 0),
    )
    assert parse_capacity("2", geometry).bytes_by_partition == (600,)
    assert parse_capacity("2/layer", geometry).bytes_by_partition == (200, 600)
    assert parse_capacity("50%", geometry).bytes_by_partition == (800,)


@pytest.mark.parametrize(
    "text",
    [
        *("-5%", "0%", "100.1%", "nan%", "inf%", "%", "5%%"),
        *("0/layer", "-1/layer", "1.5/layer", "/layer", "x/layer", "5 layers"),
        *("0", "-3", "0.2", "51.5", "0.0", "1e999", "9e999GB", "big", "", "None", "5GB/s"),
    ],
)
def test_what_no_model_could_make_a_capacity_is_refused_without_one(text: str) -> None:
    with pytest.raises(ValueError, match="is not a capacity") as caught:
        check_capacity(text)
    assert f"capacity={text!r}" in str(caught.value)
    assert "30/layer" in str(caught.value)


@pytest.mark.parametrize("text", ["8%", "99B", "0.05kB"])
def test_less_than_one_expert_is_refused_with_both_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="too small for one expert of 100 bytes") as caught:
        parse_capacity(text, make_geometry())
    assert f"capacity={text!r}" in str(caught.value)


def test_more_slots_than_a_layer_has_experts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'5/layer' asks for more than the 4 experts"):
        parse_capacity("5/layer", make_geometry())


@given(text=st.text(max_size=12))
def test_any_text_is_either_a_capacity_or_a_value_error(text: str) -> None:
    try:
        capacity = parse_capacity(text, make_geometry())
    except ValueError as error:
        assert repr(text) in str(error)
    else:
        assert capacity.total_bytes >= 100
        assert capacity.per_layer == is_per_layer(text)


def test_geometry_refuses_what_does_not_fit_together() -> None:
    with pytest.raises(ValueError, match="top_k=5 must be positive, and top_k at most"):
        make_geometry(num_experts=4, top_k=5)
    with pytest.raises(ValueError, match="dense_bytes has 1 entries for num_layers=2"):
        Geometry(
            model="x",
            num_layers=2,
            num_experts=1,
            top_k=1,
            expert_bytes=((1,), (1,)),
            dense_bytes=(1,),
        )


@pytest.mark.parametrize("text", ["40Gb/s", "40 Gb/s", "800Mb", "1Gib/s", "9kb/s"])
def test_bits_per_second_are_not_taken_for_bytes(text: str) -> None:
    with pytest.raises(ValueError, match=r"reads as bits per second.*capital B"):
        parse_bandwidth(text)
