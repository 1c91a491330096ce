"""Requests computed together and served separately: each as if it were alone in its batch.

What the experts compute with does not depend on the cache as long as the policy is lossless. A
row's passes are then kept, and served when it is the request's turn. Where decisions change the
computation, each row has an engine of its own, which serves its passes at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lm_eval_moecache.engine.engine import Engine, TokenPass
from lm_eval_moecache.records.arrays import IntArray
from lm_eval_moecache.records.event import Event
from lm_eval_moecache.trace.recorder import NotedPass


class RowPass(NamedTuple):
    """One pass of one row, of several tokens."""

    phase: str
    num_tokens: int
    positions: IntArray | None
    """Of its tokens in the sequence, where passes are charged by them."""
    events: Sequence[Event]
    """One per layer, without the number of their pass."""


@dataclass(slots=True)
class Row:
    """A request on its way through the model."""

    engine: Engine | None = None
    """Serves its passes as they are computed; None where they are kept."""
    passes: list[RowPass | TokenPass] = field(default_factory=list)
    noted: list[NotedPass] = field(default_factory=list)


def serve_kept(row: Row, engine: Engine) -> None:
    """Serve the kept passes of a row, in order, and forget them."""
    decoded: list[TokenPass] = []
    for kept in row.passes:
        if isinstance(kept, TokenPass):
            decoded.append(kept)
            continue
        engine.serve_decoded(decoded)
        decoded = []
        record = engine.begin_pass(kept.phase, kept.num_tokens, positions=kept.positions)
        for event in kept.events:
            engine.enter(event.layer, event.num_tokens)
            engine.run(event._replace(pass_index=record.index))
        engine.end_pass()
    engine.serve_decoded(decoded)
    row.passes.clear()
