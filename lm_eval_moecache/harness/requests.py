"""A request on its way through HFLM: the record it carries, its passes, and all ranks' requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from lm_eval.api.instance import Instance

from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.report.metrics import request_metrics

if TYPE_CHECKING:
    pass


RankRecords = tuple[list[RequestRecord], int]
"""A rank's requests, and the peak bytes of its cache."""


class RecordedStr(str):
    """A context that carries its request's record through HFLM's sorting and batching."""

    record: RequestRecord
    seed: int
    """Of what is drawn for the request."""

    def __new__(cls, text: str, record: RequestRecord, seed: int) -> RecordedStr:
        self = super().__new__(cls, text)
        self.record, self.seed = record, seed
        return self


class Ragged(list[list[int]]):
    """Rows of different lengths, in place of the tensor that HFLM makes a list of."""

    def tolist(self) -> list[list[int]]:
        return self


def cut_passes(record: RequestRecord) -> None:
    """Leave the passes of a generation's prompt and of its output tokens.

    Passes after a row's end served the other rows of its batch. The prompt's passes (several where
    `prefill_chunk_size` divides it) give one token together.
    """
    assert record.output_tokens is not None
    num_prefills = sum(p.phase == PREFILL for p in record.passes)
    del record.passes[max(num_prefills - 1, 0) + record.output_tokens :]


def fingerprint(tokens: list[int]) -> bytes:
    """Return a key of an input that does not depend on its right padding with zeros."""
    return np.trim_zeros(np.asarray(tokens, dtype=np.int64), "b").tobytes()


def publish(requests: Sequence[Instance], records: Sequence[RequestRecord]) -> None:
    """Put each request's metrics on its Instance, where the tasks of `task_configs/` read them."""
    for request, record in zip(requests, records, strict=True):
        request.moecache = request_metrics(record)


def without_padding(requests: Sequence[Any]) -> int:
    """Return how many of a rank's requests are not padding.

    A rank with fewer documents than others gets its last request again, so that all ranks make
    equally many calls.
    """
    if not requests:
        return 0
    last = requests[-1]
    same = sum(1 for _ in takewhile(lambda request: request is last, reversed(requests)))
    return len(requests) - same + min(same, last.repeats or 1)


def merge(ranks: Sequence[RankRecords]) -> RankRecords:
    """Join the ranks' requests, with passes renumbered consecutively, and take the highest peak."""
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
