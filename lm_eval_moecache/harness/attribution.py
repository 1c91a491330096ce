"""Whose a request is, on its way through HFLM's sorting and batching."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from lm_eval.api.instance import Instance

from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.report.metrics import request_metrics


class RecordedStr(str):
    """A context that remembers the record of its request."""

    record: RequestRecord

    def __new__(cls, text: str, record: RequestRecord) -> RecordedStr:
        self = super().__new__(cls, text)
        self.record = record
        return self


def distinct(records: list[RequestRecord]) -> list[RequestRecord]:
    """Drop repeats (two windows of one text in one batch) and keep the order."""
    return list({record.index: record for record in records}.values())


def fingerprint(tokens: list[int]) -> bytes:
    """Identify an input whether or not it has been padded on the right with zeros."""
    return np.trim_zeros(np.asarray(tokens, dtype=np.int64), "b").tobytes()


def publish(requests: Sequence[Instance], records: Sequence[RequestRecord]) -> None:
    """Put each request's figures where the tasks of `task_configs/` look for them."""
    for request, record in zip(requests, records, strict=True):
        request.moecache = request_metrics(record)
