"""Sizes as users type them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm_eval_moecache.records.sizes import (
    is_per_layer,
    parse_bandwidth,
    parse_bytes,
    parse_capacity,
)
from tests.engine.scripted import make_geometry

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
GEOMETRY = make_geometry()
"""3 layers x 4 experts x 100 bytes = 1200 bytes."""
UNEVEN = make_geometry(2, expert_bytes=((100,), (300,)))


@given(number=st.integers(0, 10**6), unit=st.sampled_from(sorted(UNITS)), space=st.booleans())
def test_every_unit_is_read_as_what_it_says(number: int, unit: str, space: bool) -> None:
    assert parse_bytes(f"{number}{' ' * space}{unit}", "x") == number * UNITS[unit]
    if number >= 1000 or not number:
        assert parse_bytes(str(number), "x") == number
    else:
        with pytest.raises(ValueError, match=f"Did you mean '{number}MiB', or '{number}B'"):
            parse_bytes(str(number), "x")
    if 0 < number * UNITS[unit] <= 2e12:  # the most that a machine has
        assert parse_bandwidth(f"{number}{unit}/s") == parse_bandwidth(f"{number}{unit}")
        assert parse_bandwidth(f"{number}{unit}") == float(number * UNITS[unit])


def test_fractions_and_exponents_are_numbers_too() -> None:
    assert parse_bytes("1.5GiB", "x") == 3 * 2**29
    assert parse_bytes(".5kB", "x") == 500
    assert parse_bytes("2e3", "x") == 2000


@given(percent=st.integers(9, 100), slots=st.integers(1, 12))
def test_a_share_is_of_all_expert_bytes_and_a_number_counts_experts(
    percent: int, slots: int
) -> None:
    assert parse_capacity(f"{percent}%", GEOMETRY).bytes_by_partition == (percent * 12,)
    for text in (f"{slots}experts", f"{slots} experts"):
        assert parse_capacity(text, GEOMETRY).bytes_by_partition == (slots * 100,)
    if slots <= 4:
        capacity = parse_capacity(f"{slots}/layer", GEOMETRY)
        assert capacity.bytes_by_partition == (slots * 100,) * 3
        assert (capacity.per_layer, capacity.total_bytes) == (True, slots * 300)


def test_a_share_that_is_no_whole_number_of_bytes_is_rounded_down() -> None:
    """A cache never holds more than the share that was asked for."""
    assert parse_capacity("33.39%", GEOMETRY).total_bytes == 400  # of 400.68
    assert parse_capacity("99.99%", GEOMETRY).total_bytes == 1199  # of 1199.88
    assert parse_capacity("150.9B", GEOMETRY).total_bytes == 150


@pytest.mark.parametrize(
    ("text", "held"),
    [("2experts", (600,)), ("2/layer", (200, 600)), ("50%", (800,)), ("1kB", (1000,))],
)
def test_a_number_counts_experts_of_the_largest_layer(text: str, held: tuple[int, ...]) -> None:
    assert parse_capacity(text, UNEVEN).bytes_by_partition == held


BOTH = "is not a capacity. Did you mean '25%' of all expert bytes or '25experts'? Allowed:"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        # A number alone is none: both of its meanings are said.
        *((text, BOTH) for text in (25, "25", 25.0, " 25 ")),
        ("0.25", "is not a capacity. Did you mean '25%' of all expert bytes? Allowed:"),
        ("12.5", "is not a capacity. Did you mean '12.5%' of all expert bytes? Allowed:"),
        ("2267", "is not a capacity. Did you mean '2267experts'? Allowed:"),
        # What does not fit the model is refused with both sizes.
        *((small, "too small for one expert of 100 bytes") for small in ("8%", "99B", "0.05kB")),
        *((text, "asks for more than the 4 experts") for text in ("5/layer", "[3,1,5]/layer")),
        ("[3,1]/layer", "has 2 sizes, but the model has 3 MoE layers"),
        *((text, "one for each layer") for text in ("[3,0,1]/layer", "[3,x,1]/layer", "[]/layer")),
    ],
)
def test_what_is_no_capacity_or_does_not_fit_is_refused(given: object, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"capacity={given!r}")) as caught:
        parse_capacity(given, GEOMETRY)
    assert said in str(caught.value)


@given(text=st.text(max_size=12))
def test_any_text_is_either_a_capacity_or_a_value_error(text: str) -> None:
    try:
        capacity = parse_capacity(text, GEOMETRY)
    except ValueError as error:
        assert repr(text) in str(error)
    else:
        assert capacity.total_bytes >= 100
        assert capacity.per_layer == is_per_layer(text)


def test_geometry_refuses_what_does_not_fit_together() -> None:
    with pytest.raises(ValueError, match="top_k=5 must be positive, and top_k at most"):
        make_geometry(num_experts=4, top_k=5)
    with pytest.raises(ValueError, match="dense_bytes has 1 entries for num_layers=2"):
        make_geometry(2, dense_bytes=(1,))


def test_a_number_alone_has_the_unit_that_everyone_means() -> None:
    assert parse_bytes("64", "ram", unit="GB") == parse_bytes(64, "ram", unit="GB") == 64 * 10**9
    assert parse_bandwidth("25") == parse_bandwidth(25) == 25e9
    assert parse_bandwidth("51.2", "host_memory") == parse_bandwidth("51.2 GB/s") == 51.2e9
