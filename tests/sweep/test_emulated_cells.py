"""A sweep tells emulated cells and link disciplines apart, and knows that outputs are equal."""

from __future__ import annotations

import json

from lm_eval_moecache.harness.arguments import read_config
from lm_eval_moecache.sweep.identity import resolve
from lm_eval_moecache.sweep.sharing import OUTPUT_INVARIANT_KEYS


def test_a_cell_is_named_by_what_it_emulates_and_by_its_link() -> None:
    plain = resolve(read_config({}))
    assert "emulate" not in plain and "link" not in plain
    settings = ({"emulate": "OLMoE-1B-7B"}, {"emulate": "Mixtral-8x7B"}, {"link": "fifo"})
    texts = {
        json.dumps(resolve(read_config(each)), sort_keys=True, default=str) for each in settings
    }
    assert len(texts) == 3
    emulated = resolve(read_config({"emulate": "OLMoE-1B-7B"}))["emulate"]
    assert emulated["expert_weights"] == 3 * 2048 * 1024 and "source" not in emulated


def test_a_profile_that_says_nothing_of_its_host_is_the_cell_it_was() -> None:
    """Cells of before these figures existed keep their names, and so their runs."""
    hardware = resolve(read_config({"hardware": "phone-12gb"}))["hardware"]
    later = {"pass_overhead_s", "wait_overhead_s", "host_flops", "host_memory_bytes_per_s"}
    assert not {"layer_overhead_s", *later} & set(hardware)
    slow = resolve(read_config({"hardware": "specmd-a100"}))["hardware"]
    assert slow["layer_overhead_s"] == 0.03


def test_how_long_things_take_changes_no_output() -> None:
    assert {"emulate", "link", "hardware"} <= set(OUTPUT_INVARIANT_KEYS)
