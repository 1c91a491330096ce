"""Which algorithms make sense together: refusals that name the pair and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Chosen(Protocol):
    """The algorithm of one axis with its parameters: a `policy.Choice`."""

    @property
    def axis(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def algorithm(self) -> Any: ...
    @property
    def parameters(self) -> Mapping[str, Any]: ...


def check_pairs(choices: Mapping[str, Chosen], is_lossless: bool) -> None:
    """Refuse pairings that make no sense, by what the algorithms say of themselves."""
    for axis, choice in choices.items():
        for other, allowed in choice.algorithm.pairs_with.items():
            name = choices[other].name
            # An outside algorithm, given by its class_path, is its author's responsibility.
            if name not in allowed and "." not in name:
                raise ValueError(
                    f"{other}={name!r} does not go with {axis}={choice.name!r}: "
                    f"{choice.algorithm.pairs_because}. Allowed: {', '.join(allowed)}."
                )
    for choice in (choices["prefetch"], choices["eviction"]):
        if choice.algorithm.is_offline and not is_lossless:
            is_routed = choices["routing"].algorithm.is_lossless
            lossy = choices["miss"] if is_routed else choices["routing"]
            raise ValueError(
                f"{lossy.axis}={lossy.name!r} does not go with {choice.axis}={choice.name!r}, "
                "which knows the future of the router's own choices; lossy algorithms change them. "
                "Allowed: routing=standard with miss=fetch."
            )
    _check_late(choices["miss"], choices["prefetch"])


def _check_late(miss: Chosen, prefetch: Chosen) -> None:
    if miss.parameters.get("late") == "await" and not prefetch.algorithm.is_active:
        raise ValueError(
            f"miss.late='await' has no effect with prefetch={prefetch.name!r}, which lets nothing "
            "be on its way. Leave it out, or choose another prefetch algorithm."
        )
