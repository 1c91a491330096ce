"""Requests on their way through HFLM: which are computed together, and in which order served; the
record that each carries, its passes, and all ranks' requests."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from lm_eval.api.instance import Instance

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.records.event import PREFILL
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.report.metrics import request_metrics
from lm_eval_moecache.trace.recorder import Recorder

AUTO = "auto"
ON_A_CPU = 16
"""Rows of `batch_size=auto` on a CPU, where more of them gain nothing."""
_CHUNK = 4
"""Batches whose requests are sorted by length together, so that those of a batch are alike."""
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


# --- which requests are computed together, and in which order they are served ---


class BatchPlan(NamedTuple):
    """How the requests of a run are computed and served."""

    isolated: bool
    """Whether each request is served as if it were alone; else those of a batch share the cache."""
    max_rows: int | None
    """The most requests computed together; None for `batch_size`."""
    reason: str
    """Why `batch_size` does not decide; empty where it does."""


def batch_plan_of(
    config: Config, engine: Engine, recorder: Recorder | None, drafts: bool
) -> BatchPlan:
    """Return the plan of a setting; `drafts` is whether a draft model drafts."""
    if config.streams > 1:
        return BatchPlan(False, config.streams, f"streams={config.streams} of them share the cache")
    reads_texts = engine.rules.prefetch.predicts_pass
    for is_so, reason in (
        (config.clock == "wall", "clock=wall measures one stream (streams=N for more)"),
        (drafts or config.draft is not None, "a draft follows one request at a time"),
        (config.scoring == "scan", "scoring=scan routes one text token after token"),
        (reads_texts, f"prefetch={config.policy.prefetch.name} reads one text at a time"),
        (
            recorder is not None and recorder.reads_hidden,
            "trace= records a prefetcher that reads hidden states",
        ),
    ):
        if is_so:
            return BatchPlan(False, 1, reason)
    if not engine.can_defer and config.cache_reset == "never":
        return BatchPlan(True, 1, "cache_reset=never: each answer depends on the request before")
    return BatchPlan(True, None, "")


def whole_documents(
    documents: Sequence[Hashable], inputs: Sequence[Hashable], least: int
) -> Iterator[slice]:
    """Cut a sequence of requests into parts of whole documents, of `least` inputs or more.

    Requests of equal input share a forward. That they do must not depend on what else is computed,
    so that documents with an input in common come in different parts.
    """
    start, owners = 0, dict[Hashable, Hashable]()
    first = 0
    for index, document in enumerate(documents):
        if index and document != documents[index - 1]:
            first = index
        clashes = owners.get(inputs[index], document) != document
        if first > start and (clashes or (first == index and len(owners) >= least)):
            yield slice(start, first)
            start = first
            owners = {inputs[place]: document for place in range(start, index)}
        owners[inputs[index]] = document
    if len(documents):
        yield slice(start, len(documents))


def in_document_order(
    records: Sequence[RequestRecord],
    inputs: Sequence[Sequence[int]],
    documents: Sequence[Hashable],
) -> list[RequestRecord]:
    """Return requests in the order they are served: by document, and in each as HFLM has them."""
    first = {document: place for place, document in reversed([*enumerate(documents)])}
    places = [
        (first[document], -len(tokens), tuple(tokens), place)
        for place, (document, tokens) in enumerate(zip(documents, inputs, strict=True))
    ]
    return [records[place] for *_, place in sorted(places)]


def chunk_size(plan: BatchPlan, batch: int) -> int:
    """Return of how many requests a part is sorted and batched together."""
    if not plan.isolated or plan.max_rows is not None:
        return plan.max_rows or 1
    return _CHUNK * batch


class Seeds:
    """A seed for the random draws of each request, whatever else is computed."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, int | None, int]] = Counter()

    def next(self, record: RequestRecord) -> int:
        """Return the seed of a request, which changes with its repetitions in a task."""
        identity = record.task, record.document, record.place
        text = f"{torch.initial_seed()} {identity} {self._seen[identity]}"
        self._seen[identity] += 1
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
