"""Pages of WikiText cut to their first characters."""

from __future__ import annotations

from typing import Any

from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

__all__ = ["openings", "process_results", "wikitext_detokenizer"]

NUM_CHARACTERS = 2000
"""Some 450 tokens."""


def openings(dataset: Any) -> Any:
    return dataset.map(lambda doc: {"page": doc["page"][:NUM_CHARACTERS]})
