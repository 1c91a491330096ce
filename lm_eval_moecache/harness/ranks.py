"""Data parallel: one cache per rank, and the requests of all ranks in one report.

`accelerate launch` starts a process per device; the harness divides the documents among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.trace.columns import NO_REQUEST

RankFigures = tuple[list[RequestRecord], int]
"""A rank's requests, and the most bytes that its cache held."""


class Ranks:
    """What the ranks of a run have in common: figures travel to the first along with the scores."""

    def __init__(self, count: int, own: Callable[[], RankFigures]) -> None:
        self.count, self._own = count, own
        self._gathered: list[RankFigures] | None = None
        self.has_run = False
        """Whether there have been requests since the figures were last sent."""

    def forget(self) -> None:
        """Drop what was gathered, and what there was to send: the counts begin at zero."""
        self._gathered, self.has_run = None, False

    def all_figures(self) -> list[RankFigures]:
        """Return every rank's figures: the first rank has them once the harness has gathered."""
        return [self._own()] if self._gathered is None else self._gathered

    def gather(self, send: Callable[..., Any], obj: Any, dst: int) -> Any:
        """Let HFLM's `send` gather the ranks' scores, with the figures going along."""
        # They are the whole ledger: sent once, and not with every task's scores.
        figures = self._own() if self.has_run else None
        self.has_run = False
        pairs = send((obj, figures), dst)
        if pairs is None:
            return None
        if any(sent is not None for _, sent in pairs):
            self._gathered = [sent or ([], 0) for _, sent in pairs]
        return [scores for scores, _ in pairs]

    def without_padding(self, requests: Sequence[Any]) -> int:
        """Return how many of the requests count.

        A rank with fewer documents than others is given its last request again, so that all ranks
        run equally often.
        """
        if self.count == 1 or not requests:
            return len(requests)
        last, same = requests[-1], 0
        for request in reversed(requests):
            if request is not last:
                break
            same += 1
        return len(requests) - same + min(same, last.repeats or 1)

    def filled_up(self, records: list[RequestRecord], count: int) -> list[RequestRecord]:
        """Return one record for each of `count` inputs.

        A rank with fewer windows of texts than others is given its first one again, which no
        request waits for.
        """
        if self.count == 1:
            return records
        missing = range(count - len(records))
        return [*records, *(RequestRecord(NO_REQUEST, "", "padding") for _ in missing)]


def merge(ranks: Sequence[RankFigures]) -> RankFigures:
    """Join the ranks' requests, with passes numbered through, and the largest of their peaks."""
    if len(ranks) == 1:
        return ranks[0]
    merged: list[RequestRecord] = []
    first = 0
    for requests, _ in ranks:
        passes = {p.index: p for request in requests for p in request.passes}
        for record in passes.values():
            record.index += first
        first += max(passes, default=-1) + 1
        merged += requests
    return merged, max(peak for _, peak in ranks)
