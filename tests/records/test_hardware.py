"""Hardware profiles: loaded by name or path, checked field by field."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from lm_eval_moecache.records.cards import chip_of, chips
from lm_eval_moecache.records.hardware import Hardware, load_hardware, profile_names, same_card_note

GOOD = {
    "name": "mine",
    "peak_flops": 1e12,
    "memory_bytes_per_s": "1e11",
    "link_bytes_per_s": 1e9,
    "link_latency_s": 0,
    "kernel_overhead_s": 0.0,
    "memory_bytes": 1e10,
}


def write(folder: Path, **changes: object) -> str:
    data = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_loads_and_says_where_each_figure_comes_from(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    changed_fields = {f.name for f in fields(Hardware) if getattr(hardware, f.name) != f.default}
    figures = changed_fields - {"name", "source"}
    assert isinstance(hardware.source, dict)
    assert set(hardware.source) == figures


def test_a_path_is_read_and_numbers_written_as_text_are_numbers(tmp_path: Path) -> None:
    hardware = load_hardware(write(tmp_path))
    assert (hardware.memory_bytes_per_s, hardware.link_latency_s) == (1e11, 0.0)


def test_bandwidth_replaces_the_link_and_nothing_else_and_says_so(tmp_path: Path) -> None:
    profile, faster = load_hardware("a100-5GBps"), load_hardware("a100-5GBps", "32GB/s")
    assert faster.link_bytes_per_s == 32e9
    same_fields = {f.name for f in fields(Hardware)} - {"link_bytes_per_s", "source"}
    assert all(getattr(profile, name) == getattr(faster, name) for name in same_fields)
    assert "bandwidth=32GB/s" in faster.source["link_bytes_per_s"]
    assert {**faster.source, "link_bytes_per_s": ""} == {**profile.source, "link_bytes_per_s": ""}
    for text in ("a datasheet", ""):
        hardware = load_hardware(write(tmp_path, source=text), "32GB/s")
        assert "bandwidth=32GB/s" in hardware.source["link_bytes_per_s"]
        assert hardware.source.get("profile", "") == text


def test_a_given_bandwidth_is_reached_whole_by_one_request_and_by_all(tmp_path: Path) -> None:
    slow = write(tmp_path, link_efficiency=0.5, link_lanes=4, link_lane_bytes_per_s=2e8)
    own, given = load_hardware(slow), load_hardware(slow, "2GB/s")
    assert (own.link_rate, own.lane_rate) == (5e8, 2e8)
    assert (given.link_rate, given.lane_rate) == (2e9, 2e9)


def test_a_card_under_two_names_says_which_machine_each_is() -> None:
    for name, own in (("rtx-4090", "the server of two papers"), ("rtx-4090-24gb", "a desktop")):
        note = same_card_note(name)
        assert note.startswith(f"{name} is {own}")
        assert "rtx-4090 is the server" in note and "rtx-4090-24gb is a desktop" in note
    assert {name for name in profile_names() if same_card_note(name)} == {
        *("rtx-4090", "rtx-4090-24gb"),
    }


def test_a_chip_has_the_sizes_that_it_is_sold_with_and_the_figures_of_its_profiles() -> None:
    with pytest.raises(ValueError, match="m1-max is sold with 32, 64 GB, not 48"):
        load_hardware("M1 Max 48GB")
    assert load_hardware("GB10").name == "dgx-spark"
    assert load_hardware("Framework Desktop").name == "strix-halo"
    for name in profile_names():
        chip = chip_of(name)
        if chip is not None and name != "strix-halo":  # its rate is a measured one
            profile = load_hardware(name)
            for key, figure in chip.figures.items():
                own = getattr(profile, key)
                assert own is None or name in chips() or figure == pytest.approx(own, rel=0.02), (
                    name
                )


def test_an_unknown_card_has_the_nearest_names_and_how_to_give_ones_own() -> None:
    with pytest.raises(ValueError, match="rtx-409") as caught:
        load_hardware("rtx-409")
    first, near, own = str(caught.value).splitlines()
    assert "Did you mean 'rtx-4090'?" in first and "rtx-4090-d" in near and "FILE.yaml" in own
