"""In which order requests are served, and how many are computed together."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from lm_eval_moecache.engine.engine import Engine
from lm_eval_moecache.harness.arguments import Config
from lm_eval_moecache.records.ledger import RequestRecord
from lm_eval_moecache.trace.recorder import Recorder

logger = logging.getLogger(__name__)
AUTO = "auto"
ON_A_CPU = 16
"""Rows of `batch_size=auto` on a CPU, where more of them gain nothing."""
_CHUNK = 4
"""Batches whose requests are sorted by length together, so that those of a batch are alike."""


class Turns(NamedTuple):
    """How the requests of a run are computed and served."""

    apart: bool
    """Whether each request is served as if it were alone; else those of a batch share the cache."""
    most: int | None
    """The most requests computed together; None for `batch_size`."""
    why: str
    """Why `batch_size` does not decide; empty where it does."""


def turns_of(config: Config, engine: Engine, recorder: Recorder | None, drafts: bool) -> Turns:
    """Return the turns of a setting; `drafts` is whether a draft model drafts."""
    if config.streams > 1:
        return Turns(False, config.streams, f"streams={config.streams} of them share the cache")
    reads_texts = engine.rules.prefetch.predicts_pass
    for is_so, why in (
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
            return Turns(False, 1, why)
    if not engine.can_defer and config.cache_reset == "never":
        return Turns(True, 1, "cache_reset=never: each answer depends on the request before")
    return Turns(True, None, "")


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


def in_turn(
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


def chunk_size(turns: Turns, batch: int) -> int:
    """Return of how many requests a part is sorted and batched together."""
    if not turns.apart or turns.most is not None:
        return turns.most or 1
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
