"""The ledger: all counts of a run by pass, and the passes that served each request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter

GENERATE = "generate_until"
"""lm-eval's name of the kind of request that has output tokens."""


@dataclass(slots=True, kw_only=True)
class Counters:
    """All counts; `total` adds them field by field.

    Lookups count unique experts per event (requests). A new count is a field here plus the line
    that adds to it in `engine.kernel`, which serves every policy and clock. `report.metrics`
    derives the reported figures.
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
    """Requests of events that had a prediction: the denominator of recall."""
    stall_s: float = 0.0
    link_busy_s: float = 0.0
    bytes_moved: int = 0
    evictions: int = 0
    lifetime_tokens: int = 0
    """Sum over evicted experts of the tokens processed while they were resident."""
    dropped: int = 0
    """(Token, expert) assignments left out; the rest of `token_requests` are executed."""
    unfaithful: int = 0
    """Executed assignments that the unmodified router did not choose."""
    substituted: int = 0
    low_precision: int = 0
    """Executed assignments whose expert was resident below the best stored precision."""
    avoided: int = 0
    """Absent experts that a lossy algorithm replaced or dropped instead of loading."""
    weighed_tokens: int = 0
    """Tokens, counted per layer, of events in which an expert was absent or the selection was
    changed, where a lossy algorithm acts and weights are known; not those it had nothing to do for.
    """
    lost_weight: float = 0.0
    """Share of those tokens' weights (1 per token) that was dropped or went to a substitute."""
    host_executed: int = 0
    """Executed assignments whose expert ran on the host."""
    host_s: float = 0.0
    """Seconds for which the host executed experts."""
    host_wait_s: float = 0.0
    """Seconds for which the compute waited only for the host's outputs."""
    draft_s: float = 0.0
    """Seconds of drafting at the start of a verify pass, a part of its duration."""
    drafted: int = 0
    """Tokens drafted for this pass to verify."""
    accepted: int = 0
    """Drafted tokens that it accepted; it gives one output token more than these."""

    @property
    def hits(self) -> int:
        """Requests whose expert was resident."""
        return self.requests - self.late - self.misses

    @property
    def executed(self) -> int:
        """(Token, expert) assignments executed."""
        return self.token_requests - self.dropped


COUNTED = tuple(field.name for field in fields(Counters))
_VALUES = attrgetter(*COUNTED)


def total(records: Iterable[Counters]) -> Counters:
    """Return the sum of some records; floats are added in their order."""
    columns = zip(*map(_VALUES, records), strict=True)
    return Counters(**dict(zip(COUNTED, map(sum, columns), strict=False)))


@dataclass(slots=True)
class PassRecord(Counters):
    """The counts and times of one pass over the model."""

    index: int
    phase: str
    num_tokens: int
    start_s: float
    end_s: float = 0.0

    @property
    def duration_s(self) -> float:
        """Seconds from the start of the pass to its end, drafting included."""
        return self.end_s - self.start_s

    @property
    def output_tokens(self) -> int:
        """Output tokens of a pass of a generation: its own, plus the drafts it accepted."""
        return self.accepted + 1


@dataclass(slots=True)
class RequestRecord:
    """One harness request and the passes that served it, in order."""

    index: int
    task: str
    kind: str
    prompt_tokens: int = 0
    output_tokens: int | None = None
    """Tokens generated, the end token included; None for scoring requests."""
    passes: list[PassRecord] = field(default_factory=list)
    document: int | None = None
    """Index of its document in the task, where the harness gives one."""
    place: int = 0
    """Its index among the requests of that document."""


class Ledger:
    """Collects the passes and requests of one run."""

    def __init__(self) -> None:
        self.passes: list[PassRecord] = []
        self.requests: list[RequestRecord] = []
        self._open: Sequence[RequestRecord] = ()
        self._num_seen = 0
        """Requests so far, forgotten ones included, so that no index repeats."""

    def new_request(
        self,
        task: str,
        kind: str,
        prompt_tokens: int = 0,
        document: int | None = None,
        place: int = 0,
    ) -> RequestRecord:
        """Enter a request and return its record; `serve` attributes passes to it."""
        record = RequestRecord(
            self._num_seen, task, kind, prompt_tokens, document=document, place=place
        )
        self._num_seen += 1
        self.requests.append(record)
        return record

    def forget(self, last: list[RequestRecord]) -> None:
        """Exclude these, the last requests, from reports; their passes still count."""
        if last:
            del self.requests[-len(last) :]

    def merge(self, passes: Sequence[PassRecord], requests: Sequence[RequestRecord]) -> None:
        """Enter passes that another ledger has counted, as those of these requests."""
        for index, record in enumerate(passes, len(self.passes)):
            record.index = index
        self.serve(requests)
        self.enter(passes)
        self.serve(())

    def serve(self, requests: Sequence[RequestRecord]) -> None:
        """Attribute the following passes to these requests (to none, if empty)."""
        self._open = requests

    def begin_pass(self, phase: str, num_tokens: int, now: float) -> PassRecord:
        """Enter a pass that begins at `now` (s), attribute it, and return its record."""
        record = PassRecord(len(self.passes), phase, num_tokens, now)
        self.enter([record])
        return record

    def enter(self, passes: Sequence[PassRecord]) -> None:
        """Enter passes, and attribute them."""
        self.passes += passes
        for request in self._open:
            request.passes += passes
