"""What a run is made of beside the model, and the errors for what cannot run."""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval_moecache.algorithms.policy import Policy
from lm_eval_moecache.records.artifact import UseProfile
from lm_eval_moecache.records.emulation import RealModel
from lm_eval_moecache.records.geometry import Draft, Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.sizes import Capacity

SELF = "self:"
"""Begins the name of a draft that is the target itself at another precision: `self:int4`."""
PROMPT_LOOKUP = "prompt_lookup"
"""The draft that repeats what the prompt said."""


MOST_READS = 64
"""Requests that an expert may be read by."""
TOGETHER, AS_THEY_ARRIVE = EXECUTIONS = ("together", "as_they_arrive")
"""When an event's experts are executed: all of them once the last is there; or the resident ones
at once, and each absent one as it arrives, so that later arrivals hide behind that work."""
FLAT, CONTEXT = ATTENTIONS = ("flat", "context")
"""Whether a pass is charged for its tokens' attention to their contexts, and for the KV cache."""
PRIORITY, FIFO = LINKS = ("priority", "fifo")
"""Disciplines of the link: demands first, or everything in order of issue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a run is made of, beside the model."""

    policy: Policy
    capacity: Capacity
    hardware: Hardware
    seed: int = 0
    draft: Draft | None = None
    """The draft model of speculative decoding; None also where drafts come from the prompt."""
    link: str = PRIORITY
    """Whether demands overtake prefetches, and these are withdrawn when their event is over."""
    execute: str = TOGETHER
    """When an event's experts are executed (virtual clock only): one of `EXECUTIONS`."""
    reads_per_expert: int = 1
    """Requests that an expert is read by: its projections, where an engine reads these apart."""
    attention: str = FLAT
    """What attention is charged (virtual clock only): one of `ATTENTIONS`."""
    emulate: RealModel | None = None
    """The model whose sizes each layer is charged as (virtual clock only)."""
    warm: UseProfile | None = None
    """What the cache holds before the first request (virtual clock only); None for nothing."""
    throttle_bytes_per_s: float | None = None
    """What the real link is slowed down to (wall clock only); None for as fast as it is."""

    def __post_init__(self) -> None:
        if self.attention == CONTEXT and self.emulate is None:
            raise ValueError(
                f"attention={self.attention!r} needs emulate=, whose configuration says what heads "
                "and KV caches there are. Allowed with it: emulate=NAME, or the folder of the model"
                " itself; or attention='flat'."
            )

    @property
    def is_one_server(self) -> bool:
        """Whether the link moves one expert at a time, and all are executed together."""
        hardware = self.hardware
        many = hardware.link_lanes > 1 or self.reads_per_expert > 1
        slower = hardware.lane_rate < hardware.link_rate or hardware.load_overhead_s_per_byte > 0
        return self.execute == TOGETHER and not many and not slower

    def charged(self, own: Geometry) -> Geometry:
        """Return the sizes by which a model's layers are charged: its own, or the emulated."""
        return own if self.emulate is None else self.emulate.emulated_by(own)


def offline(algorithm: object) -> ValueError:
    """Build the error for an algorithm (or its class) that only a replay can run."""
    module = algorithm.__module__.split(".")
    return ValueError(
        f"{module[-2]}={module[-1]!r} needs to know the future, which only a replay does. Record "
        "the run with trace=DIR and give the file to `moecache replay`."
    )


def check_host(hardware: Hardware) -> None:
    """Refuse host compute where the profile does not say how fast the host is."""
    if not (hardware.host_flops and hardware.host_memory_bytes_per_s):
        raise ValueError(
            f"miss='host' needs to know the host, but hardware={hardware.name!r} has no "
            "host_flops and host_memory_bytes_per_s. Allowed: a profile with both "
            "(`moecache profile hardware` measures them), or another miss algorithm."
        )


def without_draft(algorithm: object) -> ValueError:
    """Build the error for a prefetcher that needs a draft model where there is none."""
    name = algorithm.__module__.rpartition(".")[2]
    return ValueError(
        f"prefetch={name!r} works while a draft model drafts, and there is none here. Allowed: a "
        "live run with draft= a folder, a hub id or self:int4, or a replay of such a run's trace."
    )
