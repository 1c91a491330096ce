"""The setting of a run, everything but the model, and the errors for settings that cannot run."""

from __future__ import annotations

from dataclasses import dataclass

from lm_eval_moecache.algorithms.parameters import Algorithm
from lm_eval_moecache.algorithms.policy import Policy
from lm_eval_moecache.records.geometry import Draft, Geometry
from lm_eval_moecache.records.hardware import Hardware
from lm_eval_moecache.records.real_model import RealModel
from lm_eval_moecache.records.sizes import Capacity
from lm_eval_moecache.trace.use import UseProfile

SELF = "self:"
"""Prefix of a draft that is the target itself at another precision: `self:int4`."""
PROMPT_LOOKUP = "prompt_lookup"
"""The draft that looks up its tokens in the prompt."""

TOGETHER, AS_THEY_ARRIVE = EXECUTIONS = ("together", "as_they_arrive")
"""When an event's experts are executed: all once the last has arrived; or residents at once and
each absent expert as it arrives, so that later arrivals hide behind that work."""
NO_ATTENTION, CONTEXT = ATTENTIONS = ("none", "context")
"""Whether a pass is charged for its tokens' attention to their contexts and for the KV cache."""
PRIORITY, FIFO = LINKS = ("priority", "fifo")
"""Link disciplines: demands first, or everything in order of issue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The setting of a run: everything but the model."""

    policy: Policy
    capacity: Capacity
    hardware: Hardware
    seed: int = 0
    draft: Draft | None = None
    """The draft model of speculative decoding; None also for drafts looked up in the prompt."""
    link: str = PRIORITY
    """One of `LINKS`; `priority` also withdraws prefetches whose event is over."""
    execute: str = TOGETHER
    """When an event's experts are executed (virtual clock only): one of `EXECUTIONS`."""
    reads_per_expert: int = 1
    """Read requests per expert: more than one where an engine reads its projections separately."""
    attention: str = NO_ATTENTION
    """How attention is charged (virtual clock only): one of `ATTENTIONS`."""
    emulate: RealModel | None = None
    """The model whose sizes each layer takes (virtual clock only)."""
    warm: UseProfile | None = None
    """Use profile that fills the cache before the first request."""
    throttle_bytes_per_s: float | None = None
    """Throttle of the real link in bytes/s (wall clock only); None for its hardware speed."""

    def __post_init__(self) -> None:
        if self.attention == CONTEXT and self.emulate is None:
            raise ValueError(
                f"attention={self.attention!r} needs emulate=, whose configuration says what heads "
                "and KV caches there are. Allowed with it: emulate=NAME, or the folder of the model"
                " itself; or attention='none'."
            )

    @property
    def is_one_server(self) -> bool:
        """Whether the link moves one expert at a time, and all are executed together."""
        hardware = self.hardware
        many = hardware.link_lanes > 1 or self.reads_per_expert > 1
        slower = hardware.lane_rate < hardware.link_rate or hardware.load_overhead_s_per_byte > 0
        return self.execute == TOGETHER and not many and not slower

    def charged(self, own: Geometry) -> Geometry:
        """Return the geometry by which layers are charged: the model's own, or the emulated one."""
        return own if self.emulate is None else self.emulate.emulated_by(own)


def offline_error(algorithm: Algorithm | type[Algorithm]) -> ValueError:
    """Build the error for an algorithm (or its class) that only a replay can run."""
    return ValueError(
        f"{algorithm.label()} needs to know the future, which only a replay does. Record "
        "the run with trace=DIR and give the file to `moecache replay`."
    )


def check_host(hardware: Hardware) -> None:
    """Raise ValueError unless the hardware profile has the host's compute and memory rates."""
    if not (hardware.host_flops and hardware.host_memory_bytes_per_s):
        raise ValueError(
            f"miss='host' needs to know the host, but hardware={hardware.name!r} has no "
            "host_flops and host_memory_bytes_per_s. Allowed: a profile with both "
            "(`moecache profile hardware` measures them), or another miss algorithm."
        )


def no_draft_error(algorithm: Algorithm | type[Algorithm]) -> ValueError:
    """Build the error for a prefetcher that needs a draft model where there is none."""
    return ValueError(
        f"{algorithm.label()} works while a draft model drafts, and there is none here. Allowed: a "
        "live run with draft= a folder, a hub id or self:int4, or a replay of such a run's trace."
    )
