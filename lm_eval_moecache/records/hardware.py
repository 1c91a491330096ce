"""Hardware profiles: the figures of a device and its link, from YAML, each with its source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lm_eval_moecache.records.errors import unknown
from lm_eval_moecache.records.files import is_file, read_yaml
from lm_eval_moecache.records.sizes import parse_bandwidth

PROFILE_DIR = Path(__file__).resolve().parent.parent / "hardware"
DEFAULT_PROFILE = "a100-5GBps"
RENAMED = {"a100-5gbps": "a100-5GBps"}
"""The name under which earlier releases recorded a profile -> its name now."""

ZERO_OR_MORE = (
    *("link_latency_s", "kernel_overhead_s"),
    *("layer_overhead_s", "pass_overhead_s", "wait_overhead_s"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One device and its host. FLOP/s are at the compute dtype; the latency is per transfer."""

    name: str
    peak_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float
    kernel_overhead_s: float
    memory_bytes: float
    layer_overhead_s: float = 0.0
    """Seconds per layer and pass of a stack that is slower than its kernels, beside those.

    The bookkeeping of a policy belongs here: on a wall clock it is real.
    """
    pass_overhead_s: float = 0.0
    """Seconds per pass of what a stack does outside its layers: positions, masks, the output."""
    wait_overhead_s: float = 0.0
    """Seconds that each wait for the link costs the compute beside the transfers themselves: the
    request is handed over, the compute wakes, and what it reads then is in no cache any more.
    """
    host_flops: float | None = None
    host_memory_bytes_per_s: float | None = None
    """Where misses are computed on the host; None where the profile does not say."""
    source: dict[str, str] | str = ""

    def __post_init__(self) -> None:
        for key in ("peak_flops", "memory_bytes_per_s", "link_bytes_per_s", "memory_bytes"):
            if not getattr(self, key) > 0:
                raise ValueError(
                    f"hardware {self.name!r}: {key}={getattr(self, key)!r} must be above 0."
                )
        for key in ("host_flops", "host_memory_bytes_per_s"):
            if getattr(self, key) is not None and not getattr(self, key) > 0:
                raise ValueError(
                    f"hardware {self.name!r}: {key}={getattr(self, key)!r} must be above 0."
                )
        for key in ZERO_OR_MORE:
            if not getattr(self, key) >= 0:
                raise ValueError(
                    f"hardware {self.name!r}: {key}={getattr(self, key)!r} must be 0 or more."
                )


def profile_names() -> list[str]:
    return sorted(path.stem for path in PROFILE_DIR.glob("*.yaml"))


def canonical_name(name: str) -> str:
    """Return a shipped profile's name as it is spelled now, and any other text as it is."""
    return next((each for each in profile_names() if each.lower() == name.lower()), name)


def load_hardware(name: str, bandwidth: str | None = None) -> Hardware:
    """Load a profile by name, in upper or lower case, or by path.

    `bandwidth` (`5GB/s`) replaces its link's. Raises ValueError for what is not there.
    """
    if str(name).endswith((".yaml", ".yml")):
        path = Path(name)
        if not is_file(path):
            raise ValueError(f"hardware={name!r}: there is no such file.")
    else:
        path = PROFILE_DIR / f"{canonical_name(name)}.yaml"
        if path.stem not in profile_names():
            raise unknown("hardware", name, profile_names())
    hardware = _read(path)
    if bandwidth is None:
        return hardware
    source = hardware.source
    if not isinstance(source, dict):
        source = {"profile": source} if source else {}
    return replace(
        hardware,
        link_bytes_per_s=parse_bandwidth(bandwidth),
        source={**source, "link_bytes_per_s": f"given for this run: bandwidth={bandwidth}"},
    )


def _read(path: Path) -> Hardware:
    from lm_eval_moecache.records.schemas.base import check
    from lm_eval_moecache.records.schemas.hardware import hardware_schema

    data = read_yaml(path, f"hardware={str(path)!r}")
    if not isinstance(data, dict):
        raise ValueError(f"hardware={str(path)!r} must hold a mapping of the profile's fields.")
    found = check(hardware_schema(Hardware), data, f"hardware file {path.name}")
    return Hardware(**dict(found))
