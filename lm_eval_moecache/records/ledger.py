"""The ledger: every count of a run, per pass, and which requests each pass served."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import add, attrgetter, sub

GENERATE = "generate_until"
"""The kind of a request, in lm-eval's words, that has output tokens."""


@dataclass(slots=True, kw_only=True)
class Counters:
    """Everything that is counted; two of them can be added and subtracted, field by field.

    Lookups are of unique experts per event (requests). A new count is a field here and the lines
    that add to it: in `engine.core` (and a field of its `Count`), which serves lossless policies,
    and where `engine.virtual` and `engine.decide` serve the others. `report.metrics` says what is
    made of it.
    """

    requests: int = 0
    late: int = 0
    misses: int = 0
    collisions: int = 0
    token_requests: int = 0
    token_misses: int = 0
    prefetch_hits: int = 0
    predicted: int = 0
    predicted_right: int = 0
    predictable: int = 0
    """Requests of events that had a prediction: what recall divides by."""
    stall_s: float = 0.0
    link_busy_s: float = 0.0
    bytes_moved: int = 0
    evictions: int = 0
    lifetime_tokens: int = 0
    """Sum over evicted experts of the tokens processed while they were resident."""
    dropped: int = 0
    """(Token, expert) assignments left out: `token_requests` less these are executed."""
    unfaithful: int = 0
    """Executed assignments that the unmodified router did not choose."""
    substituted: int = 0
    low_precision: int = 0
    """Executed assignments whose expert was resident at a lower level than the best stored one."""
    avoided: int = 0
    """Absent experts of events for which a lossy algorithm found another answer than a load."""
    weighed_tokens: int = 0
    """Tokens, one for each layer, that a lossy algorithm may change and whose weights were seen."""
    lost_weight: float = 0.0
    """Of their weights, each token's summing to 1, what was dropped or given to a substitute."""
    host_executed: int = 0
    """Executed assignments whose expert ran on the host."""
    host_s: float = 0.0
    """Time in which the host worked."""
    host_wait_s: float = 0.0
    """Time in which the compute waited for the host's outputs and for nothing else."""
    draft_s: float = 0.0
    """Time of drafting at the beginning of a pass that verifies drafts; part of its duration."""
    drafted: int = 0
    """Tokens drafted for this pass to verify."""
    accepted: int = 0
    """Drafted tokens that it accepted, so that it gave one output token more."""

    def __add__(self, other: Counters) -> Counters:
        return Counters(**dict(zip(COUNTED, map(add, _VALUES(self), _VALUES(other)), strict=True)))

    def __sub__(self, other: Counters) -> Counters:
        difference = Counters()
        for name, value in zip(COUNTED, map(sub, _VALUES(self), _VALUES(other)), strict=True):
            if value:
                setattr(difference, name, value)
        return difference

    def count(self, more: Counters) -> None:
        """Add what another record has counted to this one."""
        for name, value in zip(COUNTED, _VALUES(more), strict=True):
            if value:
                setattr(self, name, getattr(self, name) + value)

    @property
    def hits(self) -> int:
        return self.requests - self.late - self.misses

    @property
    def executed(self) -> int:
        return self.token_requests - self.dropped


COUNTED = tuple(field.name for field in fields(Counters))
_VALUES = attrgetter(*COUNTED)


def total(records: Iterable[Counters]) -> Counters:
    """Return the sum of some records; float sums go in their order."""
    columns = zip(*map(_VALUES, records), strict=True)
    return Counters(**dict(zip(COUNTED, map(sum, columns), strict=False)))


@dataclass(slots=True)
class PassRecord(Counters):
    """What one pass over the model did."""

    index: int
    phase: str
    num_tokens: int
    start_s: float
    end_s: float = 0.0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def output_tokens(self) -> int:
        """Tokens that a pass of a generation gives: its own, and the drafts it accepted."""
        return self.accepted + 1


@dataclass(slots=True)
class RequestRecord:
    """One harness request and the passes that served it, in order."""

    index: int
    task: str
    kind: str
    prompt_tokens: int = 0
    output_tokens: int | None = None
    """Tokens generated, the closing one included; None for scoring requests."""
    passes: list[PassRecord] = field(default_factory=list)
    document: int | None = None
    """The document of the task that it asks about, where the harness says so."""
    place: int = 0
    """Its place among the requests of that document."""


class Ledger:
    """Collects the passes and requests of one run."""

    def __init__(self) -> None:
        self.passes: list[PassRecord] = []
        self.requests: list[RequestRecord] = []
        self._open: list[RequestRecord] = []
        self._num_seen = 0
        """Requests, those forgotten included: no two have had the same index."""

    def new_request(
        self,
        task: str,
        kind: str,
        prompt_tokens: int = 0,
        document: int | None = None,
        place: int = 0,
    ) -> RequestRecord:
        record = RequestRecord(
            self._num_seen, task, kind, prompt_tokens, document=document, place=place
        )
        self._num_seen += 1
        self.requests.append(record)
        return record

    def forget(self, last: list[RequestRecord]) -> None:
        """Leave these, the last requests, out of what is reported; their passes still count."""
        if last:
            del self.requests[-len(last) :]

    def serve(self, requests: list[RequestRecord]) -> None:
        """Attribute the passes that follow to these requests (an empty list: to none)."""
        self._open = requests

    def begin_pass(self, phase: str, num_tokens: int, now: float) -> PassRecord:
        record = PassRecord(len(self.passes), phase, num_tokens, now)
        self.passes.append(record)
        for request in self._open:
            request.passes.append(record)
        return record
