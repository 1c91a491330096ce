"""Which settings go with which clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval_moecache.algorithms.policy import Policy
from lm_eval_moecache.engine.setting import FIFO

_OF_VIRTUAL_TIME = {
    "emulate": "which moves and times the model's own experts",
}
"""Key -> why the wall clock cannot do it."""


def check_clock(choices: Mapping[str, str], given: Mapping[str, Any], policy: Policy) -> None:
    """Refuse keys that belong to the other clock, and what the wall clock cannot do."""
    if choices["clock"] == "virtual":
        for key in ("store", "store_dir"):
            if key in given:
                raise ValueError(
                    f"{key}={given[key]!r} has no effect with clock='virtual', where nothing is "
                    "moved. Allowed with it: clock=wall."
                )
        return
    if "hardware" in given:
        raise ValueError(
            f"hardware={given['hardware']!r} has no effect with clock='wall', which measures this "
            "machine. Allowed with it: bandwidth, which slows the real link down; or clock=virtual."
        )
    if choices["link"] == FIFO:
        raise ValueError(
            "link='fifo' does not go with clock='wall', whose demands always go first. Allowed "
            "with it: clock=virtual."
        )
    for key, reason in _OF_VIRTUAL_TIME.items():
        if key in given:
            raise ValueError(
                f"{key}={given[key]!r} does not go with clock='wall', {reason}. Allowed with it: "
                "clock=virtual."
            )
    if "store_dir" in given and choices["store"] != "disk":
        raise ValueError(
            f"store_dir={given['store_dir']!r} has no effect with store='ram'. Allowed with it: "
            "store=disk."
        )
    if policy.miss.algorithm.uses_host and choices["scoring"] == "scan":
        raise ValueError(
            f"scoring='scan' does not go with miss={policy.miss.name!r} and clock='wall': who is "
            "sooner done, host or link, shows only while a token is served, and all tokens of a "
            "text are decided first. Allowed with scan: miss=fetch, or clock=virtual."
        )
